"""JSON lines from outside: a line that is wrong costs one sample, never the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn


def read_objects(content: bytes) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """Line number (from 1), object and what is wrong with it, for every line that is not blank.

    Lines end at b"\\n" only: texts may contain the other separators that str.splitlines knows.
    """
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, _object(line), None
        except (ValueError, RecursionError) as error:
            yield number, {}, _reason(error)


def _object(line: bytes) -> dict[str, Any]:
    text = line.decode("utf-8")
    value = json.loads(text, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte {error.start} of the line)"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos}"
    return str(error)
