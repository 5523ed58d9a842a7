"""The start-up check: is this model one that the engine runs correctly? It costs a few passes over a few tokens."""

from __future__ import annotations

import torch

from kvbench.engine.attention import NAME
from kvbench.engine.cache import Cache, LayerCache, PlainLayer, SlidingLayer
from kvbench.engine.capture import Capture
from kvbench.engine.engine import Engine
from kvbench.errors import InputError

TOKENS = 24
# Root mean square of the difference of logits, in units of their standard deviation. With 16-bit weights two correct
# kernels differ by a few percent (single logits by far more); wrong attention differs by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


def self_test(engine: Engine) -> None:
    """Raises InputError naming the model and what it does that the engine cannot serve.

    Checked: every layer calls the attention function once; a changed last token leaves earlier logits alone (our own
    causality); logits equal those of transformers' ``eager`` attention; a text continued through a full cache gives the
    logits of the whole text (no state besides keys and values).
    """
    try:
        run_checks(engine)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise  # says nothing about the architecture
        raise unsupported(engine, f"it fails on a short text ({type(error).__name__}: {error})") from error


def run_checks(engine: Engine) -> None:
    """The checks of ``self_test``; what they raise beside InputError means that the model cannot run at all."""
    config = engine.model.config.get_text_config()
    ids = [(11 + 7 * i * i) % config.vocab_size for i in range(TOKENS)]
    capture = engine.prefill(ids)
    expected = config.num_hidden_layers
    if [layer.index for layer in capture.layers] != list(range(expected)):
        called = [layer.index for layer in capture.layers]
        raise unsupported(engine, f"only layers {called} of {expected} call transformers' attention function")
    if any(layer.keys.shape != layer.values.shape for layer in capture.layers):
        raise unsupported(engine, "keys and values differ in size (latent attention)")
    logits = engine.all_logits(ids)
    changed = engine.all_logits([*ids[:-1], (ids[-1] + 1) % config.vocab_size])
    if differs(changed[:-1], logits[:-1]):
        raise unsupported(engine, "a changed last token changes the logits before it")
    engine.model.set_attn_implementation("eager")
    try:
        eager = engine.plain_logits(ids)
    finally:
        engine.model.set_attn_implementation(NAME)
    if differs(logits, eager):
        raise unsupported(engine, "its logits differ from those of attn_implementation='eager'")
    cache = full_cache(engine.prefill(ids[: TOKENS // 2]))
    engine.feed(cache, ids[TOKENS // 2 : -1])
    if differs(engine.feed(cache, ids[-1:]), logits[-1]):
        raise unsupported(engine, "a text continued through a cache of keys and values differs from the whole text")


def full_cache(capture: Capture, room: int = TOKENS) -> Cache:
    """A cache of everything captured."""
    layers: list[LayerCache] = []
    for layer in capture.layers:
        window = layer.options.sliding_window
        plain = window is None
        layers.append(
            PlainLayer(layer.keys, layer.values, room) if plain else SlidingLayer(layer.keys, layer.values, window)
        )
    return Cache(layers, capture.tokens)


def differs(logits: torch.Tensor, reference: torch.Tensor) -> bool:
    """Do logits [..., vocabulary] differ by more than rounding? Non-finite ones are left to the records to report."""
    kept = torch.isfinite(logits) & torch.isfinite(reference)
    if not bool(kept.any()):
        return False
    difference = (logits - reference)[kept].float().square().mean().sqrt()
    return bool(difference > TOLERANCE[logits.dtype] * reference[kept].float().std())


def unsupported(engine: Engine, reason: str) -> InputError:
    kind = engine.model.config.model_type
    return InputError(
        "model", kind, f"the architecture {kind!r} is not supported: {reason}.", "Choose another decoder-only model."
    )
