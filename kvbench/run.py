"""``python -m kvbench.run``: one cell, or with -m a sweep of cells.

The command line is understood and every value checked before Hydra starts a job and before anything heavy is imported.
Exit codes: 0 all well, 1 something failed while running, 2 wrong input, 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kvbench import __version__, usage
from kvbench.compose import VERSION_BASE, cells, job_key, read
from kvbench.config import RunConfig, conf_dir, freeze
from kvbench.errors import InputError

WRONG_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(argv)
    except InputError as error:
        return _complain(error)
    except KeyboardInterrupt:
        print("interrupted: the same command again goes on where this one stopped", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # argparse, Hydra, a signal
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: list[str]) -> int:
    if "--version" in argv:
        print(f"kvbench {__version__}")
        return 0
    command = read(argv)
    if command.help:
        print(usage.text([conf_dir(), *([command.config_dir] if command.config_dir else [])]))
        return 0
    submission = Submission({} if command.hydra_only else cells(command))  # raises InputError
    entry = hydra.main(version_base=VERSION_BASE, config_path=conf_dir(), config_name="config")(submission)
    previous = sys.argv
    flags = [argument for argument in argv if argument not in command.overrides]
    sys.argv = [previous[0], *flags, *command.overrides]  # what Hydra reads: it wants flags first
    try:
        entry()
    finally:
        sys.argv = previous
    return submission.code


class Submission:
    """Hydra's task function. It is called with the config of one job; our launcher gives it all cells of a sweep."""

    def __init__(self, cells: Mapping[tuple[str, ...], RunConfig]) -> None:
        self.cells = cells
        self.code = 0

    def __call__(self, config: DictConfig) -> None:
        self.run([self.frozen(HydraConfig.get().overrides.task) or freeze(config)])

    def frozen(self, overrides: Sequence[str]) -> RunConfig | None:
        """The cell that was composed from these overrides before anything ran."""
        return self.cells.get(job_key(overrides))

    def run(self, runs: list[RunConfig]) -> None:
        """Run these cells and remember the worst exit code so far."""
        self.code = max(self.code, _code_of(runs))
        if self.code >= INTERRUPTED:
            raise SystemExit(self.code)  # a signal: Hydra must not start the next job


def _code_of(runs: list[RunConfig]) -> int:
    from kvbench.experiment import run_cells  # torch and transformers: only once every config is known to be right

    try:
        return run_cells(runs)
    except InputError as error:
        return _complain(error)
    except Exception:
        traceback.print_exc()  # a fault of ours: Hydra would shorten the traceback
        return 1


def _complain(error: InputError) -> int:
    """One paragraph on what is wrong with the input."""
    value = {None: "null", True: "true", False: "false"}.get(error.value) if _is_word(error.value) else error.value
    what = error.key if value == "" else f"{error.key}={value}"
    print("kvbench: " + " ".join(f"{what}: {error.reason} {error.fix}".split()), file=sys.stderr)
    return WRONG_INPUT


def _is_word(value: Any) -> bool:
    """Has YAML a word of its own for it (null, true, false)?"""
    return value is None or isinstance(value, bool)


def _terminate(signum: int, frame: FrameType | None) -> Any:
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
