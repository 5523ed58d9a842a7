"""Streaming prefill: a text of any length read through attention sinks and a recent window (arXiv 2309.17453).

The schedule is the paper's "evict after each token": the token at index t attends to the first ``sinks`` tokens, to the
``recent`` tokens before it and to itself: at most ``sinks + recent + 1`` entries. Positions count within the cache
(section 3.2): with C = sinks + recent, the query stands at min(t, C), sink i at i, the recent keys at their true
distances. What is held does not grow with the text.

Tokens are read chunk by chunk, all tokens of a chunk at once, with the result of reading them one by one:

- Rotary attention sees differences of positions alone. So every chunk is fed in the same frame, from position C on (the
  first ones at their true positions), and the keys that are held are turned to stand just before it. Positions stay
  below C + chunk, so that rotary angles stay exact in fp32 however long the text is.
- Within a chunk, the distance from a query to a recent key is right as it is; the distance to the sinks is not. Sinks
  stay at their own positions, and each query is turned to meet them, for its scores of the sinks alone.

Deviations: the authors' chat demonstration makes room before a prompt and evicts nothing while it answers; their
perplexity script, followed here, evicts after each token. Sliding-window layers of a model read their own window,
without sinks, and do not count in C. Only rotations are moved: a model that also scales queries by their position does
so by the position in the frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvbench.engine.attention import AttentionOptions, attend_masked
from kvbench.engine.capture import LayerCapture
from kvbench.engine.engine import Engine, context_seed
from kvbench.engine.rotation import LayerRotation, Rotation

# Queries attended at once: each is scored against recent + block keys, a block's worth of them in vain.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class Streamed:
    """What is left of a text after it was streamed.

    Every layer holds its sinks, then its recent entries, in order. With positions within the cache a layer's m entries
    stand at ``next_position - m`` .. ``next_position - 1`` as if contiguous (so below zero, where a sliding window is
    longer than the cache); otherwise they stand where they stood in the text.
    """

    layers: tuple[LayerCapture, ...]
    logits: torch.Tensor | None  # [vocabulary] after the last token; None when no token was fed
    next_position: int  # where the next token must be fed
    tokens: int  # of the whole text


@dataclass(frozen=True)
class Band:
    """A query sees the first ``sinks`` tokens, the ``recent`` tokens before it, and itself."""

    sinks: int
    recent: int

    @property
    def size(self) -> int:
        return self.sinks + self.recent


@torch.inference_mode()
def stream(
    engine: Engine, ids: Sequence[int], sinks: int, recent: int, rotation: Rotation | None, chunk: int = 1024
) -> Streamed:
    """Reads ``ids`` through sinks and a recent window, ``chunk`` tokens at a time (no result depends on how many).

    ``rotation`` (from ``rotation.discover``): positions within the cache. None: true positions, only the band matters.
    """
    if min(sinks, recent) < 0 or chunk < 1:
        raise ValueError(f"sinks={sinks} and recent={recent} must be 0 or more, chunk={chunk} must be 1 or more")
    if len(ids) == 0:
        return Streamed(engine.prefill([]).layers, None, 0, 0)
    logits, current = None, StreamPass(Band(sinks, recent), rotation)
    for start in range(0, len(ids), chunk):
        tokens = torch.tensor([list(ids[start : start + chunk])], device=engine.device)  # [1, c]
        first, count = current.next_position, tokens.shape[1]
        logits = engine._forward(current, tokens, torch.arange(first, first + count, device=engine.device)[None])[0]
        current.tokens += count
    return Streamed(current.captured(context_seed(ids)), logits, current.next_position, current.tokens)


@dataclass
class HeldLayer:
    """What one layer remembers between chunks; it never grows beyond its band.

    The window's keys stay as they were computed and are turned on reading, so that rounding does not add up however
    often a key is read. ``fed`` says where each of them stood when it was computed.
    """

    band: Band
    rotation: LayerRotation | None  # None: keys are never turned
    options: AttentionOptions
    sink_keys: torch.Tensor  # [kv_heads, <= sinks, dim], at positions 0, 1, ...
    sink_values: torch.Tensor  # [kv_heads, <= sinks, dim]
    keys: torch.Tensor  # [kv_heads, m <= recent, dim]
    values: torch.Tensor  # [kv_heads, m <= recent, dim]
    fed: torch.Tensor  # int64 [m]
    no_queries: torch.Tensor  # [query_heads, 0, dim]: what a capture without observed queries holds

    def turned_keys(self, position: int) -> torch.Tensor:
        """The window's keys [kv_heads, m, dim], the last of them just before ``position``."""
        if self.rotation is None:
            return self.keys
        heads, m, _ = self.keys.shape
        by = torch.arange(position - m, position, device=self.fed.device) - self.fed
        return self.rotation.turn(self.keys, by.expand(heads, -1))

    def take_sinks(self, key: torch.Tensor, value: torch.Tensor, tokens: int) -> None:
        """Adds what of a chunk [kv_heads, c, dim] that begins at index ``tokens`` belongs to the sinks."""
        new = min(max(0, self.band.sinks - tokens), key.shape[1])
        if new:
            self.sink_keys = torch.cat([self.sink_keys, key[:, :new]], dim=1)
            self.sink_values = torch.cat([self.sink_values, value[:, :new]], dim=1)

    def take_window(self, key: torch.Tensor, value: torch.Tensor, fed: torch.Tensor, tokens: int) -> None:
        """Keeps the last ``recent`` tokens that are no sinks; ``tokens`` counts the chunk in, fed is int64 [c]."""
        drop = self.keys.shape[1] + key.shape[1] - min(self.band.recent, max(0, tokens - self.band.sinks))
        # clone: a view would keep the whole chunk alive
        self.keys = torch.cat([self.keys, key], dim=1)[:, drop:].clone()
        self.values = torch.cat([self.values, value], dim=1)[:, drop:].clone()
        self.fed = torch.cat([self.fed, fed])[drop:].clone()


