"""Allocators: a budget (entries per KV head, averaged over layers) -> entries for every layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvbench.errors import InputError


class Allocator(Protocol):
    """What a method needs of its allocator."""

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Entries per KV head, int64 [kv_heads] on the CPU, for each compressed layer.

        ``scores`` [kv_heads, n] are the scorer's, one tensor per compressed layer. Every count is between 1 and n.
        """
        ...


def in_every_head(entries: Sequence[int], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same count in all heads of a layer, kept within 1..n."""
    return [
        torch.full((layer.shape[0],), max(1, min(count, layer.shape[1])))
        for count, layer in zip(entries, scores, strict=True)
    ]


@dataclass(frozen=True)
class Uniform:
    """The same number of entries in every layer and head."""

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return in_every_head([budget] * len(scores), scores)


@dataclass(frozen=True)
class PerLayer:
    """Shares given layer by layer, scaled so that they sum to exactly ``budget * layers`` where no layer overflows.

    ``weights`` has one positive number per compressed layer; what rounding leaves over goes to the first layers, one
    entry each. A layer never gets less than 1 or more than n.
    """

    weights: Sequence[int]

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        layers = len(scores)
        if len(self.weights) != layers:
            raise ValueError(f"allocator.weights has {len(self.weights)} numbers, the model compresses {layers} layers")
        return in_every_head(shares(self.weights, budget * layers), scores)


@dataclass(frozen=True)
class PerHead:
    """Shares given KV head by KV head, the same in every layer, scaled to sum to ``budget * kv_heads`` (as HeadKV)."""

    weights: Sequence[int]

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        counts = []
        for layer in scores:
            if len(self.weights) != layer.shape[0]:
                raise ValueError(f"allocator.weights has {len(self.weights)} numbers, the layer {layer.shape[0]} heads")
            entries = torch.tensor(shares(self.weights, budget * layer.shape[0]))
            counts.append(entries.clamp(1, layer.shape[1]))
        return counts


def shares(weights: Sequence[int], whole: int) -> list[int]:
    """``whole`` divided in proportion to the weights, in integers; the remainder goes to the first ones."""
    total = sum(weights)
    entries = [whole * weight // total for weight in weights]
    for at in range(whole - sum(entries)):
        entries[at] += 1
    return entries


@dataclass(frozen=True)
class Pyramid:
    """More entries in the lower layers, falling linearly (PyramidKV, arXiv 2406.02069, section 4.2).

    Of a layer's budget the last ``window`` entries are fixed; the rest falls from ``max`` in the first layer to ``min``
    in the last, where base = budget - window, min = base / beta and max = 2 * base - min. ``steps`` says how:

    - ``exact``: all layers together keep exactly ``budget * layers`` entries: every layer gets the whole part of its
      share, and those from the second on one more until the total is met. max is cut to what a layer can hold, and min
      raised by as much.
    - ``reference``: as the published code: integer division makes the steps too small, so that the total exceeds the
      nominal one (by 13 % at 64 entries with a window of 8), and all layers are equal below 2 * base tokens.

    Deviations of ``reference``: a single layer gets the budget (the code divides by zero); at least one entry is kept
    where the code would keep none.
    """

    window: int = 8
    beta: int = 20
    steps: str = "exact"  # exact | reference

    def __post_init__(self) -> None:
        if self.steps not in ("exact", "reference"):
            raise InputError("method.steps", self.steps, "is not a way to step.", "Allowed: exact, reference.")
        if self.beta < 1:
            raise InputError("method.beta", self.beta, "is below 1.", "Allowed: a whole number from 1 on.")

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        layers, tokens = len(scores), min((layer.shape[1] for layer in scores), default=0)
        base = budget - self.window
        if layers < 2 or base < 1 or budget >= tokens:
            return in_every_head([budget] * layers, scores)
        smallest = base // self.beta
        largest = 2 * base - smallest
        if largest >= tokens - self.window:
            largest = tokens - self.window
            smallest = 2 * base - largest
        if self.steps == "reference":
            step = (largest - smallest) // (layers - 1)
            pyramid = [largest - layer * step for layer in range(layers)] if tokens >= 2 * base else [base] * layers
        else:
            gaps, fall = layers - 1, largest - smallest
            pyramid = [(largest * gaps - layer * fall) // gaps for layer in range(layers)]
            for layer in range(1, 1 + base * layers - sum(pyramid)):  # never the first, which may be full
                pyramid[layer] += 1
        return in_every_head([entries + self.window for entries in pyramid], scores)


@dataclass(frozen=True)
class Adaptive:
    """Entries shared out among the KV heads of a layer by their scores (Ada-KV, arXiv 2407.11550, section 3).

    A share ``floor`` of every head's budget is safe; the rest goes to the highest scores of the whole layer, wherever
    they are. The last ``window`` entries of every head are kept on top of that choice (inside the budget).
    ``normalise`` weighs a head's scores by the share of their mass that its own top entries hold, as the published
    code does: heads that concentrate get more.

    ``rounding``: ``exact`` keeps exactly budget * kv_heads entries per layer, in which every head's safe entries are
    its own highest; ``reference`` is the published code's: count * (1 - floor) + int(base * floor), rounded half to
    even, which misses the total by a few entries.
    """

    window: int = 32
    floor: float = 0.2
    normalise: bool = True
    rounding: str = "exact"  # exact | reference

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise InputError("method.floor", self.floor, "is not a share.", "Allowed: a number from 0 to 1.")
        if self.rounding not in ("exact", "reference"):
            raise InputError("method.rounding", self.rounding, "is no rounding.", "Allowed: exact, reference.")

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._layer(budget, layer) for layer in scores]

    def _layer(self, budget: int, scores: torch.Tensor) -> torch.Tensor:
        heads, tokens = scores.shape
        window = min(self.window, max(0, budget - 1))
        base = min(budget, tokens) - window
        if budget >= tokens:
            return torch.full((heads,), tokens)
        ranked = scores[:, : tokens - window].sort(dim=-1, descending=True, stable=True).values
        if self.normalise:
            mass = ranked[:, :base].sum(-1, keepdim=True) / ranked.sum(-1, keepdim=True)
            ranked = ranked * mass.nan_to_num(1.0)
        safe = 0 if self.rounding == "reference" else min(base, int(base * self.floor + 1e-9))
        safe = max(safe, int(window == 0))  # no head is left empty
        ranked = ranked[:, safe:]
        owner = torch.arange(heads, device=scores.device)[:, None].expand_as(ranked)
        order = ranked.flatten().sort(descending=True, stable=True).indices[: heads * (base - safe)]
        counts = torch.bincount(owner.flatten()[order], minlength=heads).cpu()
        if self.rounding == "reference":
            mixed = counts.double() * (1 - self.floor) + int(base * self.floor)
            return (mixed.round().long() + window).clamp(1, tokens)
        return counts + safe + window


@dataclass(frozen=True)
class Global:
    """The highest scores of all layers and heads together (KVzip, arXiv 2505.23416, its non-uniform budgets).

    Every head keeps its first ``sinks`` and last ``recent`` entries, and at least one; the others compete, and the
    total is exactly ``budget * heads`` over all layers. Equal scores go to the earlier layer, head and token.
    """

    sinks: int = 0
    recent: int = 0

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not scores:
            return []
        heads = [layer.shape[0] for layer in scores]
        tokens = min(layer.shape[1] for layer in scores)
        if budget >= tokens:
            return in_every_head([budget] * len(scores), scores)
        device, safe = scores[0].device, min(self.sinks + self.recent, budget)
        ranked = [layer[:, self.sinks : tokens - self.recent].to(device) for layer in scores] if safe < budget else []
        if safe == 0:
            safe, ranked = 1, [layer.sort(dim=-1, descending=True, stable=True).values[:, 1:] for layer in ranked]
        if budget == safe:
            return in_every_head([budget] * len(scores), scores)
        rivals = ranked[0].shape[1]
        owner = torch.arange(sum(heads), device=device).repeat_interleave(rivals)
        order = torch.cat([layer.flatten() for layer in ranked]).sort(descending=True, stable=True).indices
        chosen = owner[order[: sum(heads) * (budget - safe)]]
        counts = torch.bincount(chosen, minlength=sum(heads)).cpu() + safe
        return list(counts.split(heads))
