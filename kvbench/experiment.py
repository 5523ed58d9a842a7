"""Runs cells: every sample through its protocol, one record each, whatever happens to the others."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from kvbench.cell import Cell, Preparation, by_context
from kvbench.config import RunConfig
from kvbench.engine import Engine
from kvbench.engine.rotation import Rotation
from kvbench.engine.selftest import self_test
from kvbench.errors import InputError, SampleError
from kvbench.grid import distinct, grids
from kvbench.methods.setup import Setup
from kvbench.results import CellStore, open_cell, record_unopened
from kvbench.results.cells import read_cell
from kvbench.results.checks import problems, warnings
from kvbench.results.environment import env
from kvbench.results.folder import TaskInfo
from kvbench.results.progress import Progress
from kvbench.results.summary import summarise
from kvbench.results.tracker import Tracker, open_tracker
from kvbench.sample_runner import Job, SampleRunner

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
    _setup: Setup | None = None

    def engine(self, cell: Cell) -> Engine:
        """The engine of the cell's model, loaded and self-tested if it is not the one in memory."""
        key = (cell.source.content_sha256, cell.device, cell.dtype)
        if self._engine is None or key != self._key:
            self._engine = self._setup = self._key = None  # lets go of the old weights before the new ones come
            started = time.perf_counter()
            self._engine = Engine(cell.source.load(cell.device, cell.dtype))
            self_test(self._engine)
            self._key = key
            log.info("%s loaded on %s (%s) and self-tested in %.1f s", cell.source.name, cell.device, cell.dtype_note,
                     time.perf_counter() - started)  # fmt: skip
        return self._engine

    def setup(self, cell: Cell) -> Setup:
        """The cell's model as the parts of its method see it."""
        engine = self.engine(cell)
        chat = cell.encoder.effective_chat(cell.task.chat)
        if self._setup is None or self._setup.chat != chat:
            self._setup = Setup(engine, cell.encoder, cell.source.content_sha256, chat)
        return self._setup

    def rotation(self, cell: Cell) -> Rotation | None:
        """How stored keys are moved, where the cell's positions are compact."""
        return self.setup(cell).rotation if cell.run.positions == "compact" else None

    def job(self, cell: Cell, store: CellStore) -> Job:
        """The cell with what its method needs of the model; InputError where the model does not fit its settings."""
        setup = self.setup(cell)
        try:
            match = None if cell.match is None else cell.match.prepared(setup)
        except InputError as error:
            assert cell.match is not None
            fix = "Write a method with values that fit, in a folder given by --config-dir, and name that."
            reason = f"does not fit this model ({error.key}={error.value}: {error.reason.rstrip('.')})."
            raise InputError("match", cell.match.name, reason, fix) from error
        return Job(cell, store, cell.method.prepared(setup), self.rotation(cell), match)


def run_cells(runs: Sequence[RunConfig]) -> int:
    """Runs cells and returns the exit code: 0 all well, 1 something failed.

    All cells are made ready before the first one starts, so that wrong input (InputError) costs nothing. Cells that
    share model, task and prompts run together (``kvbench.grid``). A cell or a sample that fails costs itself, not the
    others, unless ``fail_fast``.
    """
    from kvbench.results.render import end_of_run_table  # pandas: not needed until now

    log_to_terminal()
    preparation, models = Preparation(), Models()
    cells = distinct([preparation.cell(run) for run in runs])
    outcomes: list[Outcome] = []
    for grid in grids(cells):
        outcomes += run_grid(grid, models)
        if grid[0].run.fail_fast and (outcomes[-1].error or outcomes[-1].problems):
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


