"""A method: scorer + allocator + protected entries + codec + decode rule, composed in ``conf/method/*.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine.cache import Cache, LayerCache, SlidingLayer
from kvbench.engine.capture import Capture, LayerCapture, Needs
from kvbench.engine.ragged import HeadsLayer, RaggedLayer
from kvbench.engine.rotation import Rotation
from kvbench.errors import InputError, SampleError
from kvbench.methods.allocators import Allocator
from kvbench.methods.codecs import Codec, Plain
from kvbench.methods.decode import DecodeRule, Rolling
from kvbench.methods.evicting import EvictingLayer
from kvbench.methods.scorers import CaptureScorer, Scorer
from kvbench.methods.selection import Protect, select_per_head
from kvbench.methods.setup import Setup


@dataclass(frozen=True)
class Region:
    """What of a capture's n tokens may be evicted, what is stored, and what of the prompt will still follow.

    Entries [0, evictable) compete for the budget; entries [evictable, stored) are kept on top of it. Entries from
    ``stored`` on are dropped after the choice: a question that the cache must forget (swapped), or the last prompt
    token, which is fed again. ``fed`` prompt tokens go through the compressed cache before the answer; ``again`` says
    how many of them were captured already.
    """

    evictable: int
    stored: int
    fed: int = 0
    again: int = 0

    @property
    def on_top(self) -> int:
        """Prompt entries beside the budget when the answer begins."""
        return self.stored - self.evictable + self.fed


@dataclass(frozen=True)
class Compressed:
    """A method's result for one context."""

    cache: Cache
    kept: tuple[float, ...]  # entries kept of the evictable region per KV head (mean), for each compressed layer
    positions: dict[int, Sequence[torch.Tensor]]  # layer -> per KV head: where the stored entries stood in the prompt
    note: str  # why nothing, or more than the budget, was kept; else ""

    @property
    def kept_mean(self) -> float:
        return sum(self.kept) / len(self.kept) if self.kept else 0.0


