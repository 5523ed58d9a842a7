"""Runs cells: every sample through its protocol, one record each, whatever happens to the others."""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.cell import Cell, Preparation, by_context, other_question
from kvbench.config import RunConfig
from kvbench.engine import Engine, StopRule
from kvbench.engine.rotation import Rotation, discover
from kvbench.engine.selftest import self_test
from kvbench.errors import InputError, SampleError
from kvbench.prompts import Prompt
from kvbench.protocols import ContextRun, plan, start, window_question_tokens
from kvbench.results import CellStore, open_cell, record_unopened
from kvbench.results.cells import read_cell
from kvbench.results.checks import problems, warnings
from kvbench.results.environment import env
from kvbench.results.folder import TaskInfo
from kvbench.results.progress import Progress
from kvbench.results.summary import summarise
from kvbench.results.tracker import Tracker, open_tracker
from kvbench.tasks import scoring
from kvbench.tasks.sample import Sample

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What became of one cell."""

    folder: Path | None  # None: the folder could not be made or is another process's
    problems: list[str]
    error: BaseException | None = None


@dataclass
class Models:
    """The model in memory: one at a time, kept while cells need the same."""

    _key: tuple[Any, ...] | None = None
    _engine: Engine | None = None
    _rotation: Rotation | None = None

    def engine(self, cell: Cell) -> Engine:
        """The engine of the cell's model, loaded and self-tested if it is not the one in memory."""
        key = (cell.source.content_sha256, cell.device, cell.dtype)
        if self._engine is None or key != self._key:
            self._engine = self._rotation = self._key = None  # lets go of the old weights before the new ones come
            started = time.perf_counter()
            self._engine = Engine(cell.source.load(cell.device, cell.dtype))
            self_test(self._engine)
            self._key = key
            log.info("%s loaded on %s (%s) and self-tested in %.1f s", cell.source.name, cell.device, cell.dtype_note,
                     time.perf_counter() - started)  # fmt: skip
        return self._engine

    def rotation(self, cell: Cell) -> Rotation | None:
        """How stored keys are moved, where the cell's positions are compact."""
        if cell.run.positions != "compact":
            return None
        engine = self.engine(cell)
        self._rotation = self._rotation or discover(engine)
        return self._rotation


def run_cells(runs: Sequence[RunConfig]) -> int:
    """Runs cells one after the other and returns the exit code: 0 all well, 1 something failed.

    All cells are made ready before the first one starts, so that wrong input (InputError) costs nothing. A cell or a
    sample that fails costs itself, not the others, unless ``fail_fast``.
    """
    from kvbench.results.render import end_of_run_table  # pandas: not needed until now

    log_to_terminal()
    preparation, models = Preparation(), Models()
    cells = distinct([preparation.cell(run) for run in runs])
    outcomes: list[Outcome] = []
    for cell in cells:
        outcome = run_cell(cell, models)
        outcomes.append(outcome)
        if cell.run.fail_fast and (outcome.error or outcome.problems):
            log.error("fail_fast=true: %d cells were not started", len(cells) - len(outcomes))
            break
    print(end_of_run_table([read_cell(outcome.folder) for outcome in outcomes if outcome.folder is not None]))
    return exit_code(outcomes, len(cells))


