"""Where and with what a cell was computed: written down, never part of its identity."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import kvbench

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "hydra-core")


def env(device: str | None = None) -> dict[str, Any]:
    """Versions, platform, device, commit, time and command of this process; JSON-safe, and it never fails.

    ``device`` is the resolved device ("cpu", "cuda:0", "mps"). Nothing heavy is imported: versions are read from the
    installed packages' metadata, and a GPU's name only where torch is loaded already.
    """
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": list(sys.argv),
        "python": platform.python_version(),
        "kvbench": kvbench.__version__,
        **{name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device,
        "device_name": device_name(device),
        **commit(Path(kvbench.__file__).resolve().parent.parent),
    }


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: str | None) -> str | None:
    """The GPU's or the processor's name, or None where nothing tells it."""
    torch = sys.modules.get("torch")
    if device and device.startswith("cuda") and torch is not None:
        try:
            return torch.cuda.get_device_name(device)
        except (RuntimeError, AssertionError, ValueError):  # a device that vanished must not cost the run
            return None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or None


def commit(checkout: Path) -> dict[str, Any]:
    """The commit of kvbench's own checkout and whether tracked files differ from it; nulls for an installed copy."""
    nothing = {"git_commit": None, "git_dirty": None}
    # Without this test a copy installed inside another project's repository would report that project's commit.
    if not (checkout / ".git").exists():
        return nothing
    head = git(checkout, "rev-parse", "HEAD")
    changes = git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": head, "git_dirty": None if changes is None else bool(changes)} if head else nothing


def git(checkout: Path, *words: str) -> str | None:
    """What a git command prints, or None when git is missing, refuses or hangs."""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
