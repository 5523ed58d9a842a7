"""Any eviction method before any codec: what is stored is the coded form of exactly what was kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvbench.engine import Cache, Capture, Engine
from kvbench.engine.cache import LayerCache, SlidingLayer
from kvbench.engine.ragged import HeadsLayer
from kvbench.methods import Method
from kvbench.methods.codecs import Codec
from kvbench.methods.hcattention import HCAttention
from kvbench.methods.kivi import Kivi
from kvbench.protocols import ContextRun, Switches
from tests.cells import PROTOCOLS, answer, begin, fitted, method, text
from tests.conftest import tiny_llama
from tests.models.tiny_configs import build

CONTEXT, QUESTION, OTHER = text(90, 5), text(7, 6), text(11, 7)
BUDGET = 40
KIVI = ("method/codec=kivi2", "method.codec.group=16", "method.codec.residual=16")  # heads have 16 channels
HC = ("method/codec=hcattention", "method.codec.groups=4", "method.codec.centroids=64")
EVICTING = ["snapkv", "adakv", "pyramidkv", "knorm"]
COMPOSED = [*((name, KIVI) for name in EVICTING), ("snapkv", HC), ("adakv", HC)]
IDS = [f"{name}-{codec[0].rpartition('=')[2]}" for name, codec in COMPOSED]
MODELS = {
    "gqa": tiny_llama,
    "mha": lambda: tiny_llama(num_key_value_heads=4),
    "sliding": lambda: build("gemma3_text"),
}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(MODELS[request.param]())


def captured(engine: Engine, chosen: Method, protocol: str) -> tuple[Capture, int]:
    """What the protocol prefills, and how many of its tokens a cache may store."""
    capture = engine.prefill(CONTEXT, chosen.needs)
    if protocol == "blind":
        return capture, len(CONTEXT)
    following = QUESTION if protocol == "aware" else OTHER
    stored = len(CONTEXT) + len(QUESTION) - 1 if protocol == "aware" else len(CONTEXT)
    return engine.extend(capture, following, chosen.needs), stored


def coded_by_hand(codec: Codec, capture: Capture, positions: dict[int, Sequence[torch.Tensor]], stored: int) -> Cache:
    """The cache of the entries at ``positions`` (layer -> per KV head), in the order given."""
    layers: list[LayerCache] = []
    for layer in capture.layers:
        if layer.index not in positions:
            assert layer.options.sliding_window is not None
            window = layer.options.sliding_window
            layers.append(SlidingLayer(layer.keys[:, :stored], layer.values[:, :stored], window))
            continue
        heads = [
            (layer.keys[head : head + 1, at], layer.values[head : head + 1, at])
            for head, at in enumerate(positions[layer.index])
        ]
        if len({keys.shape[1] for keys, _ in heads}) == 1:
            keys, values = (torch.cat(parts) for parts in zip(*heads, strict=True))
            layers.append(codec(layer.index, range(len(heads)), keys, values, 0))
        else:
            alone = [codec(layer.index, [head], keys, values, 0) for head, (keys, values) in enumerate(heads)]
            layers.append(HeadsLayer(alone))
    return Cache(layers, stored)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("name", "codec"), COMPOSED, ids=IDS)
def test_a_codec_stores_exactly_what_the_method_keeps(
    name: str, codec: tuple[str, ...], protocol: str, engine: Engine
) -> None:
    composed, plain = fitted(method(name, *codec), engine), method(name)
    assert isinstance(composed.codec, Kivi | HCAttention)
    switches = Switches(protocol)
    started = begin(engine, composed, CONTEXT, QUESTION, switches, BUDGET, OTHER)
    uncoded = begin(engine, plain, CONTEXT, QUESTION, switches, BUDGET, OTHER)
    positions = started.compressed.positions
    for index, heads in positions.items():
        for kept, expected in zip(heads, uncoded.compressed.positions[index], strict=True):
            assert torch.equal(kept, expected), "how entries are stored must not change which are kept"
            assert bool((kept.diff() > 0).all())
    assert started.cache.entries() == uncoded.cache.entries() == BUDGET + len(QUESTION)
    # ``begin`` fed the question: its fingerprint is that of the cache before
    capture, stored = captured(engine, composed, protocol)
    by_hand = coded_by_hand(composed.codec, capture, positions, stored)
    assert started.fingerprint == by_hand.fingerprint() != uncoded.fingerprint
    # a check of the check: other entries, or the same in another order, are another cache
    backwards = {index: [head.flip(0) for head in heads] for index, heads in positions.items()}
    assert coded_by_hand(composed.codec, capture, backwards, stored).fingerprint() != started.fingerprint


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("name", "codec"), COMPOSED, ids=IDS)
def test_a_codec_takes_fewer_bytes_and_still_answers(
    name: str, codec: tuple[str, ...], protocol: str, engine: Engine
) -> None:
    composed, plain = fitted(method(name, *codec), engine), method(name)
    started, uncoded = (
        begin(engine, chosen, CONTEXT, QUESTION, Switches(protocol), BUDGET, OTHER) for chosen in (composed, plain)
    )
    assert started.cache.nbytes() < uncoded.cache.nbytes() < started.bytes_full
    layers = zip(started.cache.layers, uncoded.cache.layers, strict=True)
    assert all(of_codes.entries == as_is.entries for of_codes, as_is in layers)
    host = sum(layer.entries for layer in started.cache.layers if layer.compressed) * value_bytes(engine)
    assert started.cache.nbytes("host") == (host if isinstance(composed.codec, HCAttention) else 0)
    assert len(answer(engine, started, 20)) == 20  # long enough for a block of new keys to be coded
    assert started.cache.entries() == BUDGET + len(QUESTION) + 19, "the last answer token is not fed"


def value_bytes(engine: Engine) -> int:
    """Bytes of one token's values in one layer: fp32."""
    values = engine.prefill([1]).layers[0].values  # [kv_heads, 1, dim]
    return values.numel() * 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", EVICTING)
