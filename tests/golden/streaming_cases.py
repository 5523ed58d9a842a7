"""StreamingLLM against the reference vectors of its original code, through the layer that evicts while it decodes.

The original turns every key anew at each step, by its index in the cache. The product feeds a token at its true
position and turns only what stands before an evicted entry: attention must come out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvbench.engine import Capture, LayerCapture
from kvbench.engine.attention import AttentionOptions
from kvbench.methods import Method, Protect, Region
from kvbench.methods.allocators import Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.decode import Rolling
from kvbench.methods.evicting import EvictingLayer
from kvbench.methods.scorers import Recency
from tests.golden.rotary import rope, rotated

Tensors = dict[str, torch.Tensor]
Case = dict[str, Any]
CALL, FOR_SPACE, RANGE = 0, 1, 2  # what a row of the tables calls


def streamingllm_decode(case: Case, tensors: Tensors) -> str | None:
    """Chunk by chunk: what is kept, how much, and what attention gives."""
    params = case["params"]
    tensors = {**tensors, **rotated(tensors, params)}
    q, k, v = (tensors[name][0] for name in "qkv")
    options = AttentionOptions(scaling=params["head_dim"] ** -0.5)
    layer = empty_layer(k, v, params)
    start = 0
    for at, chunk in enumerate(params["chunks"]):
        if params["mode"] == "chat":
            make_room(layer, params["start_size"], params["recent_size"], params["num_coming"][at])
        if layer.length != int(tensors["first_query_pos"][at]):
            return f"chunk {at}: its first query follows {layer.length} entries"
        stop = start + chunk
        layer.append(k[:, start:stop], v[:, start:stop])
        out = layer.attend(q[:, start:stop], options).transpose(0, 1).flatten(1)
        layer.settle()
        difference = (out - tensors["attn_out"][0, start:stop]).abs().max()
        if not difference < 2e-5:  # NaN is not below anything
            return f"chunk {at}: attention differs by up to {difference:.2e}"
        fault = wrong_entries(layer, k, tensors["kept"][at, : int(tensors["cache_len"][at])])
        if fault:
            return f"chunk {at}: {fault}"
        start = stop
    return None


def empty_layer(keys: torch.Tensor, values: torch.Tensor, params: Case) -> EvictingLayer:
    """A layer of the product's rule; the chat script evicts nothing by itself, only where room is made."""
    sinks, rule = params["start_size"], Rolling()
    limit = keys.shape[1] if params["mode"] == "chat" else sinks + params["recent_size"]
    protect = Protect(sinks) if params["mode"] == "chat" else rule.protect(Protect(sinks), limit, limit)
    return EvictingLayer(keys[:, :0], values[:, :0], rule, limit, protect, None, rope(params))


def make_room(layer: EvictingLayer, sinks: int, recent: int, coming: int) -> None:
    """What the chat script does before each of its prompts; kvbench itself asks one question and makes room once."""
    if coming and layer.length + coming > sinks + recent:
        count = min(layer.length, sinks + max(0, recent - coming))
        layer.keep(count, Protect(sinks, max(0, count - sinks)))


def wrong_entries(layer: EvictingLayer, keys: torch.Tensor, expected: torch.Tensor) -> str | None:
    """expected int64 [n]: the positions that every head holds, in order."""
    if layer.length != len(expected):
        return f"{layer.length} entries instead of {len(expected)}"
    return None if torch.equal(layer.keys, keys[:, expected]) else "other entries are kept"


def streamingllm_cache(case: Case, tensors: Tensors) -> str | None:
    """The cache class alone, row by row; a key is its own position."""
    for row, kept, count in zip(*(tensors[name].tolist() for name in ("params", "kept", "kept_len")), strict=True):
        kind, sinks, recent, tokens, *more = row
        limit, expected = sinks + recent, torch.tensor(kept[:count])
        keys = torch.arange(tokens, dtype=torch.float32)[None, :, None]  # [1, tokens, 1]
        layer = EvictingLayer(keys, keys, Rolling(), limit, Protect(sinks, recent))
        if kind == CALL:
            layer.settle()
        elif kind == FOR_SPACE:
            make_room(layer, sinks, recent, more[0])
        elif kind == RANGE:
            first, end = more
            layer.keep(tokens - (end - first), Protect(first, tokens - end))
        fault = wrong_entries(layer, keys, expected)
        if not fault and tokens > limit and kind != RANGE:
            # Where the text exceeds the budget (else full is full), the whole method must agree with its layer.
            found = compressed(keys, sinks, limit, more[0] if kind == FOR_SPACE else 0)
            fault = None if torch.equal(found, expected) else f"the method keeps {found.tolist()}"
        if fault:
            return f"{row}: {fault}"
    return None


def compressed(keys: torch.Tensor, sinks: int, budget: int, room: int) -> torch.Tensor:
    """The positions that StreamingLLM, composed as its configuration composes it, keeps of a text."""
    tokens = keys.shape[1]
    layer = LayerCapture(keys, keys, keys[:, :0], AttentionOptions(scaling=1.0), index=0, seed=0)
    rule = Rolling("room" if room else "each_step")
    method = Method("golden", Recency(), Uniform(), Protect(sinks), Plain(), rule)
    made = method.compress(Capture((layer,), tokens, None), Region(tokens, tokens), budget, room)
    return made.positions[0][0]


CHECKS: dict[str, Callable[[Case, Tensors], str | None]] = {
    "streamingllm_decode": streamingllm_decode,
    "streamingllm_cache": streamingllm_cache,
}
