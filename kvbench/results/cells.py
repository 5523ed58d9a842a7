"""Read back what runs left behind, finished or not, without changing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import InputError
from kvbench.results.files import read_json, read_lines
from kvbench.results.folder import TaskInfo, cell_words, task_parts
from kvbench.results.lock import cell_is_held
from kvbench.results.store import record_fault

PARTS = ("config.yaml", "summary.json")


@dataclass(frozen=True)
class Cell:
    """One cell's folder, as read."""

    folder: Path
    experiment: str
    config: Mapping[str, Any]  # config.yaml
    summary: Mapping[str, Any]  # summary.json
    task: TaskInfo
    status: str  # done | running | failed | incomplete
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)  # of the samples asked for, in their order
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fault: str | None = None  # why the folder cannot be read; the cell is listed and in no table

    @property
    def words(self) -> Mapping[str, Any]:
        """model, task, method, budget, protocol, seed."""
        return self.summary["cell"]

    @property
    def experiment_folder(self) -> Path:
        """``<runs>/<experiment>``: above the cell's folder and the parts of the task's name."""
        return self.folder.parents[len(task_parts(self.config))]


def find_cells(root: Path | str) -> list[Path]:
    """The cell folders under ``root`` (a runs folder, an experiment, a task, or one cell), sorted.

    Raises InputError naming the key ``runs`` if there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise InputError("runs", root, "there is no such folder.", "Name the folder that the runs were written to.")
    return sorted(path.parent for path in root.rglob(PARTS[0]) if (path.parent / PARTS[1]).exists())


def read_cells(root: Path | str) -> list[Cell]:
    """All cells under ``root``."""
    return [read_cell(folder) for folder in find_cells(root)]


def read_cell(folder: Path) -> Cell:
    """One cell. What cannot be read makes a cell with a ``fault`` and status ``failed``, never an exception."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        summary = read_json(folder / "summary.json")
        if summary is None:
            raise ValueError("summary.json is not JSON")
        task = read_task(folder, summary)
        lines, faults, torn = read_lines(folder / "records.jsonl", record_fault)
        summary["cell"] = cell_words(config, task.name)  # fails on a config that is no cell's
        experiment = str(config["experiment"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        fault = f"{type(error).__name__}: {error}"
        return Cell(folder, "?", {}, {"cell": {}}, TaskInfo("?", "", ()), "failed", fault=fault)
    last = {record["sample_id"]: record for record in lines}
    records = [last[name] for name in task.sample_ids if name in last]
    state = live_status(folder, str(summary.get("status")), damaged=bool(faults) or torn)
    return Cell(folder, experiment, config, summary, task, state, records, read_json(folder / "identity.json") or {})


def read_task(folder: Path, summary: Mapping[str, Any]) -> TaskInfo:
    """task.json, or, for a cell that failed before its task was made, what its summary says."""
    task = read_json(folder / "task.json")
    if task is None:
        return TaskInfo(str(summary["cell"]["task"]), str(summary.get("metric") or ""), ())
    return TaskInfo(task["name"], task["metric"], tuple(task["sample_ids"]), bool(task["has_question"]))


def live_status(folder: Path, written: str, damaged: bool) -> str:
    """``running`` only while a live process holds the cell; a killed run's cell is ``incomplete``."""
    if written == "running" or damaged:
        return "running" if cell_is_held(folder) else "incomplete"
    return written


def progress(cell: Cell) -> tuple[int, int]:
    """Samples with a valid record, and samples asked for."""
    return sum(record["status"] != "failed" for record in cell.records), len(cell.task.sample_ids)
