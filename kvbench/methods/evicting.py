"""A layer that evicts while it decodes: entries beyond a limit are dropped after every pass over new tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from kvbench.engine.attention import AttentionOptions, attention_weights, causal_attention
from kvbench.engine.cache import with_room
from kvbench.engine.rotation import LayerRotation
from kvbench.methods.selection import Protect, select


class Scoring(Protocol):
    """What the layer asks of a decode rule."""

    observes: bool  # does it look at attention weights?

    def update(self, carried: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """New scores [kv_heads, n] after a pass whose attention weights were [kv_heads, group, q, n].

        ``carried`` [kv_heads, n] holds the scores so far, zero for the pass's own new entries.
        """
        ...


class EvictingLayer:
    """Plain keys and values of at most ``limit`` entries per KV head once a pass is over.

    The order inside a pass is that of the original H2O and StreamingLLM code: append, attend over all entries (the
    pass sees ``limit`` + q of them), update the scores, then evict. The ``protect.sinks`` first and ``protect.recent``
    last entries stay; of the others those with the highest scores do, and without scores none.

    With ``rotation`` positions count within the cache: an entry stands as many places before the next token as there
    are entries from it on. Rotary attention sees differences alone, so the entries after the last evicted one need not
    be touched; those before it are turned, on reading, by the number of entries evicted after them. Stored keys are
    never rotated again, so that rounding does not grow with the length of the answer.
    """

    compressed = True

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: Scoring,
        limit: int,
        protect: Protect,
        carried: torch.Tensor | None = None,
        rotation: LayerRotation | None = None,
        room: int = 0,
    ) -> None:
        """keys, values [kv_heads, n, dim]; carried fp32 [kv_heads, n] (rules that observe attention)."""
        self.rule, self.limit, self.protect, self.rotation = rule, limit, protect, rotation
        self.length = keys.shape[1]
        self._keys, self._values = with_room(keys, room), with_room(values, room)
        self._carried = carried if rule.observes else None
        front = max(0, limit - protect.recent)  # entries that may come to stand before an evicted one
        self._moved = torch.zeros(keys.shape[0], front, dtype=torch.int32, device=keys.device) if rotation else None

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, : self.length]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[1]
        if self.length + new > self._keys.shape[1]:
            self._keys, self._values = with_room(self.keys, new), with_room(self.values, new)
        self._keys[:, self.length : self.length + new] = keys
        self._values[:, self.length : self.length + new] = values
        self.length += new

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        keys, values = self.turned_keys(), self.values
        if self._carried is None:
            return causal_attention(query[None], keys[None], values[None], options)[0]
        weights = attention_weights(query, keys, options)  # [kv_heads, group, q, n]
        carried = torch.nn.functional.pad(self._carried, (0, self.length - self._carried.shape[1]))
        self._carried = self.rule.update(carried, weights)
        out = weights.to(values.dtype).flatten(1, 2) @ values  # [kv_heads, group * q, dim]
        return out.view(*query.shape[:2], values.shape[-1])

    def turned_keys(self) -> torch.Tensor:
        """Keys [kv_heads, n, dim] at their present positions."""
        if self._moved is None or self.rotation is None:
            return self.keys
        front = min(self._moved.shape[1], self.length)
        turned = self.rotation.turn(self.keys[:, :front], self._moved[:, :front])
        return torch.cat([turned, self.keys[:, front:]], dim=1)

    def settle(self) -> None:
        if self.length > self.limit:
            self.keep(self.limit, self.protect)

    def keep(self, count: int, protect: Protect) -> None:
        """Drops all but ``count`` entries of every head."""
        scores = self._carried if self._carried is not None else self._keys.new_zeros(self._keys.shape[0], self.length)
        kept = select(scores, count, protect)  # [kv_heads, count]
        if self._moved is not None:
            moved = torch.nn.functional.pad(self._moved, (0, max(0, self.length - self._moved.shape[1])))
            left = torch.arange(count - 1, -1, -1, device=kept.device)
            dropped_after = (self.length - 1 - kept) - left
            front = min(count, max(0, self.limit - self.protect.recent))
            self._moved = (moved.gather(1, kept) + dropped_after)[:, :front].to(torch.int32)
        at = kept[:, :, None]
        self._keys[:, :count] = self.keys.gather(1, at.expand(-1, -1, self._keys.shape[2]))
        self._values[:, :count] = self.values.gather(1, at.expand(-1, -1, self._values.shape[2]))
        if self._carried is not None:
            self._carried = self._carried.gather(1, kept)
        self.length = count

    def copy(self) -> EvictingLayer:
        room = self._keys.shape[1] - self.length
        copy = EvictingLayer(self.keys, self.values, self.rule, self.limit, self.protect, None, self.rotation, room)
        copy._carried = None if self._carried is None else self._carried.clone()
        copy._moved = None if self._moved is None else self._moved.clone()
        return copy

    def tensors(self) -> dict[str, torch.Tensor]:
        held = {"keys": self.keys, "values": self.values, "scores": self._carried, "moved": self._moved}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def entries(self) -> float:
        return float(self.length)
