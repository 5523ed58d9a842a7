"""Reference computations for tests, written without the engine's attention, caches or selection.

``MaskedPass`` is the oracle of eviction: the full, uncompressed keys and values of every layer, with minus infinity on
the columns that were evicted. Attention is written out in the plainest way, head by head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.engine import Capture, Engine
from kvbench.engine.attention import AttentionOptions, forward_pass


class MaskedPass:
    """Keeps every key of every layer, hides those that ``kept`` leaves out.

    kept: layer -> bool [kv_heads, context tokens]; a layer that is not in it hides nothing.
    """

    def __init__(self, capture: Capture, kept: dict[int, torch.Tensor]) -> None:
        self.keys = {layer.index: layer.keys for layer in capture.layers}
        self.values = {layer.index: layer.values for layer in capture.layers}
        self.kept = kept
        self.tokens = capture.tokens

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        keys = self.keys[layer] = torch.cat([self.keys[layer], key[0]], dim=1)
        values = self.values[layer] = torch.cat([self.values[layer], value[0]], dim=1)
        q, n, group = query.shape[2], keys.shape[1], query.shape[1] // keys.shape[0]
        out = torch.empty(query.shape[1], q, values.shape[-1], dtype=query.dtype)
        for head in range(query.shape[1]):
            kv = head // group
            for i in range(q):
                at = n - q + i
                seen = torch.arange(n) <= at
                if options.sliding_window is not None:
                    seen &= torch.arange(n) > at - options.sliding_window
                if layer in self.kept:
                    mask = self.kept[layer][kv]
                    seen[: mask.numel()] &= mask
                scores = keys[kv] @ query[0, head, i] * options.scaling
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                scores = scores.masked_fill(~seen, float("-inf"))
                if options.sinks is not None:
                    scores = torch.cat([scores, options.sinks[head : head + 1]])
                weights = scores.softmax(0)[:n]
                out[head, i] = weights @ values[kv]
        return out[None]


@torch.inference_mode()
def masked_logits(
    engine: Engine, capture: Capture, kept: dict[int, torch.Tensor], ids: list[int], start: int | None = None
) -> torch.Tensor:
    """Logits [q, vocabulary] of new tokens over the masked full cache, at their true positions (or from ``start``)."""
    first = capture.tokens if start is None else start
    positions = torch.arange(first, first + len(ids))[None]
    with forward_pass(MaskedPass(capture, kept)):
        return engine.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False).logits[0]


def kept_mask(positions: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """Kept positions per head -> bool [heads, tokens]."""
    mask = torch.zeros(len(positions), tokens, dtype=torch.bool)
    for head, at in enumerate(positions):
        mask[head, at] = True
    return mask


@torch.inference_mode()
def generate(model: torch.nn.Module, ids: list[int], new: int, attention: str = "eager") -> list[int]:
    """Greedy tokens of transformers' own generate, never stopping early."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        tokens = torch.tensor([ids])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(before)
    return out[0, len(ids) :].tolist()
