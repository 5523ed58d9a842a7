"""A cell made ready to run: its model, task, method and identity are known, nothing expensive has started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hydra.utils
import torch
from hydra.errors import InstantiationException

from kvbench.budget import Budget
from kvbench.config import RunConfig
from kvbench.engine.attention import attention_path
from kvbench.errors import InputError
from kvbench.methods import Method, build
from kvbench.models import ModelSource, open_model, resolve_device, resolve_dtype
from kvbench.prompts import PromptEncoder
from kvbench.protocols import Switches
from kvbench.results.identity import cell_hash, cell_identity
from kvbench.tasks.sample import Sample, Task


@dataclass(frozen=True)
class Cell:
    """One number in a table, ready to be computed."""

    run: RunConfig
    source: ModelSource
    encoder: PromptEncoder
    task: Task
    method: Method
    match: Method | None  # whose bytes the method may hold
    switches: Switches
    budget: Budget
    by_bytes: bool  # is the budget whatever fits so many bytes? (``budget`` is then full)
    device: str
    dtype: torch.dtype
    dtype_note: str
    identity: dict[str, Any]
    hash: str

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.task.samples[: self.run.limit]

    def max_new_tokens(self, sample: Sample) -> int:
        """The run's limit, else the sample's own, else the task's."""
        return self.run.max_new_tokens or sample.max_new_tokens or self.task.max_new_tokens

    def max_prompt_tokens(self, sample: Sample) -> int:
        """What fits the model's window beside the answer, or less if the run says so."""
        fits = self.source.window - self.max_new_tokens(sample)
        return min(fits, self.run.max_prompt_tokens or fits)


@dataclass
class Preparation:
    """Makes cells of a sweep ready, opening every model and building every task once."""

    _sources: dict[str, tuple[ModelSource, PromptEncoder]] = field(default_factory=dict)
    _tasks: dict[str, Task] = field(default_factory=dict)

    def cell(self, run: RunConfig) -> Cell:
        """Raises InputError for what only the model, the data or the method's own code can tell."""
        if isinstance(run.match, str):  # a job made up by a foreign sweeper after our own composition
            raise InputError("match", run.match, "was not composed before the run.", "Use hydra/sweeper=kvbench.")
        source, encoder = self._source(run)
        run.model.name = source.name  # "gguf" or "folder" says nothing: the file's name does
        method = build(run.method, lambda part: instantiate("method", part))
        by_bytes = method.evicts and (run.match is not None or run.budget_bytes is not None)
        match = build(run.match, lambda part: instantiate("match", part)) if by_bytes and run.match else None
        task = self._task(run, encoder)
        switches = Switches(run.protocol.name, run.budget_scope, run.question_evictable, run.first_token)
        if switches.protocol == "swapped":
            check_swappable(task)
        budget = Budget.parse(run.budget) if method.evicts and not by_bytes else Budget("full")
        device = resolve_device(run.device)
        dtype, note = resolve_dtype(run.dtype, device, source.checkpoint_dtype)
        identity = cell_identity(
            run,
            model_sha256=source.content_sha256,
            data_sha256=task.data_sha256,
            template_sha256=encoder.template_sha256(task.chat),
            dtype=str(dtype).removeprefix("torch."),
            attention=attention_path(torch.device(device).type),
        )
        cell = Cell(
            run, source, encoder, task, method, match, switches, budget, by_bytes, device, dtype, note, identity,
            cell_hash(identity),
        )  # fmt: skip
        check_lengths(cell)
        check_ids(task)
        return cell

    def _source(self, run: RunConfig) -> tuple[ModelSource, PromptEncoder]:
        key = repr(run.model)
        if key not in self._sources:
            source = open_model(run.model)
            encoder = PromptEncoder(source.tokenizer, chat=run.model.chat, template_kwargs=source.template_kwargs)
            self._sources[key] = (source, encoder)
        return self._sources[key]

    def _task(self, run: RunConfig, encoder: PromptEncoder) -> Task:
        key = repr((run.task, run.model, run.seed))
        if key not in self._tasks:
            self._tasks[key] = instantiate("task", run.task, encoder=encoder, seed=run.seed)
        return self._tasks[key]


