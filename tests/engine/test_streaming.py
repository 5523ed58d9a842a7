"""Streaming prefill against an oracle that reads token by token, and against itself in other chunkings."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.engine import Engine
from kvbench.engine.attention import AttentionOptions, forward_pass
from kvbench.engine.cache import Cache, PlainLayer, SlidingLayer
from kvbench.engine.rotation import LayerRotation, Rotation, discover
from kvbench.engine.streaming import Band, Streamed, StreamPass, band_attention, stream
from tests.cells import text
from tests.conftest import tiny_llama
from tests.models.tiny_configs import build
from tests.oracle import MaskedPass

SINKS, RECENT = 3, 9
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NAMES = ["llama", "llama3", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "glm", "phi"]


def engine_of(name: str) -> Engine:
    return Engine(tiny_llama(rope_parameters=LLAMA3) if name == "llama3" else build(name))


class OneByOne:
    """The oracle: one token a pass, every key with its token's index and the position it was rotated for.

    Positions are those of the paper, entry by entry; keys are turned with complex numbers in float64, through the
    frequencies that the model's own rotary embedding holds. Attention is written out head by head.
    """

    def __init__(self, model: Any, sinks: int, recent: int, compact: bool) -> None:
        self.model, self.sinks, self.recent, self.compact = model, sinks, recent, compact
        self.index = 0
        self.entries: dict[int, list[tuple[int, int, torch.Tensor, torch.Tensor]]] = {}
        self.seen: dict[int, dict[int, int]] = {}  # layer -> index of a token -> its position, at the last query

    def position(self) -> int:
        return min(self.index, self.sinks + self.recent) if self.compact else self.index

    def frequencies(self, layer: int) -> torch.Tensor | None:
        config = self.model.config
        if getattr(config, "no_rope_layers", None) and not config.no_rope_layers[layer]:
            return None
        buffers = dict(self.model.named_buffers())
        names = [name for name in buffers if name.endswith("inv_freq") and "original" not in name]
        if len(names) > 1:
            names = [name for name in names if config.layer_types[layer] in name]
        return buffers[names[0]].double()

    def turn(self, layer: int, key: torch.Tensor, by: int) -> torch.Tensor:
        """key [dim]"""
        frequencies = self.frequencies(layer)
        if frequencies is None or by == 0:
            return key
        half = frequencies.numel()
        rotary = key[: 2 * half].double()
        interleaved = self.model.config.model_type == "glm"
        pairs = rotary.view(half, 2) if interleaved else rotary.view(2, half).T
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half).double(),
                                    frequencies * by))  # fmt: skip
        joined = turned.reshape(-1) if interleaved else turned.T.reshape(-1)
        return torch.cat([joined.to(key.dtype), key[2 * half :]])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        t, window = self.index, options.sliding_window
        entries = self.entries.setdefault(layer, [])
        entries.append((t, self.position(), key[0, :, 0], value[0, :, 0]))
        if window is not None:
            self.entries[layer] = entries = [entry for entry in entries if entry[0] > t - window]
            at = {entry[0]: self.position() - (t - entry[0]) for entry in entries}
        else:
            entries = [entry for entry in entries if entry[0] < self.sinks or entry[0] >= t - self.recent]
            self.entries[layer] = entries
            places = range(len(entries)) if self.compact else [entry[0] for entry in entries]
            at = {entry[0]: place for entry, place in zip(entries, places, strict=True)}
        assert at[t] == self.position()
        self.seen[layer] = at
        heads, kv_heads = query.shape[1], key.shape[1]
        out = torch.empty(1, heads, 1, value.shape[-1])
        for head in range(heads):
            kv = head // (heads // kv_heads)
            turned = [self.turn(layer, k[kv], at[index] - fed) for index, fed, k, _ in entries]
            scores = torch.stack(turned) @ query[0, head, 0] * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head : head + 1]])
            weights = scores.softmax(0)[: len(entries)]
            out[0, head, 0] = sum(weights[i] * entry[3][kv] for i, entry in enumerate(entries))
        return out

    @torch.inference_mode()
    def read(self, ids: list[int]) -> torch.Tensor:
        """Logits [vocabulary] after the last token."""
        logits = torch.empty(0)
        for self.index, token in enumerate(ids):
            with forward_pass(self):
                positions = torch.tensor([[self.position()]])
                logits = self.model(torch.tensor([[token]]), position_ids=positions, use_cache=False).logits[0, -1]
        return logits

    def remaining(self, layer: int, next_position: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys at the places they must be returned at, and values, [kv_heads, m, dim] each."""
        entries, last = self.entries[layer], self.index
        if window is not None:
            entries = [entry for entry in entries if entry[0] > last + 1 - window]
        else:
            entries = [entry for entry in entries if entry[0] < self.sinks or entry[0] > last - self.recent]
        m = len(entries)
        places = range(next_position - m, next_position) if self.compact else [entry[0] for entry in entries]
        keys = [
            torch.stack([self.turn(layer, head, place - entry[1]) for head in entry[2]])
            for entry, place in zip(entries, places, strict=True)
        ]
        return torch.stack(keys, dim=1), torch.stack([entry[3] for entry in entries], dim=1)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert torch.allclose(found, expected, atol=tolerance * scale, rtol=0), float((found - expected).abs().max())


