"""A cell's folder: where it lies, and the files that say what was asked of it, when and where."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import InputError
from kvbench.results.files import plain, read_json, write_json
from kvbench.results.identity import budget_value, cell_hash, cell_identity, cell_label, file_name

STARTS_KEPT = 50  # earlier starts that env.json remembers
RUN_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class TaskInfo:
    """What a cell is asked to answer, as far as statistics and tables need to know it."""

    name: str  # "longbench/qasper"
    metric: str
    sample_ids: tuple[str, ...]  # in the task's order, after ``limit``
    has_question: bool = True

    @classmethod
    def of(cls, task: Any, limit: int | None = None) -> TaskInfo:
        """From a kvbench.tasks.Task."""
        ids = tuple(sample.id for sample in task.samples[:limit])
        return cls(task.name, task.metric, ids, task.has_question)


def cell_folder(root: str | os.PathLike[str], run: Any, identity: Mapping[str, Any]) -> Path:
    """``<root>/<experiment>/<task>/<label>-<hash>``; the task's name may have several parts."""
    config = plain(run)
    experiment = str(config["experiment"])
    if experiment in ("", ".", "..") or any(mark in experiment for mark in "/\\\0"):
        raise InputError("experiment", experiment, "is no name of a folder.", "Write a name without slashes.")
    return Path(root, experiment, *task_parts(config), f"{cell_label(config)}-{cell_hash(identity)}")


def unopened_folder(root: str | os.PathLike[str], run: Any) -> Path:
    """Where the failure of a cell without an identity is kept: the hash of what is known of it."""
    config = plain(run)
    unknown = cell_identity(config, model_sha256="", data_sha256="", template_sha256="", dtype=str(config["dtype"]))
    return cell_folder(root, config, {**unknown, "unopened": True})


def task_name(config: Mapping[str, Any]) -> str:
    """The task's name as the config gives it."""
    return str((config["task"] or {}).get("name") or "task")


def task_parts(config: Mapping[str, Any]) -> list[str]:
    """The task's name as folder names: ``["longbench", "qasper"]``."""
    return [file_name(part) for part in task_name(config).split("/") if part] or ["task"]


def make_folder(folder: Path, root: str | os.PathLike[str]) -> None:
    """Create ``folder``; raises InputError naming the key ``runs`` when that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("runs", root, f"cannot make {folder}: {error.strerror}.", "Choose another folder.") from error


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise InputError if ``folder`` belongs to another identity: two must never share a folder."""
    known = read_json(folder / "identity.json")
    if known is not None and known != identity:
        differing = sorted(key for key in known.keys() | identity.keys() if known.get(key) != identity.get(key))
        raise InputError(
            "cell", folder, f"holds another cell (differing: {', '.join(differing)}).", "Move it away, and run again."
        )


def remember_start(folder: Path, env: Mapping[str, Any]) -> None:
    """env.json: this process's environment, and in short when and where the cell was started before."""
    path = folder / "env.json"
    starts = (read_json(path) or {}).get("starts")
    starts = starts if isinstance(starts, list) else []
    start = {"time": env.get("time"), "host": socket.gethostname(), "pid": os.getpid()}
    start |= {key: env.get(key) for key in ("device", "git_commit", "argv")}
    write_json(path, {**env, "starts": [*starts, start][-STARTS_KEPT:]})


def running_summary(config: Mapping[str, Any], task: TaskInfo) -> dict[str, Any]:
    """What summary.json says until the cell is finished: which cell it is, and how much was asked of it."""
    return {
        "status": "running",
        "cell": cell_words(config, task.name),
        "n": 0,
        "expected": len(task.sample_ids),
        "score": None,
        "metric": task.metric,
    }


def cell_words(config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The six words that name a cell in tables."""
    method = config["method"] or {}
    return {
        "model": config["model"]["name"],
        "task": task,
        "method": method.get("name"),
        "budget": budget_value(config),
        "protocol": config["protocol"]["name"],
        "seed": config["seed"],
    }


def failure(error: BaseException) -> dict[str, Any]:
    """The part of a summary that says what stopped the cell."""
    return {"status": "failed", "error": "".join(traceback.format_exception_only(error)).strip()}


def yaml_text(config: Mapping[str, Any]) -> bytes:
    """The resolved config, keys in the schema's order."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode("utf-8")


def attach_log(path: Path) -> logging.Handler:
    """A handler that copies everything logged from now on, at INFO and above, to ``path``."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(RUN_LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    package = logging.getLogger("kvbench")
    if package.level == logging.NOTSET:  # the root's default level would keep the progress lines out
        package.setLevel(logging.INFO)
    return handler
