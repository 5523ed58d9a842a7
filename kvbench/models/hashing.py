"""Content hashes of model files, remembered by path, size and modification time.

A model's identity is what its files say, not where they lie: the hash covers relative names and bytes only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22  # bytes read at a time


def cache_root() -> Path:
    """``$KVBENCH_CACHE``, by default ``~/.cache/kvbench``."""
    return Path(os.environ.get("KVBENCH_CACHE") or "~/.cache/kvbench").expanduser()


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sha256_files(folder: Path, names: Iterable[str]) -> str:
    """One hash over the named files of a folder, in sorted order of their names."""
    names = sorted(names)
    digests = _digests([folder / name for name in names])
    return sha256_json(list(zip(names, digests, strict=True)))


def sha256_file(path: Path) -> str:
    return _digests([path])[0]


def _digests(paths: list[Path]) -> list[str]:
    memory = _read_memory()
    digests, learned = [], False
    for path in paths:
        real = os.path.realpath(path)
        status = os.stat(real)
        known = memory.get(real)
        stamp = [status.st_size, status.st_mtime_ns]
        if not (isinstance(known, list) and len(known) == 3 and known[:2] == stamp and isinstance(known[2], str)):
            known = memory[real] = [*stamp, _hash_bytes(real)]
            learned = True
        digests.append(known[2])
    if learned:
        _write_memory(memory)
    return digests


def _hash_bytes(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _memory_file() -> Path:
    return cache_root() / "hashes.json"


def _read_memory() -> dict[str, Any]:
    try:
        memory = json.loads(_memory_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or torn: it only saves time, so it is made anew
        return {}
    return memory if isinstance(memory, dict) else {}


def _write_memory(memory: dict[str, Any]) -> None:
    target = _memory_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".hashes-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(memory, file)
        os.replace(temporary, target)  # two processes at once: the last one wins, both are right
    except OSError:  # a read-only cache costs time, not the run
        return
