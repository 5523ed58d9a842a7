"""Where a model runs and in which number format; ``auto`` is resolved here, once, with a sentence that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch

_DEVICES = "auto, cuda, cuda:N, mps, cpu"
_DTYPES = ("float32", "bfloat16", "float16")


def resolve_device(name: str) -> str:
    """``auto`` -> cuda, mps or cpu, the first that is there; a device that is not there is an InputError."""
    import torch

    present = ["cpu"]
    if torch.backends.mps.is_available():
        present.insert(0, "mps")
    if torch.cuda.is_available():
        present.insert(0, "cuda")
    if name == "auto":
        return present[0]
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "mps", "cpu") or (index and not (kind == "cuda" and index.isdecimal())):
        raise InputError("device", name, "is not a device.", f"Allowed: {_DEVICES}.")
    if kind not in present:
        raise InputError("device", name, "is not there.", f"This machine has: {', '.join(present)}.")
    if index and int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError("device", name, f"is not there: {count} CUDA device(s).", f"Use cuda:0 to cuda:{count - 1}.")
    return name


def resolve_dtype(name: str, device: str, checkpoint: torch.dtype | None) -> tuple[torch.dtype, str]:
    """The dtype to load in, and a sentence that says what was chosen and why.

    ``auto``: the CPU computes in float32 (its 16-bit kernels are slow and round differently); a GPU takes the
    checkpoint's own 16-bit dtype, or bfloat16, or float16 where the GPU has no bfloat16.
    """
    import torch

    if name != "auto":
        if name not in _DTYPES:
            raise InputError("dtype", name, "is not a dtype.", f"Allowed: auto, {', '.join(_DTYPES)}.")
        return getattr(torch, name), f"dtype {name}: as asked"
    if device == "cpu":
        return torch.float32, "dtype float32: auto on cpu"
    if checkpoint is torch.float16:
        return torch.float16, f"dtype float16: auto on {device} takes the checkpoint's own"
    if not _has_bfloat16(device):
        return torch.float16, f"dtype float16: auto on {device}, which has no bfloat16"
    if checkpoint is torch.bfloat16:
        return torch.bfloat16, f"dtype bfloat16: auto on {device} takes the checkpoint's own"
    kept = "unknown" if checkpoint is None else str(checkpoint).removeprefix("torch.")
    return torch.bfloat16, f"dtype bfloat16: auto on {device} (the checkpoint's is {kept})"


def _has_bfloat16(device: str) -> bool:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        torch.ones(1, dtype=torch.bfloat16, device=device).add_(1)
    except (RuntimeError, TypeError):  # older macOS releases
        return False
    return True