def test_eight_bits_answer_as_plain_storage_does(name: str, protocol: str, engine: Engine) -> None:
    """Codes of the right entries at the right positions: with many bits, hardly anything changes."""
    settings = ("method/codec=kivi8", *KIVI[1:])
    coded, plain = (
        begin(engine, chosen, CONTEXT, QUESTION, Switches(protocol), BUDGET, OTHER).logits
        for chosen in (method(name, *settings), method(name))
    )
    assert 0 < (coded - plain).abs().max() < 0.05 * plain.abs().max()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["kivi2", *EVICTING])
def test_a_second_question_does_not_see_the_first(name: str, protocol: str, engine: Engine) -> None:
    """The full-precision residual is where a question and its answer would stay behind."""
    chosen = method(name, *KIVI[1:]) if name == "kivi2" else method(name, *KIVI)
    questions, budget = [QUESTION, text(9, 21), QUESTION], "full" if name == "kivi2" else BUDGET

    def ask(question: list[int], run: ContextRun | None) -> tuple[torch.Tensor, list[int], str]:
        started = begin(engine, chosen, CONTEXT, question, Switches(protocol), budget, OTHER, run=run)
        logits = started.logits.clone()
        return logits, answer(engine, started, 20), started.fingerprint

    run = ContextRun(engine, tuple(CONTEXT), chosen.needs, shared=True)
    prints = []
    for question in questions:
        (logits, tokens, fingerprint), (fresh, alone, fresh_print) = ask(question, run), ask(question, None)
        assert torch.equal(logits, fresh)
        assert tokens == alone
        assert fingerprint == fresh_print
        prints.append(fingerprint)
    assert prints[0] == prints[2]
    assert (prints[0] == prints[1]) == (protocol != "aware"), "only an aware cache depends on its question"