class StreamPass:
    """The forward passes of one stream. ``tokens`` is how many were fed before the present chunk."""

    def __init__(self, band: Band, rotation: Rotation | None) -> None:
        self.band, self.rotation = band, rotation
        self.tokens = 0
        self.layers: dict[int, HeldLayer] = {}

    @property
    def next_position(self) -> int:
        return self.tokens if self.rotation is None else min(self.tokens, self.band.size)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [1, query_heads, c, dim]; key, value [1, kv_heads, c, dim] of a chunk fed from ``next_position`` on."""
        count = query.shape[2]
        if layer not in self.layers:
            self.layers[layer] = self._nothing(layer, query[0], key[0], value[0], options)
        held = self.layers[layer]
        held.take_sinks(key[0], value[0], self.tokens)
        out = band_attention(
            query,
            torch.cat([held.turned_keys(self.next_position), key[0]], dim=1)[None],
            torch.cat([held.values, value[0]], dim=1)[None],
            (held.sink_keys[None], held.sink_values[None]),
            held.band,
            self.tokens - held.keys.shape[1],
            options,
            self._to_meet_sinks(held, query),
        )
        fed = torch.arange(self.next_position, self.next_position + count, device=key.device)
        held.take_window(key[0], value[0], fed, self.tokens + count)
        return out

    def _to_meet_sinks(self, held: HeldLayer, query: torch.Tensor) -> torch.Tensor | None:
        """The queries at min(t, C), or None where they stand there already (or the layer has no use for it)."""
        count = query.shape[2]
        if held.rotation is None or held.band.sinks == 0 or self.tokens + count - 1 <= self.band.size:
            return None
        index = torch.arange(self.tokens, self.tokens + count, device=query.device)
        by = index.clamp(max=self.band.size) - (index - self.tokens + self.next_position)
        return held.rotation.turn(query[0], by.expand(query.shape[1], -1))[None]

    def _nothing(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> HeldLayer:
        band = self.band if options.sliding_window is None else Band(0, options.sliding_window - 1)
        rotation = None if self.rotation is None else self.rotation.layers[layer]
        no_keys, no_values, no_queries = (tensor[:, :0].clone() for tensor in (key, value, query))
        fed = torch.zeros(0, dtype=torch.int64, device=key.device)
        return HeldLayer(band, rotation, options, no_keys, no_values, no_keys, no_values, fed, no_queries)

    def captured(self, seed: int) -> tuple[LayerCapture, ...]:
        """The remaining entries of every layer, keys turned to stand before ``next_position``."""
        return tuple(
            LayerCapture(
                torch.cat([held.sink_keys, held.turned_keys(self.next_position)], dim=1),
                torch.cat([held.sink_values, held.values], dim=1),
                held.no_queries,
                held.options,
                index,
                seed,
            )
            for index, held in sorted(self.layers.items())
        )


def band_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    band: Band,
    first: int,
    options: AttentionOptions,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last q of s tokens over sinks and a recent window, under one softmax.

    query [1, query_heads, q, dim]; keys, values [1, kv_heads, s, dim] of the tokens at indices ``first`` .. first+s-1,
    those that a query does not see included (sinks among them are taken from ``sinks``: keys and values
    [1, kv_heads, <= band.sinks, dim]). ``turned`` are the queries as they meet the sinks' keys, if not as they are.
    Returns the shape of query.
    """
    q, s, dim = query.shape[2], keys.shape[2], query.shape[3]
    sink_keys, sink_values = sinks
    if turned is not None:
        # Twice the dimensions, half of them zero in every key: the sinks' scores come from the turned queries, the
        # others' from the queries as they are, and one call of the fused attention does both.
        query = torch.cat([turned, query], dim=-1)
        sink_keys, keys = F.pad(sink_keys, (0, dim)), F.pad(keys, (dim, 0))
    sink = torch.arange(sink_keys.shape[2], device=query.device)
    blocks = []
    for start in range(0, q, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q)
        low, high = max(0, s - q + start - band.recent), s - q + stop  # the keys that any query of the block may see
        index = torch.arange(first + low, first + high, device=query.device)
        at = torch.arange(first + s - q + start, first + high, device=query.device)[:, None]
        near = (index <= at) & (index >= at - band.recent) & (index >= band.sinks)
        block_keys = torch.cat([sink_keys, keys[:, :, low:high]], dim=2)
        block_values = torch.cat([sink_values, values[:, :, low:high]], dim=2)
        mask = torch.cat([sink <= at, near], dim=1)  # [block, sinks + high - low]
        blocks.append(attend_masked(query[:, :, start:stop], block_keys, block_values, mask, options))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