def same(found: Streamed, expected: Streamed, tolerance: float = 1e-4) -> None:
    assert (found.next_position, found.tokens) == (expected.next_position, expected.tokens)
    assert found.logits is not None and expected.logits is not None
    close(found.logits, expected.logits, tolerance)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert (a.index, a.seed, a.options.sliding_window) == (b.index, b.seed, b.options.sliding_window)
        close(a.keys, b.keys, tolerance)
        close(a.values, b.values, tolerance)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "original"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_reading_token_by_token(name: str, compact: bool) -> None:
    """Scaled, partial, interleaved and no RoPE, softcap, attention sink logits, sliding layers."""
    engine, ids = engine_of(name), text(47, 5)
    rotation = discover(engine) if compact else None
    oracle = OneByOne(engine.model, SINKS, RECENT, compact)
    expected = oracle.read(ids)
    found = stream(engine, ids, SINKS, RECENT, rotation, chunk=13)
    assert found.tokens == 47
    assert found.next_position == (SINKS + RECENT if compact else 47)
    assert found.logits is not None
    close(found.logits, expected)
    for layer in found.layers:
        keys, values = oracle.remaining(layer.index, found.next_position, layer.options.sliding_window)
        close(layer.keys, keys)
        close(layer.values, values)


def test_the_oracle_attends_where_the_paper_says(llama: torch.nn.Module) -> None:
    engine = Engine(llama)
    oracle = OneByOne(engine.model, 2, 3, compact=True)
    oracle.read(text(10, 1))
    # token 9 stands at C = 5; the two sinks keep their places, tokens 6, 7, 8 stand just before it
    assert oracle.seen[0] == {0: 0, 1: 1, 6: 2, 7: 3, 8: 4, 9: 5}


@pytest.mark.parametrize("n", [12, 13, 14, 15, 16])
def test_a_text_just_longer_than_the_cache(llama: torch.nn.Module, n: int) -> None:
    """The cache holds 12: the first token that is not fed where it stands is the last of 14."""
    engine, ids = Engine(llama), text(n, 5)
    expected = OneByOne(engine.model, SINKS, RECENT, compact=True).read(ids)
    for chunk in (1, 11, 12, 13, 14, 15, 16):
        found = stream(engine, ids, SINKS, RECENT, discover(engine), chunk)
        assert found.logits is not None
        close(found.logits, expected)


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "original"])
def test_no_result_depends_on_the_chunks(name: str, compact: bool) -> None:
    engine, ids = engine_of(name), text(90, 6)
    rotation = discover(engine) if compact else None
    expected = stream(engine, ids, SINKS, RECENT, rotation, chunk=1000)
    for chunk in (1, 2, SINKS, 7, RECENT, 12, 13, 64, 89, 90):
        same(stream(engine, ids, SINKS, RECENT, rotation, chunk), expected)