def run_grid(cells: Sequence[Cell], models: Models) -> list[Outcome]:
    """Computes what is missing of cells that share their prompts, and summarises each; one outcome for every cell."""
    outcomes: dict[str, Outcome] = {}
    with ExitStack() as stack:
        stores: dict[str, CellStore] = {}
        for cell in cells:
            environment, task = env(cell.device), TaskInfo.of(cell.task, cell.run.limit)
            try:
                stores[cell.hash] = stack.enter_context(
                    open_cell(cell.run.runs, cell.run, cell.identity, environment, task)
                )
            except Exception as error:
                unopened = not isinstance(error, InputError)
                folder = record_unopened(cell.run.runs, cell.run, error, environment) if unopened else None
                outcomes[cell.hash] = Outcome(folder, [], error)
        opened = [cell for cell in cells if cell.hash in stores]
        errors = compute_missing(opened, stores, models)
        for cell in opened:
            outcomes[cell.hash] = closed(cell, stores[cell.hash], errors.get(cell.hash))
    return [outcomes[cell.hash] for cell in cells]


def closed(cell: Cell, store: CellStore, error: Exception | None) -> Outcome:
    """What became of a cell whose samples were run, or that ``error`` ended; its summary is written."""
    try:
        if error is not None:
            raise error
        records = store.records()
        for warning in warnings(cell.run, records):
            log.warning("%s", warning)
        store.finish(summarise(cell.run, store.task, records))
        return Outcome(store.folder, problems(cell.run, records))
    except Exception as fault:
        store.fail(fault)
        return Outcome(store.folder, [], fault)


def compute_missing(cells: Sequence[Cell], stores: Mapping[str, CellStore], models: Models) -> dict[str, Exception]:
    """One record for every sample that has none yet; returns what ended a cell early, by the cell's hash."""
    errors: dict[str, Exception] = {}
    jobs: list[Job] = []
    broken: Exception | None = None  # the model does not load: it is tried once, not for every cell
    for cell in cells:
        store = stores[cell.hash]
        if not store.missing:
            log.info("%s: all %d records are there, nothing to compute", store.folder, len(cell.samples))
            continue
        log.info("%s: %d of %d samples to run", store.folder, len(store.missing), len(cell.samples))
        try:
            if broken is None:
                models.engine(cell)
        except Exception as error:
            broken = error
        if broken is not None:
            errors[cell.hash] = broken
            continue
        try:
            jobs.append(models.job(cell, store))
        except Exception as error:
            errors[cell.hash] = error
    if not jobs:
        return errors
    trackers = {job: open_tracker(job.cell.run.tracker, job.cell.run, job.store.folder) for job in jobs}
    whole = False
    try:
        errors |= run_samples(jobs, models.engine(jobs[0].cell), trackers)
        whole = True
    except Exception as error:
        errors |= {job.cell.hash: error for job in jobs if job.cell.hash not in errors}
    finally:
        for job, tracker in trackers.items():
            code = 0 if whole and job.cell.hash not in errors else 1
            tracker.finish(summarise(job.cell.run, job.store.task, job.store.records()), code)
    return errors


def run_samples(jobs: Sequence[Job], engine: Engine, trackers: Mapping[Job, Tracker]) -> dict[str, Exception]:
    """Computes and stores the records of the missing samples, context by context; returns what ended a cell early."""
    errors: dict[str, Exception] = {}
    runner, task = SampleRunner(jobs, engine), jobs[0].cell.task
    missing = {job: set(job.store.missing) for job in jobs}
    total, left = sum(len(job.cell.samples) for job in jobs), sum(map(len, missing.values()))
    what, unit = (task.name, "sample") if len(jobs) == 1 else (f"{task.name}, {len(jobs)} cells", "record")
    with Progress(total, what, unit=unit, done=total - left) as progress:
        for group in by_context(task.samples):
            wanted = {
                s.id: [job for job in jobs if s.id in missing[job] and job.cell.hash not in errors] for s in group
            }
            if not any(wanted.values()):
                continue
            for job, record in runner.group(group, wanted):
                if job.cell.hash in errors:
                    continue
                try:
                    job.store.append(record)
                except Exception as error:  # its folder is gone or full, or another process has taken the cell over
                    errors[job.cell.hash] = error
                    continue
                trackers[job].log(record)
                progress.update(note=record["sample_id"])
                if job.cell.run.fail_fast and record["status"] == "failed":
                    raise SampleError(f"sample {record['sample_id']}: {record['error']}")
    return errors
