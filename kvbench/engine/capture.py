"""Prefill: the one uncompressed forward pass over a segment, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention import AttentionOptions, causal_attention


@dataclass(frozen=True)
class LayerCapture:
    """One layer after prefill over n tokens. Frozen: compression copies out of it and never changes it."""

    keys: torch.Tensor  # [kv_heads, n, dim], after RoPE
    values: torch.Tensor  # [kv_heads, n, dim]
    window_queries: torch.Tensor  # [query_heads, w, dim]: the last w tokens' queries, after RoPE (w <= n)
    options: AttentionOptions
    index: int  # the layer's number in the model
    seed: int  # a number drawn from the context's token ids alone: what random scores may depend on

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class Capture:
    """What prefill leaves behind for every layer, and the logits that follow the last token."""

    layers: tuple[LayerCapture, ...]
    tokens: int
    logits: torch.Tensor | None  # [vocabulary]; None when no token was fed

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
    capture it started from as it was.
    """

    def __init__(self, layers: dict[int, LayerCapture], query_window: int, seed: int) -> None:
        self.before, self.query_window, self.seed = layers, query_window, seed
        self.after: dict[int, LayerCapture] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        before = self.before.get(layer)
        start = max(0, query.shape[2] - self.query_window)
        queries = query[0, :, start:].clone()  # clone: a slice would keep the queries of all tokens alive
        keys, values = key[0], value[0]
        if before is not None:
            keys, values = torch.cat([before.keys, keys], dim=1), torch.cat([before.values, values], dim=1)
            queries = torch.cat([before.window_queries, queries], dim=1)
            queries = queries[:, max(0, queries.shape[1] - self.query_window) :]
            captured = replace(before, keys=keys, values=values, window_queries=queries)
        else:
            captured = LayerCapture(keys, values, queries, options, layer, self.seed)
        self.after[layer] = captured
        return causal_attention(query, captured.keys[None], captured.values[None], options)


def empty(capture: Capture) -> Capture:
    """The same layers without any entry: what prefill of an empty context leaves behind."""
    layers = tuple(
        replace(
            layer,
            keys=layer.keys[:, :0],
            values=layer.values[:, :0],
            window_queries=layer.window_queries[:, :0],
            seed=0,
        )
        for layer in capture.layers
    )
    return Capture(layers, 0, None)
