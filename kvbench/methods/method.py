"""A method: scorer + allocator + protected entries + codec, composed in ``conf/method/*.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.cache import Cache, LayerCache, SlidingLayer
from kvbench.engine.capture import Capture, LayerCapture
from kvbench.engine.rotation import Rotation
from kvbench.errors import SampleError
from kvbench.methods.allocators import Allocator
from kvbench.methods.codecs import Codec, Plain
from kvbench.methods.scorers import Scorer
from kvbench.methods.selection import Protect, select


@dataclass(frozen=True)
class Region:
    """What of a capture's n tokens may be evicted and what is stored.

    Entries [0, evictable) compete for the budget; entries [evictable, stored) are kept on top of it. Entries from
    ``stored`` on are dropped after the choice: a question that the cache must forget (swapped), or the last prompt
    token, which is fed again.
    """

    evictable: int
    stored: int


@dataclass(frozen=True)
class Compressed:
    """A method's result for one context."""

    cache: Cache
    kept: tuple[int, ...]  # entries per KV head kept of the evictable region, for each compressed layer
    positions: dict[int, torch.Tensor]  # layer -> [kv_heads, stored entries]: where they stood in the prompt
    note: str  # why nothing, or more than the budget, was kept; else ""

    @property
    def kept_mean(self) -> float:
        return sum(self.kept) / len(self.kept) if self.kept else 0.0


@dataclass(frozen=True)
class Method:
    """How a capture becomes a cache. ``scorer`` None: nothing is ever evicted."""

    name: str
    scorer: Scorer | None
    allocator: Allocator | None
    protect: Protect
    codec: Codec

    @property
    def evicts(self) -> bool:
        return self.scorer is not None

    @property
    def lossless(self) -> bool:
        """Does the cache hold all keys and values as they were computed, whatever the budget?"""
        return not self.evicts and isinstance(self.codec, Plain)

    @property
    def query_window(self) -> int:
        return self.scorer.query_window if self.scorer is not None else 0

    def compress(
        self, capture: Capture, region: Region, budget: int, room: int, rotation: Rotation | None = None
    ) -> Compressed:
        """Keeps ``budget`` entries per KV head of the evictable region (the mean over layers), plus the rest.

        ``room`` is how many tokens will follow (question and answer): space is set aside for them. Sliding-window
        layers are passed through. With ``rotation`` (positions=compact) entries take positions within the cache: every
        layer's last entry stands just before the next token, which follows the longest layer.
        """
        whole = [layer for layer in capture.layers if layer.options.sliding_window is None]
        counts, note = self._counts(region.evictable, budget, len(whole))
        of_layer = dict(zip([layer.index for layer in whole], counts, strict=True))
        positions = {layer.index: self._kept(layer, region, of_layer[layer.index]) for layer in whole}
        longest = max((kept.shape[1] for kept in positions.values()), default=region.stored)
        next_position = region.stored if rotation is None else longest
        layers: list[LayerCache] = []
        for layer in capture.layers:
            window, kept = layer.options.sliding_window, positions.get(layer.index)
            if kept is None:
                kept = torch.arange(region.stored, device=layer.keys.device).expand(layer.keys.shape[0], -1)
            keys, values = gather(layer.keys, kept), gather(layer.values, kept)
            if rotation is not None and next_position != region.stored:
                at = torch.arange(next_position - kept.shape[1], next_position, device=kept.device)
                keys = rotation.turn(layer.index, keys, at - kept)
            plain = window is None
            layers.append(self.codec(layer, keys, values, room) if plain else SlidingLayer(keys, values, window))
        return Compressed(Cache(layers, next_position), tuple(counts), positions, note)

    def _counts(self, evictable: int, budget: int, layers: int) -> tuple[list[int], str]:
        if not self.evicts or self.allocator is None:
            return [evictable] * layers, "the method evicts nothing"
        if layers == 0:
            return [], "every layer is a sliding-window layer: there is nothing to compress"
        if budget >= evictable:
            return [evictable] * layers, f"the budget ({budget}) covers all {evictable} entries in scope"
        if self.protect.sinks + self.protect.recent >= evictable:
            protected = f"sinks ({self.protect.sinks}) and recent window ({self.protect.recent})"
            return [evictable] * layers, f"the protected {protected} cover all {evictable} entries in scope"
        counts = self.allocator(budget, evictable, layers)
        fewest = self.protect.sinks + self.protect.recent
        note = "" if min(counts) >= fewest else f"{min(counts)} entries cannot hold the {fewest} protected ones"
        return counts, note

    def _kept(self, layer: LayerCapture, region: Region, count: int) -> torch.Tensor:
        """Positions [kv_heads, m] of the entries stored, ascending."""
        heads, device = layer.keys.shape[0], layer.keys.device
        if count >= region.evictable or self.scorer is None:
            return torch.arange(region.stored, device=device).expand(heads, -1)
        # A scored token that is dropped and fed again (stored < evictable) must be among the kept in every head.
        dropped = max(0, region.evictable - region.stored)
        protect = Protect(self.protect.sinks, max(self.protect.recent, dropped))
        scores = self.scorer(layer)
        check_scores(scores, layer, self.scorer)
        kept = select(scores[:, : region.evictable], count, protect)
        if dropped:
            return kept[:, : count - dropped]
        on_top = torch.arange(region.evictable, region.stored, device=device).expand(heads, -1)
        return torch.cat([kept, on_top], dim=1)


def check_scores(scores: torch.Tensor, layer: LayerCapture, scorer: Scorer) -> None:
    """A scorer of the wrong shape, or one that gives NaN where the model did not, must not choose anything."""
    expected = tuple(layer.keys.shape[:2])
    if tuple(scores.shape) != expected:
        raise SampleError(f"{scorer} gives scores of shape {tuple(scores.shape)}, not {expected} (KV heads, tokens)")
    if bool(scores.isnan().any()) and bool(torch.isfinite(layer.keys).all()):
        raise SampleError(f"{scorer} gives NaN in layer {layer.index}")


def gather(entries: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """entries [heads, n, dim], kept [heads, m] -> [heads, m, dim]."""
    return entries.gather(1, kept[:, :, None].expand(-1, -1, entries.shape[2]))


def build(config: Mapping[str, Any], instantiate: Callable[[Any], Any]) -> Method:
    """A method from its resolved configuration (``conf/method/*.yaml``); ``instantiate`` is Hydra's."""
    return Method(
        name=config["name"],
        scorer=instantiate(config["scorer"]) if config.get("scorer") else None,
        allocator=instantiate(config["allocator"]) if config.get("allocator") else None,
        protect=Protect(**config.get("protect", {})),
        codec=instantiate(config["codec"]),
    )
