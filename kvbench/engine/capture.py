"""Prefill: the one uncompressed forward pass over a segment, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from kvbench.engine.attention import AttentionOptions, attention_weights, causal_attention
from kvbench.engine.moments import Moments, moments, none
from kvbench.engine.rotation import Rotation

WEIGHTS_AT_ONCE = 1 << 25  # attention weights held at once while their columns are summed (fp32: 128 MiB)


@dataclass(frozen=True)
class Needs:
    """What the scorers of a method ask prefill to observe beside keys and values."""

    query_window: int = 0  # the last tokens' queries
    column_sums: bool = False  # how much attention each key got from all queries
    moments: frozenset[int] = frozenset()  # mean and covariance of the queries, that many first tokens left out
    rotation: Rotation | None = field(default=None, compare=False)  # how to turn queries back; with ``moments``

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(
            max(self.query_window, other.query_window),
            self.column_sums or other.column_sums,
            self.moments | other.moments,
            self.rotation or other.rotation,
        )


@dataclass(frozen=True)
class LayerCapture:
    """One layer after prefill over n tokens. Frozen: compression copies out of it and never changes it."""

    keys: torch.Tensor  # [kv_heads, n, dim], after RoPE
    values: torch.Tensor  # [kv_heads, n, dim]
    window_queries: torch.Tensor  # [query_heads, w, dim]: the last w tokens' queries, after RoPE (w <= n)
    options: AttentionOptions
    index: int  # the layer's number in the model
    seed: int  # a number drawn from the context's token ids alone: what random scores may depend on
    column_sums: torch.Tensor | None = None  # fp32 [query_heads, n]: the attention each key got from all n queries
    moments: Mapping[int, Moments] = field(default_factory=dict)  # of the queries; key: how many first are left out

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def own(self) -> LayerCapture:
        """The same with tensors of its own: other cells and questions read these, whatever is done to the copy."""
        sums = None if self.column_sums is None else self.column_sums.clone()
        queries = self.window_queries.clone()
        return replace(
            self, keys=self.keys.clone(), values=self.values.clone(), window_queries=queries, column_sums=sums
        )


@dataclass(frozen=True)
class Capture:
    """What prefill leaves behind for every layer, and the logits that follow the last token."""

    layers: tuple[LayerCapture, ...]
    tokens: int
    logits: torch.Tensor | None  # [vocabulary]; None when no token was fed
    ids: tuple[int, ...] = ()  # the tokens themselves

    def nbytes(self, tokens: int) -> int:
        """Bytes that an uncompressed cache of ``tokens`` tokens holds, from the tensors captured here.

        A sliding-window layer holds at most ``window - 1`` entries.
        """
        total = 0
        for layer in self.layers:
            window = layer.options.sliding_window
            held = tokens if window is None else min(tokens, window - 1)
            for tensor in (layer.keys, layer.values):
                total += tensor.element_size() * tensor.shape[0] * tensor.shape[2] * held
        return total


class CapturePass:
    """A forward pass over new tokens that sees all captured ones and captures the new ones with them.

    Starting from an empty list this is prefill; starting from a capture's layers it is its extension, which leaves the
    capture it started from as it was. Sliding-window layers are never compressed: nothing is observed there.
    """

    def __init__(self, layers: dict[int, LayerCapture], needs: Needs, seed: int) -> None:
        self.before, self.needs, self.seed = layers, needs, seed
        self.after: dict[int, LayerCapture] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        before = self.before.get(layer)
        start = max(0, query.shape[2] - self.needs.query_window)
        queries = query[0, :, start:].clone()  # clone: a slice would keep the queries of all tokens alive
        keys, values = key[0], value[0]
        if before is not None:
            keys, values = torch.cat([before.keys, keys], dim=1), torch.cat([before.values, values], dim=1)
            queries = torch.cat([before.window_queries, queries], dim=1)
            queries = queries[:, max(0, queries.shape[1] - self.needs.query_window) :]
            captured = replace(before, keys=keys, values=values, window_queries=queries)
        else:
            captured = LayerCapture(keys, values, queries, options, layer, self.seed)
        self.after[layer] = self._observe(captured, before, query[0])
        return causal_attention(query, captured.keys[None], captured.values[None], options)

    def _observe(self, layer: LayerCapture, before: LayerCapture | None, query: torch.Tensor) -> LayerCapture:
        """``layer`` with what else the method asked for; query [query_heads, q, dim] of the new tokens."""
        if layer.options.sliding_window is not None:
            return layer
        if self.needs.column_sums:
            sums = column_sums(query, layer.keys, layer.options)
            if before is not None and before.column_sums is not None:
                sums[:, : before.tokens] += before.column_sums
            layer = replace(layer, column_sums=sums)
        if self.needs.moments:
            layer = replace(layer, moments=self._moments(layer, before, query))
        return layer

    def _moments(self, layer: LayerCapture, before: LayerCapture | None, query: torch.Tensor) -> dict[int, Moments]:
        assert self.needs.rotation is not None
        first = 0 if before is None else before.tokens
        known = {} if before is None else before.moments
        rotation = self.needs.rotation.layers[layer.index]
        found = {skip: moments(query, first, skip, rotation) for skip in self.needs.moments}
        return {skip: known[skip].joined(new) if skip in known else new for skip, new in found.items()}


def column_sums(query: torch.Tensor, keys: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """fp32 [query_heads, s]: the attention that each of s keys gets from the last q positions, summed over them.

    query [query_heads, q, dim]; keys [kv_heads, s, dim]. Computed in blocks of queries: memory is O(s), not O(q * s).
    """
    sums = torch.zeros(query.shape[0], keys.shape[1], dtype=torch.float32, device=keys.device)
    for weights in weight_blocks(query, keys, options):
        sums[:, : weights.shape[-1]] += weights.sum(2).flatten(0, 1)
    return sums


def weight_blocks(query: torch.Tensor, keys: torch.Tensor, options: AttentionOptions) -> Iterator[torch.Tensor]:
    """The attention weights of the last q positions, in blocks [kv_heads, group, queries, s] of what they can see."""
    heads, q, _ = query.shape
    s = keys.shape[1]
    keys = keys.float()
    block = max(1, WEIGHTS_AT_ONCE // (heads * s))
    for start in range(0, q, block):
        stop = min(start + block, q)
        yield attention_weights(query[:, start:stop], keys[:, : s - q + stop], options)


def empty(capture: Capture) -> Capture:
    """The same layers without any entry: what prefill of an empty context leaves behind."""
    layers = tuple(
        replace(
            layer,
            keys=layer.keys[:, :0],
            values=layer.values[:, :0],
            window_queries=layer.window_queries[:, :0],
            seed=0,
            column_sums=None if layer.column_sums is None else layer.column_sums[:, :0],
            moments={skip: none(layer.window_queries) for skip in layer.moments},
        )
        for layer in capture.layers
    )
    return Capture(layers, 0, None)
