"""Checks of single values: each raises InputError with the key, the value, what is allowed and the near miss."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.errors import InputError
from kvbench.suggest import one_of

LARGEST = 2**63 - 1  # what a signed 64-bit integer, and so torch, can hold


def check_choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise InputError(key, value, "is not one of the choices.", one_of(value, allowed))


def check_whole(key: str, value: Any, smallest: int, largest: int = LARGEST) -> None:
    allowed = f"Allowed: a whole number, {smallest} or more."
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(key, value, "is not a whole number.", allowed)
    if value < smallest:
        raise InputError(key, value, f"is below {smallest}.", allowed)
    if value > largest:
        raise InputError(key, value, f"is above {largest}.", allowed)


def check_number(key: str, value: Any, smallest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not smallest <= value < math.inf:
        raise InputError(key, value, "is not such a number.", f"Allowed: a number, {smallest} or more.")


def check_flag(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(key, value, "is neither true nor false.", "Allowed: true, false.")


def check_target(key: str, component: Any) -> None:
    """``component`` is {_target_: dotted path, ...} and the path's package can be found (it is not imported)."""
    target = component.get("_target_") if isinstance(component, Mapping) else None
    if not isinstance(target, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        value = component if target is None else target
        raise InputError(
            f"{key}._target_", value, "does not name a class.", "Write a dotted path: package.module.Name."
        )
    package = target.split(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        fix = f"Install {package}, or start in the folder that contains it."
        raise InputError(f"{key}._target_", target, f"names a Python package that is not there: {package}.", fix)
