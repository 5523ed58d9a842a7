"""What is wrong with the values of a run, said before anything loads. No heavy imports here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from kvbench.budget import Budget
from kvbench.checks import check_choice, check_whole
from kvbench.config import ModelConfig, RunConfig
from kvbench.errors import InputError
from kvbench.suggest import one_of
from kvbench.validate_method import check_method, protected
from kvbench.validate_task import check_task

LARGEST_SEED = 2**32 - 1  # what every random generator in use accepts


def validate(run: RunConfig) -> None:
    """Raises InputError with the key, the value and what is allowed for the first value that cannot be right."""
    budget = Budget.parse(run.budget)
    check_method(run.method)
    check_task(run.task)
    _check_model(run.model)
    check_choice("protocol", run.protocol.name, ("blind", "aware", "swapped"))
    check_choice("tracker", run.tracker.name, ("none", "wandb"))
    check_choice("tracker.mode", run.tracker.mode, ("online", "offline", "disabled"))
    check_choice("budget_scope", run.budget_scope, ("context", "prompt"))
    check_choice("first_token", run.first_token, ("compressed", "full"))
    check_choice("truncation", run.truncation, ("document", "official"))
    check_choice("positions", run.positions, ("original", "compact"))
    check_choice("dtype", run.dtype, ("auto", "float32", "bfloat16", "float16"))
    _check_device(run.device)
    check_whole("seed", run.seed, 0, LARGEST_SEED)
    for key in ("limit", "max_new_tokens", "max_prompt_tokens"):
        if getattr(run, key) is not None:
            check_whole(key, getattr(run, key), 1)
    _check_folders(run)
    by_bytes = _check_bytes(run)
    if not by_bytes:
        _check_room(run.method, budget)
    _check_combinations(run)


def _check_device(device: str) -> None:
    if device in ("auto", "cpu", "cuda", "mps") or re.fullmatch(r"cuda:(0|[1-9]\d{0,3})", device, re.ASCII):
        return
    raise InputError("device", device, "is not a device.", one_of(device, ["auto", "cuda", "cuda:0", "mps", "cpu"]))


def _check_model(model: ModelConfig) -> None:
    check_choice("model.source", model.source, ("hub", "folder", "gguf", "random"))
    if not model.name.strip() or model.name == "???":
        raise InputError("model.name", model.name, "is empty.", "Give the model a name: it is shown in every table.")
    for key in ("window", "official_max_length"):
        if getattr(model, key) is not None:
            check_whole(f"model.{key}", getattr(model, key), 1)
    what = {
        "hub": "its id on the hub (org/name)",
        "folder": "the folder with its config.json",
        "gguf": "the .gguf file",
    }
    if model.source in what and not model.path:
        fix = f"Set model.path to {what[model.source]}."
        raise InputError("model.path", model.path, f"is needed for model.source={model.source}.", fix)
    if model.source in ("folder", "gguf"):
        path = os.path.expanduser(str(model.path))
        if not (os.path.isdir(path) if model.source == "folder" else os.path.isfile(path)):
            reason = "is not a folder." if model.source == "folder" else "is not a file."
            raise InputError("model.path", model.path, reason, f"Give {what[model.source]}.")


def _check_folders(run: RunConfig) -> None:
    if not re.fullmatch(r"\w[\w.+=@-]{0,99}", run.experiment):
        allowed = "Allowed: one folder name of letters, digits and . _ + = @ - that starts with a letter or digit."
        raise InputError("experiment", run.experiment, "is not a safe folder name.", allowed)
    if not run.runs.strip():
        raise InputError("runs", run.runs, "is empty.", "Give the folder that results go to.")
    for folder in (run.runs, os.path.join(run.runs, run.experiment)):
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise InputError("runs", run.runs, f"has {folder}, which is a file.", "Give another folder.")


def _check_bytes(run: RunConfig) -> bool:
    """Is the budget given in bytes? InputError if it cannot be."""
    if run.budget_bytes is None and run.match is None:
        return False
    if run.budget_bytes is not None and run.match is not None:  # one may come from a file, where no override tells
        reason = f"and budget_bytes={run.budget_bytes} both say how much may be kept."
        raise InputError("match", matched(run.match), reason, "Set one of them to null.")
    key, value = ("budget_bytes", run.budget_bytes) if run.match is None else ("match", matched(run.match))
    if run.match is None:
        check_whole(key, value, 1)
    else:
        check_method(run.match)
        if run.match.get("scorer") is not None or run.match["codec"]["_target_"].endswith(".Plain"):
            reason = "has a size that a budget decides, or none to match."
            raise InputError(key, value, reason, "Choose a method that stores everything smaller: kivi2, kivi4.")
    if run.method.get("prefill") == "streaming":
        reason = "needs a prompt that is computed in full first, which method.prefill=streaming never does."
        raise InputError(key, value, reason, "Give a budget, or method.prefill=full.")
    return True


def matched(match: Any) -> Any:
    """The name of the method that ``match`` is, once frozen, the configuration of."""
    return match.get("name") if isinstance(match, Mapping) else match


def _check_room(method: Mapping[str, Any], budget: Budget) -> None:
    """What is always kept must leave room in a budget of whole entries for something to be chosen."""
    sinks, recent = protected(method)
    if budget.kind != "entries" or method.get("scorer") is None or sinks + recent < budget.count:
        return
    name = next((key for key in ("window", "sinks") if key in method), None)
    smaller = f"a method.{name} that leaves room" if name else "smaller method.protect values"
    reason = (
        f"leaves nothing to choose: {method['name']} always keeps {sinks + recent} entries "
        f"(method.protect: {sinks} sinks, {recent} recent)."
    )
    raise InputError("budget", budget, reason, f"Allowed: a budget above {sinks + recent}, or {smaller}.")


def _check_combinations(run: RunConfig) -> None:
    if run.method.get("prefill") == "streaming" and run.first_token == "full":
        reason = "wants a first token from the uncompressed prompt, which method.prefill=streaming never has."
        raise InputError("first_token", "full", reason, "Use first_token=compressed, or method.prefill=full.")
    if run.question_evictable and run.budget_scope != "prompt":
        reason = "lets question entries compete for a budget that does not count them (budget_scope=context)."
        raise InputError("question_evictable", "true", reason, "Add budget_scope=prompt, or leave it false.")
