"""Samples of methods whose prefill itself is streamed: no full capture, and memory that does not grow with the text.

What is read through sinks and a recent window sees no question before the question is fed, so blind, aware and swapped
are the same here, except that a question that competes for the budget (question_evictable) is streamed as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.engine.cache import Cache, LayerCache, PlainLayer, SlidingLayer
from kvbench.engine.capture import LayerCapture
from kvbench.engine.engine import Engine
from kvbench.engine.rotation import Rotation
from kvbench.engine.streaming import Streamed, stream
from kvbench.methods import Compressed, Method, Region
from kvbench.methods.decode import Rolling
from kvbench.methods.evicting import EvictingLayer

NOTE = "read through sinks and a recent window"


def is_streamed(method: Method, region: Region, budget: int) -> bool:
    """Is the text streamed? Not where the budget covers it: then nothing is evicted, and prefill is the usual one."""
    return method.prefill == "streaming" and budget < region.evictable


def read(
    engine: Engine, method: Method, ids: Sequence[int], budget: int, rotation: Rotation | None
) -> tuple[Streamed, int]:
    """The text's last state, and how many sinks it has (at least one entry is recent)."""
    sinks = min(method.protect.sinks, budget - 1)
    return stream(engine, ids, sinks, budget - sinks, rotation, method.chunk), sinks


def compressed(
    method: Method, streamed: Streamed, sinks: int, budget: int, on_top: int, room: int, rotation: Rotation | None
) -> Compressed:
    """The cache that goes on from a streamed text; ``on_top`` prompt tokens follow beside the budget."""
    layers: list[LayerCache] = []
    positions: dict[int, Sequence[torch.Tensor]] = {}
    for layer in streamed.layers:
        window = layer.options.sliding_window
        if window is not None:
            layers.append(SlidingLayer(layer.keys, layer.values, window))
            continue
        at = torch.arange(layer.keys.shape[1])
        at = torch.where(at < sinks, at, at + streamed.tokens - layer.keys.shape[1])
        positions[layer.index] = [at] * layer.keys.shape[0]
        layers.append(_layer(method, layer, budget, on_top, room, rotation))
    kept = tuple(float(layer.entries) for layer in layers if layer.compressed)
    return Compressed(Cache(layers, streamed.next_position), kept, positions, NOTE)


def _layer(
    method: Method, layer: LayerCapture, budget: int, on_top: int, room: int, rotation: Rotation | None
) -> LayerCache:
    if not isinstance(method.decode, Rolling) or method.decode.schedule == "room":
        return PlainLayer(layer.keys, layer.values, room)
    limit = budget + on_top
    turn = None if rotation is None else rotation.layers[layer.index]
    protect = method.decode.protect(method.protect, budget, limit)
    return EvictingLayer(layer.keys, layer.values, method.decode, limit, protect, None, turn, room)
