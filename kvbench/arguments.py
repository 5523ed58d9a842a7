"""``key=value`` arguments of the small commands (report, status, score); ``run`` itself uses Hydra."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvbench.suggest import nearest

HELP_WORDS = ("--help", "-h", "help")


def parse(argv: Sequence[str], allowed: Mapping[str, str], usage: str) -> dict[str, str]:
    """Return ``{key: value}`` for ``argv`` (without the program's name); values stay text.

    ``allowed`` maps each key to one line of help. ``--help`` prints the usage and exits 0; an unknown key, a repeated
    key or a word that is not ``key=value`` prints what is wrong, with the nearest known key, and exits 2.
    """
    if any(word in HELP_WORDS for word in argv):
        print(help_text(allowed, usage))
        raise SystemExit(0)
    values: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            stop(f"{word!r} is not of the form key=value.{suggestion(word, allowed)}", allowed, usage)
        if key not in allowed:
            stop(f"unknown key {key!r} in {word!r}.{suggestion(key, allowed)}", allowed, usage)
        if key in values:
            stop(f"{key} is given twice ({values[key]!r} and {value!r}).", allowed, usage)
        if not value:
            stop(f"{key}= has no value.", allowed, usage)
        values[key] = value
    return values


def help_text(allowed: Mapping[str, str], usage: str) -> str:
    """The usage line and one line for each key."""
    width = max((len(key) for key in allowed), default=0)
    return "\n".join([f"usage: {usage}", *(f"  {key:<{width}}  {text}" for key, text in allowed.items())])


def suggestion(key: str, allowed: Mapping[str, str]) -> str:
    """What a mistyped key was probably meant to be, or nothing."""
    close = nearest(key.lstrip("-"), allowed)
    return f" Did you mean {close[0]}=...?" if close else ""


def stop(message: str, allowed: Mapping[str, str], usage: str) -> NoReturn:
    """Print what is wrong and how the command is called, and exit 2."""
    print(f"error: {message}\n{help_text(allowed, usage)}", file=sys.stderr)
    raise SystemExit(2)