def log_to_terminal() -> None:
    """What kvbench says at INFO and others at WARNING, on stderr, unless the caller has set logging up."""
    if not sys.stderr.isatty():  # bars are for terminals: in a log file they are noise
        transformers.logging.disable_progress_bar()
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
        logging.getLogger("kvbench").setLevel(logging.INFO)


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Cells without repeats (a method that evicts nothing is the same cell at every budget)."""
    first: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        known = first.setdefault((cell.run.runs, cell.run.experiment, cell.hash), cell)
        if known is not cell:
            log.info("%s %s %s: the same cell as before, run once", cell.task.name, cell.method.name, cell.budget)
    return list(first.values())


def exit_code(outcomes: Sequence[Outcome], expected: int) -> int:
    """Prints what failed, last, where it is seen; 2 if one cell was asked for and its input was wrong, else 1 or 0."""
    failed = [outcome for outcome in outcomes if outcome.error is not None or outcome.problems]
    for outcome in failed:
        reasons = outcome.problems if outcome.error is None else [f"{type(outcome.error).__name__}: {outcome.error}"]
        print(f"FAILED {outcome.folder or ''}".rstrip())
        for reason in reasons[:5]:
            print(f"       {reason}")
        if len(reasons) > 5:
            print(f"       and {len(reasons) - 5} more, see run.log there")
    if expected == 1 and failed and isinstance(failed[0].error, InputError):
        return 2
    return 1 if failed or len(outcomes) < expected else 0


def run_cell(cell: Cell, models: Models) -> Outcome:
    """Computes what is missing of a cell and summarises it."""
    task = TaskInfo.of(cell.task, cell.run.limit)
    environment = env(cell.device)
    try:
        store = open_cell(cell.run.runs, cell.run, cell.identity, environment, task)
    except Exception as error:
        unopened = not isinstance(error, InputError)
        folder = record_unopened(cell.run.runs, cell.run, error, environment) if unopened else None
        return Outcome(folder, [], error)
    with store:
        try:
            compute_missing(cell, store, models)
            records = store.records()
            for warning in warnings(cell.run, records):
                log.warning("%s", warning)
            store.finish(summarise(cell.run, task, records))
            return Outcome(store.folder, problems(cell.run, records))
        except Exception as error:
            store.fail(error)
            return Outcome(store.folder, [], error)


def compute_missing(cell: Cell, store: CellStore, models: Models) -> None:
    """One record for every sample that has none yet."""
    missing = set(store.missing)
    if not missing:
        log.info("%s: all %d records are there, nothing to compute", store.folder, len(cell.samples))
        return
    log.info("%s: %d of %d samples to run", store.folder, len(missing), len(cell.samples))
    tracker = open_tracker(cell.run.tracker, cell.run, store.folder)
    code = 1
    try:
        run_samples(cell, store, models, missing, tracker)
        code = 0
    finally:
        tracker.finish(summarise(cell.run, store.task, store.records()), code)


def run_samples(cell: Cell, store: CellStore, models: Models, missing: set[str], tracker: Tracker) -> None:
    """Computes and stores the records of the missing samples, context by context."""
    runner: SampleRunner | None = None
    done = len(cell.samples) - len(missing)
    with Progress(len(cell.samples), cell.task.name, done=done) as progress:
        for group in by_context(cell.task.samples):
            wanted = [sample for sample in group if sample.id in missing]
            if not wanted:
                continue
            runner = runner or SampleRunner(cell, store, models.engine(cell), models.rotation(cell))
            for record in runner.group(group, wanted):
                store.append(record)
                tracker.log(record)
                progress.update(note=record["sample_id"])
                if cell.run.fail_fast and record["status"] == "failed":
                    raise SampleError(f"sample {record['sample_id']}: {record['error']}")


class SampleRunner:
    """Runs the samples of one cell on one engine."""

    def __init__(self, cell: Cell, store: CellStore, engine: Engine, rotation: Rotation | None) -> None:
        self.cell, self.store, self.engine, self.rotation = cell, store, engine, rotation
        newline = cell.encoder.newline_ids() if cell.task.stop_at_newline else frozenset()
        self.stop_ids = cell.source.eos_ids() | newline
        self.chat = cell.encoder.effective_chat(cell.task.chat)

    def group(self, group: Sequence[Sample], wanted: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        """Yields a record for every wanted sample of one context, whose capture they share."""
        reserve = 0
        if len(group) > 1:  # all questions about a context must see the same context, however long each of them is
            asked = [s for s in group if s.error is None]
            reserve = max((len(self._question_ids(s.question, s.answer_prefix)) for s in asked), default=0)
        context: ContextRun | None = None
        for sample in wanted:
            record = base_record(sample)
            try:
                if sample.error is not None:
                    raise SampleError(sample.error)
                prompt = self._encode(sample, reserve)
                if self.cell.run.dump_prompts:
                    self._dump(sample, prompt)
                if context is None or context.ids != prompt.context_ids:
                    context = ContextRun(
                        self.engine, prompt.context_ids, self.cell.method.query_window, shared=len(group) > 1
                    )
                record |= self.run(sample, prompt, context)
            except Exception as error:
                log.exception("sample %s failed", sample.id)
                record |= {"status": "failed", "score": None, "error": f"{type(error).__name__}: {error}"}
            yield record

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
        started = start(context, cell.method, planned, prompt.question_ids, new, self.rotation)
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
            "uncompressed": cell.method.evicts and not evicted,
            "note": compressed.note,
            "window_question_tokens": window_question_tokens(
                cell.switches, cell.method.query_window, len(prompt.question_ids), prompt.tail_tokens
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

    def _encode(self, sample: Sample, reserve: int) -> Prompt:
        cell = self.cell
        return cell.encoder.encode(
            sample,
            self.chat,
            cell.max_prompt_tokens(sample),
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