def test_no_result_depends_on_the_blocks_within_a_chunk(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    engine, ids = Engine(llama), text(300, 6)
    rotation = discover(engine)
    expected = stream(engine, ids, SINKS, 40, rotation)
    monkeypatch.setattr("kvbench.engine.streaming.QUERY_BLOCK", 11)
    same(stream(engine, ids, SINKS, 40, rotation), expected)


@pytest.mark.parametrize("name", ["llama", "llama3", "gemma3_text"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 11, 12])
def test_a_text_within_the_cache_is_prefilled(name: str, n: int) -> None:
    """Shorter than the sinks, as long, and up to the whole cache: nothing is lost and nothing moves."""
    engine, ids = engine_of(name), text(n, 7)
    capture = engine.prefill(ids)
    for compact in (True, False):
        for chunk in (1, 5, 100):
            found = stream(engine, ids, SINKS, RECENT, discover(engine) if compact else None, chunk)
            assert found.next_position == found.tokens == n
            assert found.logits is not None and capture.logits is not None
            close(found.logits, capture.logits, 1e-5)
            for layer, whole in zip(found.layers, capture.layers, strict=True):
                window = layer.options.sliding_window
                held = n if window is None else min(n, window - 1)
                close(layer.keys, whole.keys[:, n - held :], 1e-5)
                close(layer.values, whole.values[:, n - held :], 1e-5)
                assert layer.seed == whole.seed


def test_the_band_and_true_positions_are_a_mask_on_the_whole_cache(llama: torch.nn.Module) -> None:
    """One more token after a streamed text of one layer sees what the masked full cache shows it."""
    engine, ids, new = Engine(tiny_llama(layers=1)), text(40, 8), 5
    found = stream(engine, ids, SINKS, RECENT, None)
    cache = Cache([PlainLayer(layer.keys, layer.values) for layer in found.layers], found.next_position)
    kept = torch.zeros(2, 40, dtype=torch.bool)
    kept[:, :SINKS] = kept[:, 40 - RECENT :] = True
    with torch.inference_mode(), forward_pass(MaskedPass(engine.prefill(ids), {0: kept})):
        expected = engine.model(torch.tensor([[new]]), position_ids=torch.tensor([[40]]), use_cache=False).logits[0]
    close(engine.feed(cache, [new]), expected[-1])


@pytest.mark.parametrize("name", ["llama3", "gemma3_text"])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "original"])
def test_the_next_token_is_fed_at_the_next_position(name: str, compact: bool) -> None:
    """Decoding on from the remaining entries gives what streaming one token more gives."""
    engine, ids = engine_of(name), text(60, 9)
    rotation = discover(engine) if compact else None
    expected = stream(engine, ids, SINKS, RECENT, rotation)
    found = stream(engine, ids[:-1], SINKS, RECENT, rotation)
    layers = [
        PlainLayer(layer.keys, layer.values)
        if layer.options.sliding_window is None
        else SlidingLayer(layer.keys, layer.values, layer.options.sliding_window)
        for layer in found.layers
    ]
    assert expected.logits is not None
    close(engine.feed(Cache(list(layers), found.next_position), ids[-1:]), expected.logits)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_no_token_leaves_no_entry(name: str) -> None:
    engine = engine_of(name)
    found = stream(engine, [], SINKS, RECENT, discover(engine))
    assert (found.logits, found.next_position, found.tokens) == (None, 0, 0)
    assert [layer.tokens for layer in found.layers] == [0] * engine.model.config.num_hidden_layers


@pytest.mark.parametrize("sinks, recent", [(0, 5), (4, 0), (0, 0), (1, 1)])
def test_bands_without_sinks_or_window(sinks: int, recent: int) -> None:
    engine, ids = engine_of("llama3"), text(30, 4)
    oracle = OneByOne(engine.model, sinks, recent, compact=True)
    expected = oracle.read(ids)
    for chunk in (1, 4, 64):
        found = stream(engine, ids, sinks, recent, discover(engine), chunk)
        assert found.logits is not None
        close(found.logits, expected)
        assert {layer.tokens for layer in found.layers} == {sinks + recent}


@pytest.mark.parametrize("wrong", [(-1, 4, 8), (4, -1, 8), (4, 4, 0)])
def test_impossible_sizes_are_refused(llama: Any, wrong: tuple[int, int, int]) -> None:
    sinks, recent, chunk = wrong
    with pytest.raises(ValueError, match="or more"):
        stream(Engine(llama), [1, 2], sinks, recent, None, chunk)


