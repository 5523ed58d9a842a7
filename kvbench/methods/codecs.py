"""Codecs: how the entries that a method keeps are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvbench.engine.cache import LayerCache, PlainLayer


class Codec(Protocol):
    """What a method needs of its codec."""

    @property
    def label(self) -> str: ...

    # A codec that stores entries coarsely may have ``block``: how many it codes at once. Its bytes then grow with the
    # entries, except that they may fall where their number is a multiple of this.

    def __call__(
        self, layer: int, heads: Sequence[int], keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> LayerCache:
        """The cache of a layer from its kept entries [kv_heads, n, dim], sorted by position.

        ``heads`` are the numbers of the KV heads that the rows belong to: all, or one where their counts differ.
        ``room`` tokens will follow.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """Keys and values in the model's dtype."""

    label = "plain"

    def __call__(
        self, layer: int, heads: Sequence[int], keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> LayerCache:
        return PlainLayer(keys, values, room)
