"""Folders that are expensive to make: built beside their place, renamed when complete, never used half-made."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)
_MARKER = "complete.json"  # {file name: size}, written last


def is_complete(folder: Path) -> bool:
    """Has the folder every file it was made with, at its full size?"""
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):  # missing, torn or foreign: not complete
        return False


def ensure_folder(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, made by ``make(temporary folder)`` unless a complete one is there."""
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:16]}-"))
    try:
        make(temporary)
        sizes = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in _files(temporary)}
        for path in _files(temporary):
            _flush(path)
        (temporary / _MARKER).write_text(json.dumps(sizes), encoding="utf-8")
        _flush(temporary / _MARKER)
        _put(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _put(made: Path, target: Path) -> None:
    if target.exists() and not is_complete(target):
        log.warning("%s was incomplete and is made again", target)
        broken = Path(tempfile.mkdtemp(dir=target.parent, prefix=".broken-"))
        os.rename(target, broken / "copy")
        shutil.rmtree(broken, ignore_errors=True)
    try:
        os.rename(made, target)
    except OSError:
        if not is_complete(target):  # otherwise another process was faster, and its copy is as good
            raise


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
