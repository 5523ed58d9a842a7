"""The attention function that kvbench registers with transformers, and the one attention primitive behind it.

transformers calls the registered function once per layer with the queries, keys and values of the *new* tokens, after
RoPE and any query/key norm, with keys and values not repeated for grouped queries. Because no mask function is
registered under the same name, ``attention_mask`` is always None: causality is applied here, per layer, aligned to the
bottom right, so that layers may hold caches of unequal length.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

log = logging.getLogger(__name__)

NAME = "kvbench"  # the value of attn_implementation
QUERY_BLOCK = 1024  # queries attended at once where a mask is needed, so that masks stay O(block * keys)


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention beyond queries, keys and values."""

    scaling: float
    sliding_window: int | None = None  # a query sees this many keys, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)
    sinks: torch.Tensor | None = None  # [query_heads] extra logit per head that takes mass and has no value (GPT-OSS)


class ForwardPass(Protocol):
    """What one forward pass of the model does with a layer's new queries, keys and values."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [rows, query_heads, q, dim]; key, value [rows, kv_heads, q, dim]; returns the shape of query."""
        ...


_current: ContextVar[ForwardPass | None] = ContextVar("kvbench_forward_pass", default=None)


@contextmanager
def forward_pass(current: ForwardPass) -> Iterator[None]:
    """Every attention call of the model inside this block goes to ``current``."""
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def kvbench_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls; returns [rows, q, query_heads, dim]."""
    current = _current.get()
    if current is None:
        raise RuntimeError("a model with attn_implementation='kvbench' only runs inside kvbench's engine")
    if attention_mask is not None:
        raise RuntimeError("kvbench applies its own causality, but the model passed an attention mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = AttentionOptions(scale, sliding_window or None, softcap, s_aux)
    out = current.attend(int(module.layer_idx), query, key, value, options)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes ``attn_implementation='kvbench'`` known to transformers. Registering twice is harmless."""
    AttentionInterface.register(NAME, kvbench_attention)


def causal_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention of the last q positions over s keys, causal and aligned to the bottom right.

    query [rows, query_heads, q, dim]; keys, values [rows, kv_heads, s, dim] with q <= s, where the last q keys belong
    to the queries' own tokens. Returns [rows, query_heads, q, dim]. Keys and values are not repeated for grouped
    queries, except during prefill where no kernel takes them otherwise.
    """
    q, s = query.shape[2], keys.shape[2]
    window = options.sliding_window
    if q == 1:
        if window is not None:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        return attend_masked(query, keys, values, None, options)
    if _is_fused(query, options) and q == s and (window is None or s <= window):
        group = query.shape[1] // keys.shape[1]
        if group > 1 and not _fused_groups(query):
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=options.scaling, enable_gqa=group > 1 and _fused_groups(query)
        )
    blocks = []
    for start in range(0, q, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q)
        last = s - q + stop
        first = 0 if window is None else max(0, s - q + start + 1 - window)
        mask = visible(stop - start, last - first, window, query.device)
        blocks.append(
            attend_masked(query[:, :, start:stop], keys[:, :, first:last], values[:, :, first:last], mask, options)
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention as in ``causal_attention`` where some keys are not there: ``seen`` is bool [kv_heads, s].

    query [rows, query_heads, q, dim]; keys, values [rows, kv_heads, s, dim]. Every query must see at least one key.
    """
    q, s = query.shape[2], keys.shape[2]
    blocks = []
    for start in range(0, q, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q)
        last = s - q + stop
        mask = visible(stop - start, last, options.sliding_window, query.device) & seen[:, None, :last]
        blocks.append(attend_masked(query[:, :, start:stop], keys[:, :, :last], values[:, :, :last], mask, options))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def attention_weights(query: torch.Tensor, keys: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """The weights of the last q positions over s keys, fp32 [kv_heads, group, q, s].

    query [query_heads, q, dim]; keys [kv_heads, s, dim]. The softmax runs over the whole visible row, as in the model
    itself, softcap and sink logits included.
    """
    heads, q, dim = query.shape
    kv_heads, s, _ = keys.shape
    folded = query.float().reshape(kv_heads, heads // kv_heads * q, dim)
    scores = (folded @ keys.float().transpose(1, 2) * options.scaling).view(kv_heads, -1, q, s)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if q > 1 or options.sliding_window is not None:
        scores = scores.masked_fill(~visible(q, s, options.sliding_window, scores.device), float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, q, 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :s]


def _is_fused(query: torch.Tensor, options: AttentionOptions) -> bool:
    """Can torch's own attention compute this layer on this device?"""
    return options.softcap is None and options.sinks is None and attention_path(query.device.type) == "fused"


@cache
def attention_path(device_type: str) -> str:
    """``fused`` (torch's own attention) or, where that is wrong, ``explicit``; it is part of a cell's identity.

    Some releases of torch compute wrong attention on MPS for some numbers of keys; it is compared with the CPU once.
    """
    if device_type != "mps":
        return "fused"
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for length in (31, 32, 33, 70):
        q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (1, length, length))
        reference = F.scaled_dot_product_attention(q, k, v)
        q, k, v = (tensor.to(device_type) for tensor in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v).cpu()
        if not torch.allclose(seen, reference, atol=1e-3):
            wrong.append(length)
    if wrong:
        log.warning("attention over %s keys is wrong on MPS with torch %s: it is written out instead, which is slower",
                    wrong, torch.__version__)  # fmt: skip
    return "explicit" if wrong else "fused"


def _fused_groups(query: torch.Tensor) -> bool:
    """Has this device a fused kernel for grouped queries in this dtype?

    Without one torch falls back to writing out all q x s scores; repeating the keys for the length of one call is then
    far smaller.
    """
    return query.device.type == "cpu" or (query.device.type == "cuda" and query.dtype != torch.float32)


def visible(q: int, s: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [q, s]: may query i, which stands at key index s - q + i, see key j?"""
    at = torch.arange(s - q, s, device=device)[:, None]
    key = torch.arange(s, device=device)[None, :]
    mask = key <= at
    return mask if window is None else mask & (key > at - window)


def attend_masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Attention under a mask [q, s] or [kv_heads, q, s] (None: all visible).

    The query heads of one KV head are folded into the query axis, so that keys and values are not repeated.
    """
    rows, heads, q, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    folded = query.reshape(rows, kv_heads, group * q, dim)
    if mask is not None and group > 1:
        mask = torch.cat([mask] * group, dim=-2)  # [..., group * q, s]
    if _is_fused(query, options):
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=options.scaling)
    else:
        out = _explicit(folded, keys, values, mask, options, group)
    return out.reshape(rows, heads, q, values.shape[-1])


def _explicit(
    folded: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    group: int,
) -> torch.Tensor:
    """Scores written out, where torch's own attention does not do; folded [rows, kv_heads, group * q, dim]."""
    rows, kv_heads, length, _ = folded.shape
    scores = folded @ keys.transpose(-1, -2) * options.scaling  # [rows, kv_heads, group * q, s]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    scores = scores.float()
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, length // group, -1)
        scores = torch.cat([scores, sinks.reshape(rows, kv_heads, length, 1)], dim=-1)
    weights = scores.softmax(-1)
    if options.sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
