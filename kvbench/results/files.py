"""Strict JSON and files that are never half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Dataclasses, mappings (OmegaConf's too), tuples and paths as the types that JSON and YAML have."""
    if isinstance(value, type):
        raise TypeError(f"the class {value.__name__} cannot be written down in a result file")
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # OmegaConf's lists are sequences but not lists; sets have no order of their own.
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if hasattr(value, "__iter__"):
        return [plain(item) for item in value]
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written down in a result file")


def strict_json(value: Any, indent: int | None = None) -> bytes:
    """UTF-8 JSON without NaN or infinity; raises ValueError for those and TypeError for what is not JSON."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, as a tokenizer can produce: escaped, it survives
        return json.dumps(value, allow_nan=False, ensure_ascii=True, indent=indent).encode("ascii")


def parse_strict(line: bytes) -> Any:
    """The value of one JSON text; NaN and Infinity, which Python accepts by default, raise ValueError."""
    return json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` so that a reader, or a crash, sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Indented strict JSON, written whole."""
    write_whole(path, strict_json(value, indent=2) + b"\n")


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in ``folder`` durable, where the system can open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows, some network mounts: the file itself is synced, its name follows with the system's own
        return
    try:
        os.fsync(handle)
    except OSError:  # a file system without fsync for folders; as above
        return
    finally:
        os.close(handle)


def read_lines(
    path: Path, check: Callable[[Any], str | None] = lambda value: None
) -> tuple[list[Any], list[str], bool]:
    """Values of a JSON-lines file, what is wrong with the other lines, and whether the last line is torn.

    ``check`` returns what is wrong with a parsed value, or None. A last line without a newline is torn even if it
    parses: its write did not complete. A missing file has no lines.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], [], False
    # Split at b"\n" only: str.splitlines would also split at U+2028 and others, which JSON strings may contain.
    *lines, tail = content.split(b"\n")
    values, faults = [], []
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_strict(line)
            fault = check(value)
        except (ValueError, RecursionError) as error:
            value, fault = None, str(error)
        if fault is None:
            values.append(value)
        else:
            faults.append(f"{path.name} line {number}: {fault}")
    return values, faults, bool(tail)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None if the file is missing or unreadable as strict JSON."""
    try:
        value = parse_strict(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