def test_positions_within_the_cache_are_not_the_true_ones(llama: torch.nn.Module) -> None:
    engine, ids = Engine(llama), text(60, 2)
    a = stream(engine, ids, SINKS, RECENT, discover(engine)).logits
    b = stream(engine, ids, SINKS, RECENT, None).logits
    assert a is not None and b is not None
    assert (a - b).abs().max() > 1e-2, "else no test here can tell the two apart"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else [out]
        self.elements = max([self.elements, *(item.numel() for item in found if isinstance(item, torch.Tensor))])
        return out


def held_elements(current: StreamPass) -> int:
    """Elements of the storage behind everything that a pass holds."""
    storages: dict[int, int] = {}
    for held in current.layers.values():
        for tensor in vars(held).values():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
    return sum(storages.values())


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("gemma3_text")
    rotation, forward = discover(engine), engine._forward
    passes: list[StreamPass] = []

    def spy(current: Any, *arguments: Any) -> torch.Tensor:
        passes.append(current)
        return forward(current, *arguments)

    monkeypatch.setattr(engine, "_forward", spy)
    held, largest = [], []
    for n in (2_000, 8_000):
        with Largest() as seen:
            stream(engine, text(n, 3), 4, 60, rotation, chunk=256)
        held.append(held_elements(passes[-1]))
        largest.append(seen.elements)
    assert held[0] == held[1], "the held state must not depend on the length of the text"
    assert largest[0] == largest[1], "nor must any tensor that is made on the way"
    # 2 sliding layers of 7 entries, 2 layers of 64; keys and values, 2 heads of 16; and where each key was fed
    assert held[1] == 2 * 2 * 16 * (2 * 7 + 2 * 64) + (2 * 7 + 2 * 60)


def test_a_long_text_takes_seconds(llama: torch.nn.Module) -> None:
    engine, ids = Engine(llama), text(20_000, 3)
    rotation = discover(engine)
    start = time.perf_counter()
    found = stream(engine, ids, 4, 252, rotation)
    assert time.perf_counter() - start < 60
    assert found.next_position == 256 and found.tokens == 20_000
    assert found.logits is not None and bool(torch.isfinite(found.logits).all())
    # a token 20,000 places on depends on a few windows before it alone: the same end after another beginning
    other = stream(engine, [*ids[:4], *ids[-4_000:]], 4, 252, rotation)
    assert other.logits is not None
    close(found.logits, other.logits)


def test_half_precision_does_not_drift(llama: torch.nn.Module) -> None:
    """A key is turned from what was computed, however small the chunks: errors stay those of one rounding."""
    rotation = LayerRotation(1.0 / 10000.0 ** (torch.arange(8) / 8.0), interleaved=False)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 200, 16, generator=generator) for heads in (4, 2, 2))

    def outputs(dtype: torch.dtype, chunk: int) -> torch.Tensor:
        current, options = StreamPass(Band(4, 28), Rotation((rotation,))), AttentionOptions(0.25)
        out = []
        for start in range(0, 200, chunk):
            at = torch.arange(current.next_position, current.next_position + chunk)
            q, k = (
                rotation.turn(tensor[0, :, start : start + chunk], at.expand(tensor.shape[1], -1))[None].to(dtype)
                for tensor in (query, key)
            )
            out.append(current.attend(0, q, k, value[:, :, start : start + chunk].to(dtype), options).float())
            current.tokens += chunk
        return torch.cat(out, dim=2)

    exact = outputs(torch.float32, 50)
    assert torch.allclose(outputs(torch.float32, 1), exact, atol=1e-5)
    errors = [float((outputs(torch.bfloat16, chunk) - exact).abs().mean()) for chunk in (1, 50)]
    assert errors[0] < 2 * errors[1], "one token at a time must be as exact as large chunks"


def test_band_attention_by_hand() -> None:
    """Equal scores: every output is the mean of the values that a query sees."""
    values = torch.arange(6.0).view(1, 1, 6, 1)
    keys, query = torch.zeros(1, 1, 6, 1), torch.zeros(1, 1, 3, 1)
    sinks = keys[:, :, :1], values[:, :, :1]
    out = band_attention(query, keys, values, sinks, Band(1, 2), 0, AttentionOptions(1.0))
    expected = [(0 + 1 + 2 + 3) / 4, (0 + 2 + 3 + 4) / 4, (0 + 3 + 4 + 5) / 4]
    assert torch.allclose(out.flatten(), torch.tensor(expected))
