"""Layers whose KV heads hold unequal numbers of entries (budgets per head): really dropped, not masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbench.engine.attention import AttentionOptions, masked_attention
from kvbench.engine.cache import LayerCache, PlainLayer


class RaggedLayer:
    """Plain keys and values of unequal counts per head, stored end to end; the tokens to come follow in every head.

    ``keys`` and ``values`` are [total, dim], head after head; ``lengths`` is int64 [kv_heads]. Attention reads a padded
    copy that lasts for one call.
    """

    compressed = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, room: int) -> None:
        self._keys, self._values = keys, values
        self._lengths = lengths
        self._longest = int(lengths.max())
        none = (
            keys.new_empty(lengths.numel(), 0, keys.shape[-1]),
            values.new_empty(lengths.numel(), 0, values.shape[-1]),
        )
        self._tail = PlainLayer(*none, room)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._tail.append(keys, values)

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        at, seen = self._padded()
        keys = torch.cat([self._keys[at], self._tail.keys], dim=1)
        values = torch.cat([self._values[at], self._tail.values], dim=1)
        seen = torch.cat([seen, seen.new_ones(seen.shape[0], self._tail.length)], dim=1)
        return masked_attention(query[None], keys[None], values[None], seen, options)[0]

    def _padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [kv_heads, longest] into the stored entries, and which of them exist."""
        column = torch.arange(self._longest, device=self._lengths.device)
        first = self._lengths.cumsum(0) - self._lengths
        seen = column < self._lengths[:, None]
        return torch.where(seen, first[:, None] + column, 0), seen

    def settle(self) -> None:
        """Nothing is dropped after prefill."""

    def copy(self) -> RaggedLayer:
        copy = RaggedLayer(self._keys, self._values, self._lengths, 0)  # what was kept never changes: it is shared
        copy._tail = self._tail.copy()
        return copy

    def tensors(self) -> dict[str, torch.Tensor]:
        tail = {f"tail_{name}": tensor for name, tensor in self._tail.tensors().items()}
        return {"keys": self._keys, "values": self._values, "lengths": self._lengths, **tail}

    @property
    def entries(self) -> float:
        return self._keys.shape[0] / self._lengths.numel() + self._tail.length


class HeadsLayer:
    """One layer cache per KV head: how entries of unequal counts are stored by codecs that need equal ones."""

    compressed = True

    def __init__(self, heads: Sequence[LayerCache]) -> None:
        self.heads = list(heads)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for head, held in enumerate(self.heads):
            held.append(keys[head : head + 1], values[head : head + 1])

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        group = query.shape[0] // len(self.heads)
        outs = []
        for head, held in enumerate(self.heads):
            own = slice(head * group, (head + 1) * group)
            sinks = None if options.sinks is None else options.sinks[own]
            outs.append(held.attend(query[own], replace(options, sinks=sinks)))
        return torch.cat(outs)

    def settle(self) -> None:
        for held in self.heads:
            held.settle()

    def copy(self) -> HeadsLayer:
        return HeadsLayer([held.copy() for held in self.heads])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{head}": t for head, held in enumerate(self.heads) for name, t in held.tensors().items()}

    @property
    def entries(self) -> float:
        return sum(held.entries for held in self.heads) / len(self.heads)
