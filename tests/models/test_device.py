"""device=auto and dtype=auto: what is chosen, and that a device that is not there is told."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import InputError
from kvbench.models import resolve_device, resolve_dtype


@pytest.fixture
def machine(monkeypatch):
    def have(cuda: int = 0, mps: bool = False, bfloat16: bool = True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)

    return have


def test_auto_takes_the_first_that_is_there(machine):
    for cuda, mps, expected in ((2, False, "cuda"), (1, True, "cuda"), (0, True, "mps"), (0, False, "cpu")):
        machine(cuda, mps)
        assert resolve_device("auto") == expected


def test_explicit_devices(machine):
    machine(cuda=2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert resolve_device(name) == name
    for name in ("cuda:2", "mps", "gpu", "cpu:0", "cuda:x", "cuda:-1", ""):
        with pytest.raises(InputError, match=r"^device="):
            resolve_device(name)
    machine()
    with pytest.raises(InputError, match="This machine has: cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("device", "stored", "bfloat16", "expected"),
    [
        ("cpu", torch.bfloat16, True, torch.float32),
        ("cuda", torch.bfloat16, True, torch.bfloat16),
        ("cuda:1", torch.float16, True, torch.float16),
        ("cuda", torch.float32, True, torch.bfloat16),
        ("cuda", None, True, torch.bfloat16),
        ("cuda", torch.bfloat16, False, torch.float16),
        ("cuda", torch.float32, False, torch.float16),
    ],
)
def test_auto_dtype(machine, device, stored, bfloat16, expected):
    machine(cuda=2, bfloat16=bfloat16)
    dtype, sentence = resolve_dtype("auto", device, stored)
    assert dtype is expected
    assert str(dtype).removeprefix("torch.") in sentence and "auto" in sentence


def test_explicit_dtype():
    assert resolve_dtype("bfloat16", "cpu", None)[0] is torch.bfloat16
    with pytest.raises(InputError, match=r"dtype=int8.*float16"):
        resolve_dtype("int8", "cpu", None)
