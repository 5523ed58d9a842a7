"""What the tasks that make their own samples share: wordings, checks of parameters, the hash of what was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.errors import InputError
from kvbench.tasks.sample import Sample, Task


@cache
def wording(file: str) -> dict[str, Any]:
    """The sentences of a task, from the YAML file beside this module."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def at_least(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises InputError unless ``value`` is an integer in ``least``..``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(key, value, "the value is not allowed.", f"Allowed: an integer, {allowed}.")


def listed(value: Any) -> list[Any]:
    """The items of a list (OmegaConf's too), or the value alone."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def depth_in_range(key: str, value: Any) -> float:
    """``value`` as a depth. Raises InputError unless it is a number in 0..1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(key, value, "a depth is a number between 0 (the start) and 1 (the end).")
    return float(value)


def no_path(task: str, path: str | None) -> None:
    """Raises InputError if a path is given to a task that reads none: it would be ignored in silence."""
    if path is not None:
        raise InputError("task.path", path, f"{task} makes its own data and reads none.", "Leave task.path out.")


def made_task(name: str, metric: str, samples: tuple[Sample, ...], max_new_tokens: int, chat: bool) -> Task:
    """The task of samples that were made here; their own text is the content that is hashed."""
    content = json.dumps([astuple(sample) for sample in samples], sort_keys=True)
    return Task(
        name=name,
        metric=metric,
        max_new_tokens=max_new_tokens,
        samples=samples,
        data_sha256=hashlib.sha256(content.encode()).hexdigest(),
        chat=chat,
    )
