"""Runs the samples of a grid: from a sample to one record for every cell, whatever goes wrong with it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from kvbench.cell import Cell, other_question
from kvbench.engine import Engine, Generated, Needs, StopRule
from kvbench.engine.rotation import Rotation
from kvbench.errors import SampleError
from kvbench.memory_budget import largest
from kvbench.methods import Method
from kvbench.prompts import Prompt
from kvbench.protocols import ContextRun, Plan, Start, plan, start, window_question_tokens
from kvbench.results import CellStore
from kvbench.tasks import scoring
from kvbench.tasks.sample import Sample

log = logging.getLogger(__name__)
Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """A cell whose samples are to be run, with its method made ready for the model."""

    cell: Cell
    store: CellStore
    method: Method
    rotation: Rotation | None
    match: Method | None = None  # whose bytes the method may hold


@dataclass(frozen=True)
class Begun:
    """A cell's sample up to its first answer token."""

    job: Job
    planned: Plan
    started: Start
    measured: Mapping[str, Any]
    allowed: int | None  # device bytes, where they decide the budget


class SampleRunner:
    """Runs the samples of a grid's cells, which share model, task and prompts (``kvbench.grid``), on one engine.

    The context of a sample is prefilled once for all cells, and their answers are decoded as rows of one batch.
    """

    def __init__(self, jobs: Sequence[Job], engine: Engine) -> None:
        self.jobs, self.engine = jobs, engine
        self.cell = jobs[0].cell  # for what they share
        newline = self.cell.encoder.newline_ids() if self.cell.task.stop_at_newline else frozenset()
        self.stop_ids = self.cell.source.eos_ids() | newline
        self.chat = self.cell.encoder.effective_chat(self.cell.task.chat)
        self.uses = 2 if any(job.cell.by_bytes for job in jobs) else len(jobs)  # 2: more than once
        self.needs = reduce(or_, (job.method.needs for job in jobs), Needs())

    def group(self, group: Sequence[Sample], wanted: Mapping[str, Sequence[Job]]) -> Iterator[tuple[Job, Record]]:
        """Yields a record for every wanted (sample id, job) of one context, whose capture they share."""
        limit, reserve = self._shared_room([s for s in group if s.error is None])
        context: ContextRun | None = None
        for sample in group:
            jobs = wanted.get(sample.id, ())
            if not jobs:
                continue
            try:
                if sample.error is not None:
                    raise SampleError(sample.error)
                prompt = self._encode(sample, limit, reserve)
                for job in jobs:
                    if job.cell.run.dump_prompts:
                        dump(job.store, sample, prompt)
            except Exception as error:
                failed = failure(sample, error)
                yield from ((job, dict(failed)) for job in jobs)
                continue
            if context is None or context.ids != prompt.context_ids:
                context = ContextRun(
                    self.engine, prompt.context_ids, self.needs, shared=len(group) > 1, cells=self.uses
                )
            yield from self._answered(sample, prompt, context, jobs)

    def _shared_room(self, group: Sequence[Sample]) -> tuple[int, int]:
        """Prompt tokens that all questions about a context may have, and how many of them the longest question needs.

        All of them must see the same context, however long each question and its answer may be. A question that would
        take more than half of the room is left out: it sees a context of its own, or fails alone.
        """
        limit = min((n for n in map(self.cell.max_prompt_tokens, group) if n > 0), default=1)
        if len(group) < 2:
            return limit, 0
        lengths = [len(self._question_ids(s.question, s.answer_prefix)) for s in group]
        return limit, max((length for length in lengths if length <= limit // 2), default=0)

    def _answered(
        self, sample: Sample, prompt: Prompt, context: ContextRun, jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Record]]:
        """A record for every job: all are begun, then their answers are decoded together."""
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        begun: list[Begun] = []
        for job in jobs:
            try:
                begun.append(self._begin(sample, prompt, context, job))
            except Exception as error:
                yield job, failure(sample, error)
        context.release()  # the answers need the caches alone
        if not begun:
            return
        try:
            began = context.now()
            generated = self._decode(sample, begun)
            seconds = context.now() - began
        except Exception as error:
            if len(begun) == 1:
                yield begun[0].job, failure(sample, error)
                return
            log.exception("sample %s: the answers of %d cells are decoded one by one", sample.id, len(begun))
            again = [one.job for one in begun]
            del begun  # their caches have grown, and may be what did not fit
            for job in again:
                yield from self._answered(sample, prompt, context, [job])
            return
        for one, row in zip(begun, generated, strict=True):
            try:
                yield one.job, base_record(sample) | self._record(sample, prompt, one, row, seconds, len(begun))
            except Exception as error:
                yield one.job, failure(sample, error)

    def _begin(self, sample: Sample, prompt: Prompt, context: ContextRun, job: Job) -> Begun:
        other = None
        if job.cell.switches.protocol == "swapped":
            other = self._question_ids(*other_question(sample, self.cell.task.samples))
        new = self.cell.max_new_tokens(sample)
        switches, asked = job.cell.switches, prompt.question_ids
        planned = plan(switches, len(prompt.context_ids), asked, other, job.cell.budget)
        allowed = self._allowed(context, job, planned, asked, new)
        if allowed is None:
            started = start(context, job.method, planned, asked, new, job.rotation)
        else:
            planned, started = largest(
                lambda tried: start(context, job.method, tried, asked, new, job.rotation, keep=False),
                planned, allowed, getattr(job.method.codec, "block", 1),
            )  # fmt: skip
        if context.cells == 1:
            context.release()  # before anything else takes memory
        cache = started.cache
        measured = {
            "kept_entries": started.compressed.kept_mean,
            "entries_at_first_decode": cache.entries(),
            "kv_bytes_device": cache.nbytes("device"),
            "kv_bytes_host": cache.nbytes("host"),
            "kv_bytes_full": started.bytes_full,
        }
        return Begun(job, planned, started, measured, allowed)

    def _allowed(self, context: ContextRun, job: Job, planned: Plan, asked: tuple[int, ...], new: int) -> int | None:
        """Device bytes that decide the budget: as given, or those of the matched method on this sample."""
        if not job.cell.by_bytes:
            return None
        if job.match is None:
            return job.cell.run.budget_bytes
        return start(context, job.match, planned, asked, new, keep=False).cache.nbytes("device")

    def _decode(self, sample: Sample, begun: Sequence[Begun]) -> list[Generated]:
        least = 1 if self.cell.task.stop_at_newline else 0
        stop = StopRule(self.stop_ids, self.cell.max_new_tokens(sample), min_new_tokens=least)
        logits = torch.stack([one.started.logits for one in begun])
        return self.engine.decode([one.started.cache for one in begun], logits, stop)

    def _record(
        self, sample: Sample, prompt: Prompt, one: Begun, generated: Generated, decode_s: float, rows: int
    ) -> Record:
        """The measured part of a sample's record."""
        method, started = one.job.method, one.started
        compressed = started.compressed
        evicted = any(kept < one.planned.region.evictable for kept in compressed.kept)
        return {
            **self._answer(sample, self.cell.encoder.decode(generated.ids), generated.finite),
            "prompt_tokens": len(prompt.context_ids) + len(prompt.question_ids),
            "context_tokens": len(prompt.context_ids),
            "question_tokens": len(prompt.question_ids),
            **one.measured,
            "fingerprint": started.fingerprint,
            "uncompressed": method.evicts and not evicted,
            "note": compressed.note,
            "window_question_tokens": window_question_tokens(
                one.job.cell.switches, method.needs.query_window, len(prompt.question_ids), prompt.tail_tokens
            ),
            "prefill_s": started.prefill_s,
            "compress_s": started.compress_s,
            "feed_s": started.feed_s,
            "decode_s": decode_s,
            "decode_rows": rows,
            "new_tokens": len(generated.ids),
            **peak_memory(self.engine.device, rows),
            "truncated_tokens": prompt.truncated_tokens,
            "answer_survived": prompt.answer_survived,
            "info": {
                **sample.info,
                "group": sample.group,
                "context_sha256": hashlib.sha256(repr(prompt.context_ids).encode()).hexdigest()[:16],
                "context_budget": one.planned.budget,
                **({"allowed_bytes": one.allowed} if one.allowed is not None else {}),
                **({"method": facts} if (facts := method.facts()) else {}),
            },
        }

    def _answer(self, sample: Sample, prediction: str, finite: bool) -> dict[str, Any]:
        if not finite:  # argmax over NaN is token 0: whatever was decoded is not an answer
            return {"status": "nonfinite", "prediction": prediction, "score": None}
        return {
            "status": "ok",
            "prediction": prediction,
            "score": scoring.score(self.cell.task, sample, prediction),
            "scores": scoring.extra_scores(self.cell.task, sample, prediction),
        }

    def _question_ids(self, question: str, answer_prefix: str) -> tuple[int, ...]:
        return self.cell.encoder.question_ids(question, answer_prefix, self.chat)

    def _encode(self, sample: Sample, limit: int, reserve: int) -> Prompt:
        cell = self.cell
        new, window = cell.max_new_tokens(sample), cell.source.window
        if new >= window:
            raise SampleError(f"max_new_tokens={new} leaves no room in the window of {window} tokens")
        return cell.encoder.encode(
            sample,
            self.chat,
            limit,
            cell.run.truncation,
            official_max_length=cell.run.model.official_max_length,
            reserve_question_tokens=reserve,
        )


def dump(store: CellStore, sample: Sample, prompt: Prompt) -> None:
    store.dump_prompt(sample.id, text=prompt.text, context_ids=prompt.context_ids, question_ids=prompt.question_ids)


def failure(sample: Sample, error: Exception) -> Record:
    """The record of a sample that could not be run; must be called where the error is handled."""
    if isinstance(error, SampleError):
        log.error("sample %s failed: %s", sample.id, error)
        return base_record(sample) | {"error": str(error)}
    log.exception("sample %s failed", sample.id)
    return base_record(sample) | {"error": f"{type(error).__name__}: {error}"}


def base_record(sample: Sample) -> dict[str, Any]:
    """What is known of a sample before it runs: every record has these keys."""
    return {
        "sample_id": sample.id,
        "status": "failed",
        "prediction": None,
        "answers": list(sample.answers),
        "score": None,
        "scores": {},
        "error": None,
        "info": {**sample.info, "group": sample.group},
    }


def peak_memory(device: torch.device, rows: int) -> Record:
    """The most device memory that the sample's computation held, weights included, or null and why."""
    if rows > 1:
        return {"peak_bytes": None, "peak_bytes_note": "measured only where a cell runs alone"}
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_bytes": None, "peak_bytes_note": f"{device.type} does not record its peak"}
