"""Allocators: a budget (entries per KV head, averaged over layers) -> entries per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Allocator(Protocol):
    """What a method needs of its allocator."""

    def __call__(self, budget: int, tokens: int, layers: int) -> list[int]:
        """Entries for each of the ``layers`` compressed layers, each between 1 and ``tokens``."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The same number of entries in every layer."""

    def __call__(self, budget: int, tokens: int, layers: int) -> list[int]:
        return [min(budget, tokens)] * layers


@dataclass(frozen=True)
class PerLayer:
    """Shares given layer by layer, scaled so that they sum to exactly ``budget * layers`` where no layer overflows.

    ``weights`` has one positive number per compressed layer; what rounding leaves over goes to the first layers, one
    entry each. A layer never gets less than 1 or more than ``tokens``.
    """

    weights: Sequence[int]

    def __call__(self, budget: int, tokens: int, layers: int) -> list[int]:
        if len(self.weights) != layers:
            raise ValueError(f"allocator.weights has {len(self.weights)} numbers, the model compresses {layers} layers")
        total, whole = sum(self.weights), budget * layers
        entries = [whole * weight // total for weight in self.weights]
        for layer in range(whole - sum(entries)):
            entries[layer] += 1
        return [max(1, min(count, tokens)) for count in entries]
