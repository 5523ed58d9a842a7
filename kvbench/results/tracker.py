"""Experiment trackers. The records are the truth; a tracker is a copy, and its failures never touch a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvbench.config import TrackerConfig
from kvbench.errors import InputError
from kvbench.results.files import plain
from kvbench.results.identity import cell_label

log = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")
# What of a record a tracker plots; texts and ids stay in records.jsonl.
PLOTTED = ("score", "prompt_tokens", "kept_entries", "kv_bytes_device", "kv_bytes_host", "prefill_s", "compress_s",
           "decode_s", "new_tokens", "peak_bytes")  # fmt: skip


class Tracker(Protocol):
    """What a run tells a tracker; neither call ever raises."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One sample is done."""

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """The cell is done."""


class NoTracker:
    """``tracker=none``."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Nothing to do."""


class WandbTracker:
    """``tracker=wandb``: one wandb run per cell, grouped by experiment. The first failure is logged and ends it."""

    def __init__(self, config: TrackerConfig, run: Any, folder: Path) -> None:
        self._run: Any = None
        self._guarded(lambda: self._start(config, run, folder))

    def _start(self, config: TrackerConfig, run: Any, folder: Path) -> None:
        import wandb  # here, not above: it takes a second, and most runs do without

        settings = plain(run)
        mode: Any = wandb_mode(config.mode)  # wandb types it as a literal
        folder.mkdir(parents=True, exist_ok=True)  # wandb falls back to another folder if this one does not exist
        self._run = wandb.init(
            project=config.project,
            group=settings["experiment"],
            name=cell_label(run),
            config=settings,
            dir=str(folder),
            mode=mode,
            reinit="create_new",  # the cells of a grid are open at the same time
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Plot the record's numbers."""
        values = {name: record[name] for name in PLOTTED if record.get(name) is not None}
        if self._run is not None:
            self._guarded(lambda: self._run.log(values))

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Hand over the summary and close the wandb run."""
        run, self._run = self._run, None
        if run is not None:
            self._guarded(lambda: run.summary.update(plain(summary)))
            self._guarded(lambda: run.finish(exit_code=exit_code))

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker's client raises must not cost a result
            what = f"{type(error).__name__}: {error}"
            log.warning("the tracker failed and is off for this cell; the run goes on: %s", what)
            self._run = None


def open_tracker(config: TrackerConfig, run: Any, folder: Path) -> Tracker:
    """The tracker that ``config`` names; ``folder`` is the cell's. Raises InputError for an unknown name or mode."""
    if config.name == "none":
        return NoTracker()
    if config.name != "wandb":
        raise InputError("tracker", config.name, "is no tracker.", "Write none or wandb.")
    if config.mode not in MODES:
        raise InputError("tracker.mode", config.mode, "is no mode.", f"Write one of {', '.join(MODES)}.")
    return WandbTracker(config, run, folder)


def wandb_mode(configured: str) -> str:
    """The configured mode, unless the environment's WANDB_MODE allows less."""
    asked = os.environ.get("WANDB_MODE", configured)
    return max(configured, asked, key=MODES.index) if asked in MODES else configured
