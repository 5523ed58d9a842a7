"""One writer per cell."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from pathlib import Path

from filelock import SoftFileLease, Timeout

from kvbench.errors import InputError

# A lease is a marker file with host, pid and a heartbeat: a dead holder on this host is recognised by its pid at once,
# one elsewhere by its silence; unlike flock it needs no lock daemon and means the same on NFS (filelock >= 3.30).
LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 15.0
LOCK_NAME = "cell.lock"

log = logging.getLogger(__name__)


class CellBusy(InputError):
    """Another process writes this cell, or took it over while this one gave no sign of life for a minute."""


def take_cell(folder: Path, lease_seconds: float = LEASE_SECONDS) -> SoftFileLease:
    """The held lease on ``folder``; raises CellBusy with the holder's pid and host if somebody else writes there.

    A holder on another machine cannot be probed: it gets a little more than one lease's time to show its heartbeat.
    """
    heartbeat = min(HEARTBEAT_SECONDS, lease_seconds / 4)
    # thread_local=False: whoever closes the cell may release it, also from a signal handler's thread.
    lease = SoftFileLease(
        folder / LOCK_NAME, lease_duration=lease_seconds, heartbeat_interval=heartbeat, thread_local=False
    )
    try:
        lease.acquire(timeout=0.5, poll_interval=0.05)
        return lease
    except Timeout:
        holder = lease.owner
    if holder is not None and holder.hostname != own_host_name():
        wait = 1.25 * lease_seconds
        log.warning("%s: %s holds this cell; waiting %.0f s for its heartbeat", folder, describe(lease), wait)
        try:
            lease.acquire(timeout=wait, poll_interval=min(1.0, lease_seconds / 10))
            return lease
        except Timeout:
            pass  # its heartbeat came: it is alive, and the refusal below is the answer
    raise CellBusy(
        "cell",
        folder,
        f"{describe(lease)} is writing this cell.",
        "Wait for it or stop it; one that died is recognised as dead when the same command is given again.",
    )


def describe(lease: SoftFileLease) -> str:
    """``pid 12 on host node7`` of whoever holds the lease."""
    holder = lease.owner
    return "an unknown process" if holder is None else f"pid {holder.pid} on host {holder.hostname}"


def cell_is_held(folder: Path) -> bool:
    """Whether a live process writes ``folder``: by its pid on this host, by the age of its heartbeat elsewhere."""
    marker = folder / LOCK_NAME
    holder = SoftFileLease(marker).owner
    if holder is None:
        return False
    if holder.hostname == own_host_name():
        return process_exists(holder.pid)
    try:
        return time.time() - marker.stat().st_mtime < 2 * LEASE_SECONDS
    except FileNotFoundError:
        return False


def process_exists(pid: int) -> bool:
    """Whether a process with this pid runs here, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def own_host_name() -> str:
    """This host's name as lock markers spell it (containers get a suffix), read from a marker of our own."""
    with tempfile.TemporaryDirectory() as folder, SoftFileLease(Path(folder) / LOCK_NAME) as lock:
        owner = lock.owner
        return owner.hostname if owner is not None else ""
