"""What makes two cells the same cell: everything that can change a number, and nothing of where or how it runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from kvbench.results.files import plain

# Raise by one whenever a change of the code changes numbers that older versions would give otherwise: nothing that was
# recorded before is then taken for the new cell.
NUMBERS_VERSION = 2

# Keys that cannot change a number. What is not listed is part of the identity, so that a key added later makes cells
# differ (at worst something runs twice) until somebody says here that it does not matter.
NOT_NUMBERS_RUN = frozenset(
    {"device", "dtype", "runs", "experiment", "limit", "fail_fast", "tracker", "dump_prompts", "budget"}
)  # dtype: the resolved one is passed in; budget: written in one spelling
NOT_NUMBERS_MODEL = frozenset(
    {"name", "source", "path", "revision", "allow_pickle", "chat_template"}
)  # the content hashes of the model and of the template stand for them
NOT_NUMBERS_TASK = frozenset({"path", "samples"})  # the data's hash stands for the path; more samples extend a task
BUDGET_KEYS = frozenset({"budget", "budget_bytes", "match"})

LABEL_PART = 40  # characters kept of a name in a folder's label


def cell_identity(
    run: Any, *, model_sha256: str, data_sha256: str, template_sha256: str, dtype: str, attention: str = "fused"
) -> dict[str, Any]:
    """The identity of the cell that ``run`` (a RunConfig, or its dict) describes, as JSON values.

    ``dtype`` is the resolved one ("bfloat16"), ``attention`` the engine's attention path; the hashes are those of the
    model's, the data's and the chat template's content. Keys that are null are left out, so that an optional key added
    later does not rename older cells.
    """
    config = plain(run)
    hidden = NOT_NUMBERS_RUN if applies_budget(config["method"]) else NOT_NUMBERS_RUN | BUDGET_KEYS
    identity = {key: value for key, value in config.items() if key not in hidden and value is not None}
    identity |= {
        "model": without(config["model"], NOT_NUMBERS_MODEL) | {"sha256": model_sha256},
        "task": without(config["task"], NOT_NUMBERS_TASK) | {"sha256": data_sha256},
        "budget": budget_text(config),
        "template_sha256": template_sha256,
        "dtype": dtype,
        "attention": attention,
        "numbers_version": NUMBERS_VERSION,
    }
    return identity


def without(config: Mapping[str, Any] | None, hidden: frozenset[str]) -> dict[str, Any]:
    """``config`` less the keys that are ``hidden`` and those that are null."""
    return {key: value for key, value in (config or {}).items() if key not in hidden and value is not None}


def cell_hash(identity: Mapping[str, Any]) -> str:
    """The first 10 hex digits of the SHA-256 of the identity's canonical JSON."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:10]


def cell_label(run: Any) -> str:
    """``<model>-<method>-<protocol>-b<budget>``, safe in every file system; the hash beside it tells cells apart."""
    config = plain(run)
    method = config["method"] or {}
    names = [config["model"]["name"], method.get("name", "method"), config["protocol"]["name"]]
    text = budget_text(config)
    budget = [text if "=" in text else f"b{text}"] if applies_budget(method) else []
    return "-".join(file_name(part) for part in [*names, *budget])


def file_name(text: str) -> str:
    """``text`` with every run of characters beyond A-Z, a-z, 0-9, ``.``, ``_``, ``-`` as one ``_``, at most 40 long
    and never beginning with a dot."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(text))[:LABEL_PART].lstrip(".") or "_"


def applies_budget(method: Mapping[str, Any] | None) -> bool:
    """False for a method that drops nothing: a budget cannot change its cells, so a sweep must not repeat them."""
    method = method or {}
    scores_nothing = "scorer" in method and method["scorer"] is None
    return not (scores_nothing or method.get("name") == "full" or method.get("evicts", True) is False)


def budget_text(config: Mapping[str, Any]) -> str:
    """The budget in one spelling: ``128``, ``0.875`` (also for "0.8750"), ``full``, ``bytes=4096``, ``match=kivi2``."""
    if not applies_budget(config.get("method")):
        return "full"
    if config.get("budget_bytes") is not None:
        return f"bytes={config['budget_bytes']}"
    if config.get("match") is not None:
        return f"match={config['match']['name']}"
    text = str(config["budget"]).strip()
    try:
        # Decimal keeps every digit that was written: 0.875 and 0.88 differ, 0.5 and 0.50 do not.
        return format(Decimal(text).normalize(), "f")
    except InvalidOperation:
        return text


def budget_value(config: Mapping[str, Any]) -> int | float | str:
    """The budget as tables show and sort it: a number, or ``full``."""
    text = budget_text(config)
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return int(number) if number == number.to_integral_value() else float(number)
