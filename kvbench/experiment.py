"""Runs cells: every sample through its protocol, one record each, whatever happens to the others."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
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
from kvbench.methods import Method
from kvbench.methods.setup import Setup
from kvbench.results import CellStore, open_cell, record_unopened
from kvbench.results.cells import read_cell
from kvbench.results.checks import problems, warnings
from kvbench.results.environment import env
from kvbench.results.folder import TaskInfo
from kvbench.results.progress import Progress
from kvbench.results.summary import summarise
from kvbench.results.tracker import Tracker, open_tracker
from kvbench.sample_runner import SampleRunner

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

    def method(self, cell: Cell) -> Method:
        """The cell's method with what it needs of the model; InputError where the model does not fit its settings."""
        return cell.method.prepared(self.setup(cell))


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
            runner = runner or SampleRunner(
                cell, store, models.engine(cell), models.method(cell), models.rotation(cell)
            )
            for record in runner.group(group, wanted):
                store.append(record)
                tracker.log(record)
                progress.update(note=record["sample_id"])
                if cell.run.fail_fast and record["status"] == "failed":
                    raise SampleError(f"sample {record['sample_id']}: {record['error']}")
