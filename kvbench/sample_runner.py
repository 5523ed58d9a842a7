"""Runs the samples of one cell: from a sample to its record, whatever goes wrong with it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvbench.cell import Cell, other_question
from kvbench.engine import Engine, StopRule
from kvbench.engine.rotation import Rotation
from kvbench.errors import SampleError
from kvbench.methods import Method
from kvbench.prompts import Prompt
from kvbench.protocols import ContextRun, plan, start, window_question_tokens
from kvbench.results import CellStore
from kvbench.tasks import scoring
from kvbench.tasks.sample import Sample

log = logging.getLogger(__name__)


class SampleRunner:
    """Runs the samples of one cell on one engine."""

    def __init__(self, cell: Cell, store: CellStore, engine: Engine, method: Method, rotation: Rotation | None) -> None:
        self.cell, self.store, self.engine, self.method, self.rotation = cell, store, engine, method, rotation
        newline = cell.encoder.newline_ids() if cell.task.stop_at_newline else frozenset()
        self.stop_ids = cell.source.eos_ids() | newline
        self.chat = cell.encoder.effective_chat(cell.task.chat)

    def group(self, group: Sequence[Sample], wanted: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        """Yields a record for every wanted sample of one context, whose capture they share."""
        limit, reserve = self._shared_room([s for s in group if s.error is None])
        context: ContextRun | None = None
        for sample in wanted:
            record = base_record(sample)
            try:
                if sample.error is not None:
                    raise SampleError(sample.error)
                prompt = self._encode(sample, limit, reserve)
                if self.cell.run.dump_prompts:
                    self._dump(sample, prompt)
                if context is None or context.ids != prompt.context_ids:
                    context = ContextRun(self.engine, prompt.context_ids, self.method.needs, shared=len(group) > 1)
                record |= self.run(sample, prompt, context)
            except SampleError as error:
                log.error("sample %s failed: %s", sample.id, error)
                record |= {"status": "failed", "score": None, "error": str(error)}
            except Exception as error:
                log.exception("sample %s failed", sample.id)
                record |= {"status": "failed", "score": None, "error": f"{type(error).__name__}: {error}"}
            yield record

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

    def run(self, sample: Sample, prompt: Prompt, context: ContextRun) -> dict[str, Any]:
        """The measured part of a sample's record."""
        cell = self.cell
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        other = None
        if cell.switches.protocol == "swapped":
            other = self._question_ids(*other_question(sample, cell.task.samples))
        new = cell.max_new_tokens(sample)
        planned = plan(cell.switches, len(prompt.context_ids), prompt.question_ids, other, cell.budget)
        started = start(context, self.method, planned, prompt.question_ids, new, self.rotation)
        if not context.shared:
            context.release()  # the answer needs the cache alone
        at_first_decode = started.cache
        measured = {
            "kept_entries": started.compressed.kept_mean,
            "entries_at_first_decode": at_first_decode.entries(),
            "kv_bytes_device": at_first_decode.nbytes("device"),
            "kv_bytes_host": at_first_decode.nbytes("host"),
            "kv_bytes_full": started.bytes_full,
        }
        stop = StopRule(self.stop_ids, new, min_new_tokens=1 if cell.task.stop_at_newline else 0)
        began = context.now()
        (generated,) = self.engine.decode([started.cache], started.logits[None], stop)
        decode_s = context.now() - began
        prediction = cell.encoder.decode(generated.ids)
        compressed = started.compressed
        evicted = any(kept < planned.region.evictable for kept in compressed.kept)
        return {
            **self._answer(sample, prediction, generated.finite),
            "prompt_tokens": len(prompt.context_ids) + len(prompt.question_ids),
            "context_tokens": len(prompt.context_ids),
            "question_tokens": len(prompt.question_ids),
            **measured,
            "fingerprint": started.fingerprint,
            "uncompressed": self.method.evicts and not evicted,
            "note": compressed.note,
            "window_question_tokens": window_question_tokens(
                cell.switches, self.method.needs.query_window, len(prompt.question_ids), prompt.tail_tokens
            ),
            "prefill_s": started.prefill_s,
            "compress_s": started.compress_s,
            "feed_s": started.feed_s,
            "decode_s": decode_s,
            "new_tokens": len(generated.ids),
            **peak_memory(self.engine.device),
            "truncated_tokens": prompt.truncated_tokens,
            "answer_survived": prompt.answer_survived,
            "info": {
                **sample.info,
                "group": sample.group,
                "context_sha256": hashlib.sha256(repr(prompt.context_ids).encode()).hexdigest()[:16],
                "context_budget": planned.budget,
                **({"method": facts} if (facts := self.method.facts()) else {}),
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

    def _dump(self, sample: Sample, prompt: Prompt) -> None:
        self.store.dump_prompt(
            sample.id, text=prompt.text, context_ids=prompt.context_ids, question_ids=prompt.question_ids
        )


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


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The most device memory that the sample's computation held, weights included, or null and why."""
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_bytes": None, "peak_bytes_note": f"{device.type} does not record its peak"}
