"""Codecs: how the entries that a method keeps are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvbench.engine.cache import LayerCache, PlainLayer
from kvbench.engine.capture import LayerCapture


class Codec(Protocol):
    """What a method needs of its codec."""

    def __call__(self, layer: LayerCapture, keys: torch.Tensor, values: torch.Tensor, room: int) -> LayerCache:
        """The cache of one layer from its kept entries [kv_heads, n, dim], sorted by position."""
        ...


@dataclass(frozen=True)
class Plain:
    """Keys and values in the model's dtype."""

    def __call__(self, layer: LayerCapture, keys: torch.Tensor, values: torch.Tensor, room: int) -> LayerCache:
        return PlainLayer(keys, values, room)
