"""LongBench (21 tasks) and LongBench-E (13 of them, balanced over lengths): official prompts, limits and rules."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.errors import InputError
from kvbench.tasks.longbench_data import read_records, records_sha256
from kvbench.tasks.sample import Sample, Task

# LongBench-E reports a score per bucket of the record's length: below 4,000, below 8,000, and the rest.
BUCKETS = ("0-4k", "4-8k", "8k+")


@dataclass(frozen=True)
class LongBenchTask:
    """The official rules of one task (longbench.json)."""

    prompt: str  # one {context} and at most one {input}
    max_new_tokens: int
    metric: str
    chat: bool = True  # False: few-shot and code prompts are never wrapped in a chat template
    first_line: bool = False
    stop_at_newline: bool = False
    has_question: bool = True
    extended: bool = False  # part of LongBench-E

    def segments(self, context: str, question: str) -> tuple[str, str, str]:
        """Instruction, document and question of a record; joined they are the official prompt, whatever braces,
        separators or blanks the texts contain (nothing is formatted twice or searched for in them)."""
        head, tail = self.prompt.split("{context}")
        before, slot, after = tail.partition("{input}")
        return head, context, before + question + after if slot else tail


@cache
def tasks() -> dict[str, LongBenchTask]:
    """The 21 tasks by their official names."""
    definitions = json.loads(Path(__file__).with_name("longbench.json").read_text(encoding="utf-8"))
    return {name: LongBenchTask(**fields) for name, fields in definitions["tasks"].items()}


def rules(subset: str, extended: bool = False) -> LongBenchTask:
    """The rules of one task. Raises InputError with the nearest name if there is none."""
    known = {name: task for name, task in tasks().items() if task.extended or not extended}
    if subset not in known:
        near = get_close_matches(str(subset), known, n=1)
        family = "longbench_e" if extended else "longbench"
        fix = f"Did you mean {family}/{near[0]}?" if near else "Known: " + ", ".join(known) + "."
        raise InputError("task", f"{family}/{subset}", "there is no such task.", fix)
    return known[subset]


def bucket(length: float) -> str:
    """LongBench-E's bucket of a record's length (words, or characters for Chinese)."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def build(
    *,
    encoder: Any = None,
    seed: int = 0,
    name: str,
    subset: str,
    extended: bool = False,
    path: str | None = None,
    revision: str = "main",
) -> Task:
    """All records of one task in file order. ``encoder`` and ``seed`` are unused: the data is fixed.

    ``path`` is a folder of <task>.jsonl (<task>_e.jsonl), a data.zip, a parquet file or folder; None fetches the
    original data.zip from the hub at ``revision``.
    """
    task = rules(subset, extended)
    records = read_records(subset, extended, path, revision)
    return Task(
        name=name,
        metric=task.metric,
        max_new_tokens=task.max_new_tokens,
        samples=_samples(task, subset, records),
        data_sha256=records_sha256(records),
        chat=task.chat,
        has_question=task.has_question,
        stop_at_newline=task.stop_at_newline,
        first_line=task.first_line,
    )


def _samples(task: LongBenchTask, subset: str, records: list[dict[str, Any]]) -> tuple[Sample, ...]:
    samples, seen = [], set()
    for number, record in enumerate(records, 1):
        identity = record["_id"] or f"{subset}-{number}"
        if identity in seen:  # ids key the records of a run, so two samples must not share one
            identity = f"{identity}-{number}"
        seen.add(identity)
        instruction, context, question = task.segments(record["context"], record["input"])
        info = {key: record[key] for key in ("length", "language", "dataset")}
        if record["all_classes"]:
            info["classes"] = record["all_classes"]  # re-scoring a run's records needs them
        samples.append(
            Sample(
                id=identity,
                instruction=instruction,
                context=context,
                question=question,
                answers=tuple(record["answers"]),
                group=hashlib.sha256(context.encode("utf-8", "surrogatepass")).hexdigest()[:16],
                classes=tuple(record["all_classes"]),
                info=info,
            )
        )
    return tuple(samples)
