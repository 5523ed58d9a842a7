"""Rotary embedding of a case's queries and keys, by the product's own rotation."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.rotation import LayerRotation


def rope(params: dict[str, Any]) -> LayerRotation:
    pairs = params["head_dim"] // 2
    frequencies = params["rope_theta"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return LayerRotation(frequencies.float(), interleaved=False)


def rotated(tensors: dict[str, torch.Tensor], params: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Queries and keys rotated at the positions of their tokens."""
    at = torch.arange(tensors["k"].shape[2])
    rotation = rope(params)
    return {name: rotation.turn(tensors[name][0], at.expand(tensors[name].shape[1], -1))[None] for name in "qk"}