def instantiate(key: str, config: Any, **arguments: Any) -> Any:
    """What a ``_target_`` builds. Whatever goes wrong is the configuration's fault: an InputError that says so."""
    try:
        return hydra.utils.instantiate(config, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        cause = error.__cause__ or error
        raise InputError(
            key, config.get("_target_"), f"cannot be built: {cause}", f"See conf/{key}/ for the keys it takes."
        ) from error


def check_swappable(task: Task) -> None:
    """InputError if protocol=swapped would ask the same question twice."""
    if not task.has_question:
        raise InputError(
            "protocol", "swapped", f"{task.name} has no question to swap.", "Use blind or aware, or another task."
        )
    for sample in task.samples:
        if sample.error is None:
            other_question(sample, task.samples)
            return


def check_lengths(cell: Cell) -> None:
    """The window must hold an answer and a prompt; InputError names the key that asks for too much."""
    if cell.run.truncation == "official" and cell.run.model.official_max_length is None:
        raise InputError(
            "model.official_max_length", "null", "truncation=official needs the length that prompts are cut to.",
            "LongBench's own value is about 500 below the window.",
        )  # fmt: skip
    asked, window = cell.run.max_prompt_tokens, cell.source.window
    new = cell.run.max_new_tokens or cell.task.max_new_tokens
    if new >= window:
        raise InputError("max_new_tokens", new, f"leaves no room in the window of {window} tokens.", "Ask for fewer.")
    if asked is not None and asked > window - new:
        raise InputError(
            "max_prompt_tokens", asked, f"and {new} new tokens exceed the model's window of {window}.",
            f"Ask for at most {window - new}, or set model.window.",
        )  # fmt: skip
    room, lengths = min(window - new, asked or window), cell.run.task.get("length")
    for length in lengths if isinstance(lengths, (list, tuple)) else [lengths]:
        if isinstance(length, int) and length > room:  # made prompts are exact: cutting one could remove its needle
            raise InputError(
                "task.length", length, f"is longer than the {room} prompt tokens that fit beside {new} new ones.",
                "Ask for shorter prompts, or a model with a larger window.",
            )  # fmt: skip


def check_ids(task: Task) -> None:
    """Records are told apart by their sample's id: InputError if two samples have the same."""
    seen: set[str] = set()
    for sample in task.samples:
        if sample.id in seen:
            raise InputError("task", task.name, f"two samples have the id {sample.id!r}.", "Give each its own.")
        seen.add(sample.id)


def by_context(samples: tuple[Sample, ...]) -> Iterator[tuple[Sample, ...]]:
    """Samples that share a context, together, in the order in which the contexts first appear.

    Those that name a group share its context; others do if their texts before the question are the same.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        text = sample.instruction + sample.context
        groups.setdefault(("group", sample.group) if sample.group else ("text", text), []).append(sample)
    yield from (tuple(group) for group in groups.values())


def other_question(sample: Sample, samples: tuple[Sample, ...]) -> tuple[str, str]:
    """The question that protocol=swapped asks before ``sample``'s own, with its answer prefix; the same in every run.

    The sample's own ``other_question``; else the next different question about the same context; else the next
    different question of the task. InputError if the task asks everybody the same.
    """
    if sample.other_question is not None:
        return sample.other_question, sample.other_answer_prefix
    at = next(i for i, candidate in enumerate(samples) if candidate.id == sample.id)
    following = [s for s in (*samples[at + 1 :], *samples[:at]) if s.error is None and s.question != sample.question]
    same_context = [s for s in following if sample.group and s.group == sample.group]
    chosen = next(iter(same_context or following), None)
    if chosen is None:
        raise InputError("protocol", "swapped", "all samples ask the same question.", "Use blind or aware.")
    return chosen.question, chosen.answer_prefix
