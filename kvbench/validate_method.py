"""What is wrong with a method's YAML, said before its classes (and with them torch) are imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvbench.checks import check_choice, check_target, check_whole
from kvbench.errors import InputError

# Built-in scorers -> their parameters: the smallest whole number, or the choices. Scorers that are not listed here
# (a user's own) check their parameters themselves, when they are made.
SCORERS: dict[str, dict[str, int | tuple[str, ...]]] = {
    "kvbench.methods.scorers.SnapKV": {
        "window": 1,
        "kernel": 1,
        "pooling": ("max", "avg", "none"),
        "group": ("mean", "max", "sum"),
    },
    "kvbench.methods.scorers.Tova": {"heads": ("all", "kv")},
    "kvbench.methods.scorers.ColumnSums": {"group": ("mean", "max", "sum")},
}


def check_method(method: Any) -> None:
    """``method`` is {name, scorer, allocator, protect: {sinks, recent}, codec, positions} with usable values."""
    if not isinstance(method, Mapping):
        raise InputError("method", method, "is not a method.", "Choose one: method=snapkv.")
    name = method.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]{0,63}", name):
        raise InputError("method.name", name, "is not a safe name.", "Allowed: letters, digits and . _ + -")
    for part in ("scorer", "allocator", "codec", "decode"):
        if method.get(part):
            check_target(f"method.{part}", method[part])
    if method.get("codec") is None:
        fix = "Plain storage is {_target_: kvbench.methods.codecs.Plain}."
        raise InputError("method.codec", None, "is missing.", fix)
    if (method.get("scorer") is None) != (method.get("allocator") is None):
        lacking = "scorer" if method.get("scorer") is None else "allocator"
        fix = "A method has a scorer and an allocator, or neither (it evicts nothing)."
        raise InputError(f"method.{lacking}", None, "is missing.", fix)
    check_choice("method.positions", method.get("positions"), ("original", "compact"))
    _check_scorer(method)
    _check_prefill(method)
    protected(method)


def _check_prefill(method: Mapping[str, Any]) -> None:
    prefill = method.get("prefill", "full")
    check_choice("method.prefill", prefill, ("full", "streaming"))
    if "chunk" in method:
        check_whole("method.chunk", method["chunk"], 1)
    scorer, codec = ((method.get(part) or {}).get("_target_", "") for part in ("scorer", "codec"))
    if prefill == "streaming" and not (scorer.endswith(".Recency") and codec.endswith(".Plain")):
        reason = "reads the text through sinks and a recent window, which is not what this scorer and codec would keep."
        raise InputError("method.prefill", prefill, reason, "Use method=streamingllm with codec plain, or full.")


def _check_scorer(method: Mapping[str, Any]) -> None:
    scorer = method.get("scorer") or {}
    for parameter, allowed in SCORERS.get(scorer.get("_target_", ""), {}).items():
        if parameter not in scorer:
            continue  # the class has a default
        value, key = scorer[parameter], _written_as(method, parameter)
        if isinstance(allowed, tuple):
            check_choice(key, value, allowed)
        else:
            check_whole(key, value, allowed)
        if parameter == "kernel" and value % 2 == 0:
            fix = f"Allowed: an odd number, such as {value + 1}: pooling is centred on its token."
            raise InputError(key, value, "is even.", fix)


def protected(method: Mapping[str, Any]) -> tuple[int, int]:
    """(sinks, recent) that the method always keeps. Raises InputError unless both are whole numbers from 0 on."""
    protect = method.get("protect")
    if not isinstance(protect, Mapping) or not {"sinks", "recent"} <= set(protect) <= {
        "sinks",
        "recent",
        "recent_share",
    }:
        raise InputError("method.protect", protect, "is not {sinks: n, recent: n}.", "Write both, in entries.")
    for name, shortcut in (("sinks", "sinks"), ("recent", "window")):
        linked = shortcut in method and method[shortcut] == protect[name]
        check_whole(f"method.{shortcut}" if linked else f"method.protect.{name}", protect[name], 0)
    share = protect.get("recent_share", 0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise InputError("method.protect.recent_share", share, "is not a share.", "Allowed: from 0 to below 1.")
    return protect["sinks"], protect["recent"]


def _written_as(method: Mapping[str, Any], parameter: str) -> str:
    """The key that the user sets: method.window where the scorer's window refers to it, else method.scorer.window."""
    scorer = method["scorer"]
    linked = parameter in method and method[parameter] == scorer[parameter]
    return f"method.{parameter}" if linked else f"method.scorer.{parameter}"
