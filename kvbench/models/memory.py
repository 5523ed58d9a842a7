"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


def available_memory() -> int | None:
    """Bytes that can be allocated before the machine (or this container's limit) runs out; None if unknown."""
    known = [value for value in (_machine(), _container()) if value is not None]
    return min(known) if known else None


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        pass
    try:
        import psutil

        return psutil.virtual_memory().available
    except ImportError:
        pass
    try:  # all of it: an upper bound is better than nothing
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _container() -> int | None:
    """What a version 2 control group leaves; pages of files can be dropped, so they do not count as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        files = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return max(0, int(limit) - used + files)
    except (OSError, ValueError):
        return None
