"""What is wrong with a task's YAML, said before its builder reads data, and before a tokenizer loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from kvbench.checks import check_choice, check_flag, check_target, check_whole
from kvbench.errors import InputError
from kvbench.tasks.metrics import METRICS


def check_task(task: Any) -> None:
    """``task`` is {_target_, name, path, ...}; the parameters of built-in tasks are checked one by one.

    A task that is not listed here (a user's own) checks its parameters itself, when it is built.
    """
    if not isinstance(task, Mapping):
        raise InputError("task", task, "is not a task.", "Choose one: task=passkey.")
    if not isinstance(task.get("name"), str) or not task["name"].strip():
        raise InputError("task.name", task.get("name"), "is not a name.", "Give the task a name: tables show it.")
    check_target("task", task)
    _check_path(task)
    for parameter, check in PARAMETERS.get(task["_target_"], {}).items():
        if parameter in task:
            check(f"task.{parameter}", task[parameter])


def _check_path(task: Mapping[str, Any]) -> None:
    path, fix = task.get("path"), "Give the file or folder with the data."
    if path is None:
        if task["_target_"] in NEED_DATA:
            raise InputError("task.path", None, f"{task['name']} has no data of its own.", fix)
        return
    if not isinstance(path, str) or not path.strip():
        raise InputError("task.path", path, "is not a path.", fix)
    if not os.path.exists(os.path.expanduser(path)):
        raise InputError("task.path", path, "does not exist.", fix)


def _at_least(smallest: int) -> Callable[[str, Any], None]:
    return lambda key, value: check_whole(key, value, smallest)


def _one_or_many(check: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """For a value that may also be a list of such values."""

    def check_all(key: str, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            check(key, item)

    return check_all


def _depth(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1):
        raise InputError(key, value, "is not a depth.", "Allowed: a number from 0 (the start) to 1 (the end), or null.")


def _depths(key: str, value: Any) -> None:
    if isinstance(value, list):
        _one_or_many(_depth)(key, value)
    else:
        check_whole(key, value, 1)


NEED_DATA = ("kvbench.tasks.jsonl.build", "kvbench.tasks.ruler.build")
PARAMETERS: dict[str, dict[str, Callable[[str, Any], None]]] = {
    "kvbench.tasks.passkey.build": {
        "length": _at_least(1),
        "samples": _at_least(1),
        "keys": _at_least(1),
        "digits": _at_least(1),
        "depth": _depth,
        "filler": lambda key, value: check_choice(key, value, ("grass", "pydoc")),
        "answer_prefix": check_flag,
        "chat": check_flag,
    },
    "kvbench.tasks.niah.build": {
        "length": _one_or_many(_at_least(1)),
        "depths": _depths,
        "repeats": _at_least(1),
        "answer_prefix": check_flag,
        "chat": check_flag,
    },
    "kvbench.tasks.jsonl.build": {
        "metric": lambda key, value: check_choice(key, value, METRICS),
        "max_new_tokens": _at_least(1),
        "chat": check_flag,
        "has_question": check_flag,
        "stop_at_newline": check_flag,
        "first_line": check_flag,
    },
    "kvbench.tasks.ruler.build": {"chat": check_flag},
}