@dataclass(frozen=True)
class Method:
    """How a capture becomes a cache. ``scorer`` None: nothing is ever evicted."""

    name: str
    scorer: Scorer | CaptureScorer | None
    allocator: Allocator | None
    protect: Protect
    codec: Codec
    decode: DecodeRule | None = None
    prefill: str = "full"  # full | streaming: the text itself is read through sinks and a recent window
    chunk: int = 1024  # tokens that prefill=streaming reads at once: changes no result
    scorer_settings: str = ""  # the scorer as configured: methods with the same give the same scores; "": unknown

    @property
    def evicts(self) -> bool:
        return self.scorer is not None

    @property
    def lossless(self) -> bool:
        """Does the cache hold all keys and values as they were computed, whatever the budget?"""
        return not self.evicts and isinstance(self.codec, Plain)

    @property
    def needs(self) -> Needs:
        return self.scorer.needs if self.scorer is not None else Needs()

    def prepared(self, setup: Setup) -> Method:
        """The method with what its parts need of the loaded model; InputError where the model does not fit."""
        parts = {name: setup.prepare(getattr(self, name)) for name in ("scorer", "allocator", "codec")}
        return replace(self, **parts)

    def facts(self) -> dict[str, Any]:
        """What the parts want every record to say (choices that a paper leaves open, fitted files)."""
        facts: dict[str, Any] = {}
        for part in (self.scorer, self.allocator, self.codec):
            facts |= part.facts() if hasattr(part, "facts") else {}  # type: ignore[union-attr]
        return facts

    def scores(self, capture: Capture, region: Region) -> list[torch.Tensor]:
        """Scores [kv_heads, tokens] of every compressed layer; none if the method evicts nothing."""
        if self.scorer is None:
            return []
        whole = [layer for layer in capture.layers if layer.options.sliding_window is None]
        if isinstance(self.scorer, CaptureScorer):
            found = self.scorer.of_capture(capture)
            scores = [found[layer.index] for layer in whole]
        else:
            scores = [self.scorer(layer.own()) for layer in whole]
        for layer, of_layer in zip(whole, scores, strict=True):
            check_scores(of_layer, layer, self.scorer)
        return scores

    def compress(
        self,
        capture: Capture,
        region: Region,
        budget: int,
        room: int,
        rotation: Rotation | None = None,
        scores: list[torch.Tensor] | None = None,
    ) -> Compressed:
        """Keeps ``budget`` entries per KV head of the evictable region (the mean over layers), plus the rest.

        ``room`` is how many tokens will follow (question and answer): space is set aside for them. Sliding-window
        layers are passed through. With ``rotation`` (positions=compact) entries take positions within the cache: every
        layer's last entry stands just before the next token, which follows the longest layer. ``scores`` are
        ``self.scores(capture, region)`` where they are known already.
        """
        whole = [layer for layer in capture.layers if layer.options.sliding_window is None]
        note = self._why_nothing(region.evictable, budget, len(whole))
        if note:
            counts = [torch.full((layer.keys.shape[0],), region.evictable) for layer in whole]
            scores = [] if self.decode is None or self.decode.when == "evicted" else self.scores(capture, region)
        else:
            scores = self.scores(capture, region) if scores is None else scores
            counts, note = self._counts(region, budget, room, scores)
        of_layer = {layer.index: (at, counts[at]) for at, layer in enumerate(whole)}
        positions: dict[int, Sequence[torch.Tensor]] = {
            layer.index: self._kept(layer, region, counts[at], scores[at] if scores else None)
            for at, layer in enumerate(whole)
        }
        longest = max((len(head) for kept in positions.values() for head in kept), default=region.stored)
        next_position = region.stored if rotation is None else longest
        layers: list[LayerCache] = []
        for layer in capture.layers:
            if layer.index not in positions:
                every = [torch.arange(region.stored, device=layer.keys.device)] * layer.keys.shape[0]
                keys, values = stored(layer, every, rotation, next_position)
                window = layer.options.sliding_window
                assert window is not None
                layers.append(SlidingLayer(shaped(keys, every), shaped(values, every), window))
                continue
            at, count = of_layer[layer.index]
            kept = positions[layer.index]
            keys, values = stored(layer, kept, rotation, next_position)
            carried = self._carried(layer, region, kept, scores[at]) if scores and self.decode else None
            if carried is not None or self._rolls(count, region):
                layers.append(self._evicting(layer, region, budget, count, kept, keys, values, carried, room, rotation))
            elif len({len(head) for head in kept}) == 1:
                heads = range(len(kept))
                layers.append(self.codec(layer.index, heads, shaped(keys, kept), shaped(values, kept), room))
            else:
                layers.append(self._ragged(layer.index, kept, keys, values, room))
        means = tuple(int(count.sum()) / count.numel() for count in counts)
        return Compressed(Cache(layers, next_position), means, positions, note)

    def _why_nothing(self, evictable: int, budget: int, layers: int) -> str:
        if not self.evicts or self.allocator is None:
            return "the method evicts nothing"
        if layers == 0:
            return "every layer is a sliding-window layer: there is nothing to compress"
        if budget >= evictable:
            return f"the budget ({budget}) covers all {evictable} entries in scope"
        if self.protect.sinks + self.protect.recent >= evictable:
            protected = f"sinks ({self.protect.sinks}) and recent window ({self.protect.recent})"
            return f"the protected {protected} cover all {evictable} entries in scope"
        return ""

    def _counts(
        self, region: Region, budget: int, room: int, scores: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], str]:
        assert self.allocator is not None
        note = ""
        if isinstance(self.decode, Rolling) and self.decode.schedule == "room":
            answer = room - region.fed
            budget = max(self.protect.sinks, budget - answer, 1)
            note = f"{answer} entries of the budget are left free for the answer"
        counts = self.allocator(budget, [layer[:, : region.evictable].clone() for layer in scores])
        fewest, least = self.protect.sinks + self.protect.recent, min(int(count.min()) for count in counts)
        return counts, note if least >= fewest else f"{least} entries cannot hold the {fewest} protected ones"

    def _kept(
        self, layer: LayerCapture, region: Region, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """Per KV head the positions of the entries stored, ascending."""
        device = layer.keys.device
        if scores is None or int(counts.min()) >= region.evictable:
            return [torch.arange(region.stored, device=device)] * layer.keys.shape[0]
        # A scored token that is dropped and fed again (stored < evictable) must be among the kept in every head.
        dropped = max(0, region.evictable - region.stored)
        protect = self.protect if not dropped else _at_least_recent(self.protect, dropped)
        kept = select_per_head(scores[:, : region.evictable], counts, protect)
        if dropped:
            return [head[: len(head) - dropped] for head in kept]
        on_top = torch.arange(region.evictable, region.stored, device=device)
        return [torch.cat([head, on_top]) for head in kept]

    def _rolls(self, counts: torch.Tensor, region: Region) -> bool:
        """Does a decode rule run on this layer?"""
        if self.decode is None or (isinstance(self.decode, Rolling) and self.decode.schedule == "room"):
            return False
        return self.decode.when == "always" or bool((counts < region.evictable).any())

    def _carried(
        self, layer: LayerCapture, region: Region, kept: Sequence[torch.Tensor], scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The decode rule's scores [kv_heads, m] of the entries stored; None if it has none."""
        assert self.decode is not None
        if not self.decode.observes:
            return None
        carried = self.decode.start(layer, scores, region.again)
        return carried.gather(1, torch.stack(list(kept)))

    def _evicting(
        self,
        layer: LayerCapture,
        region: Region,
        budget: int,
        counts: torch.Tensor,
        kept: Sequence[torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        carried: torch.Tensor | None,
        room: int,
        rotation: Rotation | None,
    ) -> EvictingLayer:
        assert self.decode is not None
        count = int(counts.max())
        if int(counts.min()) != count:
            raise SampleError("a decode rule needs equal counts in all heads of a layer, but the allocator's differ")
        count = count if count < region.evictable else budget
        limit = count + region.on_top
        protect = self.decode.protect(self.protect, count, limit)
        turn = None if rotation is None else rotation.layers[layer.index]
        dense = shaped(keys, kept), shaped(values, kept)
        return EvictingLayer(*dense, self.decode, limit, protect, carried, turn, room)

    def _ragged(
        self, index: int, kept: Sequence[torch.Tensor], keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> LayerCache:
        lengths = [len(head) for head in kept]
        if isinstance(self.codec, Plain):
            return RaggedLayer(keys, values, torch.tensor(lengths, device=keys.device), room)
        per_head = zip(keys.split(lengths), values.split(lengths), strict=True)
        return HeadsLayer([self.codec(index, [head], k[None], v[None], room) for head, (k, v) in enumerate(per_head)])


def _at_least_recent(protect: Protect, dropped: int) -> Protect:
    return replace(protect, recent=max(protect.recent, dropped))


def stored(
    layer: LayerCapture, kept: Sequence[torch.Tensor], rotation: Rotation | None, next_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [total, dim] of the kept positions, head after head, the keys moved to where they now stand."""
    flat = torch.cat(list(kept))
    lengths = [len(head) for head in kept]
    head = torch.arange(len(kept), device=flat.device).repeat_interleave(torch.tensor(lengths, device=flat.device))
    keys, values = layer.keys[head, flat], layer.values[head, flat]
    if rotation is not None:
        at = torch.cat([torch.arange(next_position - m, next_position, device=flat.device) for m in lengths])
        keys = rotation.turn(layer.index, keys[None], (at - flat)[None])[0]
    return keys, values


def shaped(flat: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """[total, dim] of heads with equal counts -> [kv_heads, m, dim]."""
    return flat.view(len(kept), len(kept[0]), flat.shape[-1])


def check_scores(scores: torch.Tensor, layer: LayerCapture, scorer: Scorer | CaptureScorer) -> None:
    """A scorer of the wrong shape, or one that gives NaN where the model did not, must not choose anything."""
    expected = tuple(layer.keys.shape[:2])
    if tuple(scores.shape) != expected:
        raise SampleError(f"{scorer} gives scores of shape {tuple(scores.shape)}, not {expected} (KV heads, tokens)")
    if bool(scores.isnan().any()) and bool(torch.isfinite(layer.keys).all()):
        raise SampleError(f"{scorer} gives NaN in layer {layer.index}")


def build(config: Mapping[str, Any], instantiate: Callable[[Any], Any]) -> Method:
    """A method from its resolved configuration (``conf/method/*.yaml``); ``instantiate`` is Hydra's."""
    method = Method(
        name=config["name"],
        scorer=instantiate(config["scorer"]) if config.get("scorer") else None,
        allocator=instantiate(config["allocator"]) if config.get("allocator") else None,
        protect=Protect(**config.get("protect", {})),
        codec=instantiate(config["codec"]),
        decode=instantiate(config["decode"]) if config.get("decode") else None,
        prefill=config.get("prefill", "full"),
        chunk=config.get("chunk", 1024),
        scorer_settings=repr(config.get("scorer")),
    )
    if method.decode is not None and not isinstance(method.codec, Plain):
        raise InputError(
            "method/codec", method.codec.label, f"cannot drop the entries that {method.name} evicts at every step.",
            "Add method/decode=none: then it evicts once, before the codec stores what is kept.",
        )  # fmt: skip
    return method
