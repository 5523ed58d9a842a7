"""HCAttention: the layer against plain attention and a loop written apart, its bytes, and a model's answers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine import Cache, Engine, StopRule
from kvbench.engine.attention import AttentionOptions, causal_attention
from kvbench.engine.ragged import HeadsLayer
from kvbench.errors import InputError
from kvbench.methods import hcattention_layer
from kvbench.methods.codebook import Codebooks, LayerCodebook
from kvbench.methods.hcattention import HCAttention
from kvbench.methods.hcattention_layer import Choice, HCLayer, Rows, smallest_sets
from kvbench.methods.setup import Setup
from kvbench.models.byte_tokenizer import SIZE, build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from tests.conftest import tiny_llama

HEADS, KV_HEADS, DIM, GROUPS, COUNT = 6, 2, 16, 4, 32
ALL = Choice(1.0, True, False)
PLAIN = AttentionOptions(DIM**-0.5)
OPTIONS = {
    "plain": PLAIN,
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, sinks=torch.linspace(-2, 3, HEADS)),
    "both": replace(PLAIN, softcap=2.0, sinks=torch.linspace(-2, 3, HEADS)),
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(length: int, seed: int) -> list[int]:
    """Token ids of the byte tokenizer that look random and are not."""
    return [(seed * 31 + i * i * 7 + i * 13 + (i >> 2)) % SIZE for i in range(length)]


def codebook(sets: int = KV_HEADS, count: int = COUNT, groups: int = GROUPS, dim: int = DIM) -> LayerCodebook:
    return LayerCodebook(numbers(sets, groups, count, dim // groups, seed=9))


def exact_keys(book: LayerCodebook, n: int, seed: int = 1) -> torch.Tensor:
    """Keys [kv_heads, n, dim] whose parts are all centroids."""
    count = book.centroids.shape[2]
    codes = torch.randint(0, count, (n, KV_HEADS, book.groups), generator=torch.Generator().manual_seed(seed))
    return book.rebuild(codes.to(torch.int32).to(torch.int16))


def attend_in_passes(
    layer: HCLayer, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    layer.append(keys, values)
    out = layer.attend(query, options)
    layer.settle()
    return out


# --- the attention


@pytest.mark.parametrize("q", [1, 5])
@pytest.mark.parametrize("sets", [KV_HEADS, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_exact_where_every_key_is_its_own_centroid(options: AttentionOptions, sets: int, q: int) -> None:
    book = codebook(sets)
    keys, values, query = exact_keys(book, 40), numbers(KV_HEADS, 40, 24, seed=2), numbers(HEADS, q, DIM, seed=3)
    layer = HCLayer(book, ALL, keys[:, : 40 - q], values[:, : 40 - q])
    out = attend_in_passes(layer, keys[:, 40 - q :], values[:, 40 - q :], query, options)
    expected = causal_attention(query[None], keys[None], values[None], options)[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_scores_of_inexact_keys_are_those_of_what_the_codes_stand_for() -> None:
    book = codebook()
    keys, values, query = numbers(KV_HEADS, 30, DIM), numbers(KV_HEADS, 30, DIM, seed=2), numbers(HEADS, 3, DIM, seed=3)
    layer = HCLayer(book, ALL, keys, values)
    expected = causal_attention(query[None], book.rebuild(book.nearest(keys))[None], values[None], PLAIN)[0]
    torch.testing.assert_close(layer.attend(query, PLAIN), expected, atol=1e-5, rtol=1e-5)


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    book, choice = codebook(), Choice(0.3, True, True)
    keys, values, query = exact_keys(book, 40), numbers(KV_HEADS, 40, DIM, seed=2), 3 * numbers(HEADS, 7, DIM, seed=3)
    whole = HCLayer(book, choice, keys[:, :33], values[:, :33])
    at_once = attend_in_passes(whole, keys[:, 33:], values[:, 33:], query, PLAIN)
    for name in ("NUMBERS_AT_ONCE", "VALUES_AT_ONCE"):
        monkeypatch.setattr(hcattention_layer, name, 1600)
    monkeypatch.setattr("kvbench.methods.codebook.DISTANCES_AT_ONCE", 700)
    monkeypatch.setattr("kvbench.methods.codebook.INDICES_AT_ONCE", 30)
    pieces = HCLayer(book, choice, keys[:, :33], values[:, :33])
    blocks = attend_in_passes(pieces, keys[:, 33:], values[:, 33:], query, PLAIN)
    torch.testing.assert_close(at_once, blocks, atol=1e-6, rtol=1e-5)
    assert whole.entries == pieces.entries < 40
    assert all(torch.equal(tensor, pieces.tensors()[name]) for name, tensor in whole.tensors().items())


def set_by_hand(weights: list[float], tau: float) -> set[int]:
    """The smallest set in plain Python: largest first, the earlier of two equal ones first."""
    order = sorted(range(len(weights)), key=lambda j: (-weights[j], j))
    total, mass, taken = math.fsum(weights), [], set()
    for j in order:
        taken.add(j)
        mass.append(weights[j])
        if math.fsum(mass) >= tau * total:
            break
    return taken


def output_by_hand(
    keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, options: AttentionOptions, choice: Choice
) -> torch.Tensor:
    """Head by head and query by query, in float64, with ``keys`` as the codes give them."""
    heads, q, _ = query.shape
    n, group = keys.shape[1], heads // keys.shape[0]
    out = torch.zeros(heads, q, values.shape[2], dtype=torch.float64)
    for head in range(heads):
        for i in range(q):
            seen = n - q + i + 1
            scores = [float(query[head, i].double() @ keys[head // group, j].double()) for j in range(seen)]
            scores = [score * options.scaling for score in scores]
            if options.softcap is not None:
                scores = [options.softcap * math.tanh(score / options.softcap) for score in scores]
            sink = 0.0 if options.sinks is None else math.exp(float(options.sinks[head]))
            all_mass = math.fsum(map(math.exp, scores)) + sink
            weights = [math.exp(score) / all_mass for score in scores]
            taken = set_by_hand(weights, choice.tau)
            factor = math.fsum(weights) / math.fsum(weights[j] for j in taken) if choice.renormalise else 1.0
            for j in taken:
                out[head, i] += factor * weights[j] * values[head // group, j].double()
    return out.float()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("tau", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_selection_by_hand(options: AttentionOptions, tau: float, renormalise: bool) -> None:
    book, choice = codebook(), Choice(tau, renormalise, False)
    keys, values, query = exact_keys(book, 25), numbers(KV_HEADS, 25, DIM, seed=2), 2 * numbers(HEADS, 4, DIM, seed=3)
    layer = HCLayer(book, choice, keys[:, :21], values[:, :21])
    out = attend_in_passes(layer, keys[:, 21:], values[:, 21:], query, options)
    torch.testing.assert_close(out, output_by_hand(keys, values, query, options, choice), atol=1e-5, rtol=1e-4)
    assert layer.entries == 25, "nothing is dropped"


def test_without_rescaling_the_output_is_smaller() -> None:
    book = codebook()
    keys, query = exact_keys(book, 20), numbers(HEADS, 1, DIM, seed=3)
    ones = torch.ones(KV_HEADS, 20, DIM)
    kept = HCLayer(book, Choice(0.6, True, False), keys, ones).attend(query, PLAIN)
    left = HCLayer(book, Choice(0.6, False, False), keys, ones).attend(query, PLAIN)
    torch.testing.assert_close(kept, torch.ones_like(kept))
    assert bool((left < 0.999).all() and (left >= 0.6 - 1e-5).all())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_smallest_sets(data: st.DataObject) -> None:
    """Weights are multiples of 1/64, so that sums are exact and ties frequent."""
    counts = data.draw(st.lists(st.integers(0, 64), min_size=1, max_size=12).filter(any))
    eighths = data.draw(st.integers(1, 7))
    weights = [count / 64 for count in counts]
    kept = smallest_sets(torch.tensor([weights]), eighths / 8)[0]
    assert {j for j, flag in enumerate(kept.tolist()) if flag} == set_by_hand(weights, eighths / 8)


def test_weights_that_are_not_finite_select_everything() -> None:
    assert bool(smallest_sets(torch.tensor([0.5, math.nan, 0.5]), 0.3).all())


@pytest.mark.parametrize("where", ["keys", "values", "new keys"])
def test_what_is_not_finite_shows(where: str) -> None:
    book = codebook()
    keys, values = exact_keys(book, 20), numbers(KV_HEADS, 20, DIM, seed=2)
    (values if where == "values" else keys)[1, 19 if where == "new keys" else 4, 3] = math.inf
    layer = HCLayer(book, Choice(0.1, True, False), keys[:, :19], values[:, :19]).copy()
    out = attend_in_passes(layer, keys[:, 19:], values[:, 19:], numbers(HEADS, 1, DIM, seed=3), PLAIN)
    assert not bool(torch.isfinite(out).any())


# --- what is dropped for good


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["both"]], ids=["plain", "both"])
def test_permanent_against_a_mask(options: AttentionOptions) -> None:
    """Several passes; a reference that never drops anything, only masks, must select and answer the same."""
    choice, book = Choice(0.6, True, True), codebook()
    passes = [3, 1, 1, 4, 1]
    total = 40 + sum(passes)
    keys, values = exact_keys(book, total), numbers(KV_HEADS, total, DIM, seed=2)
    layer = HCLayer(book, choice, keys[:, :40], values[:, :40], room=2)
    alive = torch.ones(KV_HEADS, 40, dtype=torch.bool)
    unequal = False
    for number, q in enumerate(passes):
        n = alive.shape[1] + q
        query = 2 * numbers(HEADS, q, DIM, seed=20 + number)
        out = attend_in_passes(layer, keys[:, n - q : n], values[:, n - q : n], query, options)
        alive = torch.cat([alive, torch.ones(KV_HEADS, q, dtype=torch.bool)], dim=1)
        used = torch.zeros_like(alive)
        for head in range(HEADS):
            kv, own = head // (HEADS // KV_HEADS), replace(options, sinks=None)
            sink = options.sinks
            own = own if sink is None else replace(options, sinks=sink[head : head + 1])
            at = alive[kv].nonzero()[:, 0]
            expected = output_by_hand(keys[kv, at][None], values[kv, at][None], query[head][None], own, choice)
            torch.testing.assert_close(out[head], expected[0], atol=1e-5, rtol=1e-4)
            for i in range(q):
                scores = keys[kv, at[: len(at) - q + i + 1]] @ query[head, i] * options.scaling
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                used[kv, at[list(set_by_hand(scores.double().exp().tolist(), choice.tau))]] = True
        used[:, n - q :] = True
        alive &= used
        lengths = alive.sum(1)
        unequal |= int(lengths.min()) < int(lengths.max())
        assert layer.entries == int(alive.sum()) / KV_HEADS
        held = layer.tensors()
        if number == len(passes) - 1 and held["lengths"].equal(lengths):
            assert torch.equal(held["host_values"], torch.cat([values[kv, alive[kv].nonzero()[:, 0]] for kv in (0, 1)]))
        cache = Cache([layer], n)
        assert cache.nbytes("host") == int(alive.sum()) * DIM * 4
        assert cache.nbytes() == int(alive.sum()) * GROUPS * 2 + KV_HEADS * 8
    assert unequal, "the case is not ragged"
    assert layer.entries < total / 2


def test_a_share_of_one_drops_nothing() -> None:
    book = codebook()
    keys, values = exact_keys(book, 20), numbers(KV_HEADS, 20, DIM, seed=2)
    layer = HCLayer(book, Choice(1.0, True, True), keys[:, :18], values[:, :18])
    attend_in_passes(layer, keys[:, 18:], values[:, 18:], numbers(HEADS, 2, DIM), PLAIN)
    assert layer.entries == 20


def test_settling_without_a_query_drops_nothing() -> None:
    book = codebook()
    layer = HCLayer(book, Choice(0.1, True, True), exact_keys(book, 20), numbers(KV_HEADS, 20, DIM))
    layer.append(exact_keys(book, 2), numbers(KV_HEADS, 2, DIM))
    layer.settle()
    assert layer.entries == 22


# --- storage


def codec(groups: int, count: int = 8, dim: int = 128, layers: int = 1, **changes: Any) -> HCAttention:
    """With codebooks of random numbers for layers of two KV heads."""
    books = {i: numbers(KV_HEADS, groups, count, dim // groups, seed=i) for i in range(layers)}
    return HCAttention(groups=groups, centroids=count, books=Codebooks(books, {}), **changes)


@pytest.mark.parametrize("groups, share", [(64, 4), (32, 8)])
def test_device_bytes_are_a_quarter_or_an_eighth(groups: int, share: int) -> None:
    keys = numbers(KV_HEADS, 50, 128).bfloat16()
    cache = Cache([codec(groups)(0, range(2), keys, keys, room=9)], 50)
    cache.layers[0].append(keys[:, :3], keys[:, :3])
    plain = 2 * KV_HEADS * 53 * 128 * 2  # keys and values of 16 bits
    assert cache.nbytes() * share == plain
    assert cache.nbytes("host") * 2 == plain, "values are on the host, as they were"
    held = cache.layers[0].tensors()
    assert held["codes"].shape == (KV_HEADS, 53, groups) and held["codes"].element_size() == 2
    assert torch.equal(held["host_values"], torch.cat([keys, keys[:, :3]], 1))


def test_codes_of_the_largest_codebook() -> None:
    """65536 centroids: the numbers beyond 32767 are negative as int16."""
    book = LayerCodebook(torch.linspace(-1, 1, 1 << 16).view(1, 1, -1, 1))
    keys = torch.tensor([-1.0, 0.0, 0.25, 1.0]).view(1, 4, 1)
    rebuilt = book.rebuild(book.nearest(keys))
    torch.testing.assert_close(rebuilt, keys, atol=4e-4, rtol=0)  # what rounding in distances allows
    layer = HCLayer(book, ALL, keys, keys)
    options = AttentionOptions(1.0)
    expected = causal_attention(torch.ones(1, 1, 1, 1), rebuilt[None], keys[None], options)[0]
    torch.testing.assert_close(layer.attend(torch.ones(1, 1, 1), options), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("permanent", [False, True])
def test_a_copy_is_independent(permanent: bool) -> None:
    book = codebook()
    keys, values = exact_keys(book, 30), numbers(KV_HEADS, 30, DIM, seed=2)
    layer = HCLayer(book, Choice(0.5, True, permanent), keys[:, :28], values[:, :28], room=8)
    attend_in_passes(layer, keys[:, 28:29], values[:, 28:29], numbers(HEADS, 1, DIM), PLAIN)
    cache = Cache([layer], 29)
    twin, before = cache.copy(), cache.fingerprint()
    assert twin.fingerprint() == before
    (held,) = twin.layers
    held.append(keys[:, 29:], values[:, 29:])
    held.attend(numbers(HEADS, 1, DIM, seed=5), PLAIN)
    held.settle()
    for tensor in held.tensors().values():
        tensor.zero_()
    assert cache.fingerprint() == before


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("permanent", [False, True])
def test_an_empty_context_and_a_single_token(n: int, permanent: bool) -> None:
    book = codebook()
    keys, values = exact_keys(book, n + 3), numbers(KV_HEADS, n + 3, DIM, seed=2)
    layer = HCLayer(book, Choice(0.9, True, permanent), keys[:, :n], values[:, :n])
    assert layer.entries == n
    assert Cache([layer], n).nbytes() == n * KV_HEADS * GROUPS * 2
    assert len(Cache([layer.copy()], n).fingerprint()) == 16
    query = numbers(HEADS, 3, DIM, seed=3)
    out = attend_in_passes(layer, keys[:, n:], values[:, n:], query, PLAIN)
    torch.testing.assert_close(
        out, output_by_hand(keys, values, query, PLAIN, layer.choice), atol=1e-5, rtol=1e-4
    )  # the first query of an empty context sees itself alone


def test_rows_give_back_what_was_dropped() -> None:
    rows = Rows(3, torch.float32, torch.device("cpu"), 100)
    rows.append(numbers(90, 3))
    held = rows.filled.clone()
    rows.keep(torch.tensor([5, 80]))
    assert torch.equal(rows.filled, held[[5, 80]])
    assert rows._buffer.shape[0] == 12, "two rows, and the room there was"
    rows.append(numbers(40, 3, seed=1))
    assert torch.equal(rows.filled, torch.cat([held[[5, 80]], numbers(40, 3, seed=1)]))


def test_appending_does_not_copy_what_is_held() -> None:
    book = codebook()
    keys = exact_keys(book, 20)
    layer = HCLayer(book, ALL, keys, keys, room=10)
    before = layer.tensors()["codes"].data_ptr()
    layer.append(keys[:, :10], keys[:, :10])
    assert layer.tensors()["codes"].data_ptr() == before


def test_heads_stored_alone_answer_like_all_together() -> None:
    hc = codec(GROUPS, COUNT, DIM, tau=0.7)
    keys, values, query = numbers(KV_HEADS, 20, DIM), numbers(KV_HEADS, 20, DIM, seed=2), numbers(HEADS, 2, DIM, seed=3)
    together = hc(0, range(2), keys, values, 0)
    alone = HeadsLayer([hc(0, [head], keys[head : head + 1], values[head : head + 1], 0) for head in range(2)])
    for options in OPTIONS.values():
        torch.testing.assert_close(alone.attend(query, options), together.attend(query, options))
    assert Cache([alone], 20).nbytes("host") == Cache([together], 20).nbytes("host")
    swapped = hc(0, [1, 0], keys.flip(0), values.flip(0), 0)
    torch.testing.assert_close(swapped.attend(query.roll(3, 0), PLAIN), together.attend(query, PLAIN).roll(3, 0))


# --- settings


@pytest.mark.parametrize(
    "name, value",
    [
        ("groups", 0), ("groups", 2.0), ("groups", True), ("centroids", 1), ("centroids", 65537), ("tau", 0),
        ("tau", 1.01), ("tau", "0.9"), ("tau", math.nan), ("tau", True), ("lifetime", "per-query"), ("scope", "all"),
        ("renormalise", 1), ("codebook", ""), ("codebook", 3), ("fit", 3), ("fit", None),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        HCAttention(**{name: value})
    assert caught.value.key == f"method.codec.{name}"
    assert caught.value.fix


@pytest.mark.parametrize(
    "name, value",
    [
        ("texts", 0), ("tokens", 0), ("seed", -1), ("seed", 2**32), ("iterations", 1), ("batch_size", 1.5), ("data", 3),
        ("data", "built-in"), ("data", "missing.txt"), ("token", 4),
    ],
)  # fmt: skip
def test_wrong_settings_of_the_fit_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        HCAttention(fit={name: value})  # type: ignore[arg-type]
    assert caught.value.key == f"method.codec.fit.{name}"
    assert caught.value.fix


def test_it_is_made_from_a_configuration() -> None:
    from hydra.utils import instantiate

    config = {"_target_": "kvbench.methods.hcattention.HCAttention", "groups": 64, "tau": 1, "fit": {"texts": 2}}
    hc = instantiate(config)
    assert (hc.label, hc.tau, hc.fit.texts, hc.fit.tokens) == ("hc-g64", 1, 2, 4096)
    assert hash(hc) == hash(HCAttention(groups=64, tau=1, fit=hc.fit))
    with pytest.raises(RuntimeError, match="prepared"):
        hc(0, range(2), numbers(2, 1, 128), numbers(2, 1, 128), 0)
    assert hc.facts()["lifetime"] == "per_query" and "codebook_sha256" not in hc.facts()


# --- a model


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(Engine(tiny_llama(vocab_size=SIZE)), PromptEncoder(build_byte_tokenizer()), "a" * 64)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    return tmp_path


def small(**changes: Any) -> HCAttention:
    fit = {"texts": 2, "tokens": 150, "iterations": 3, "batch_size": 200}
    return HCAttention(**{"groups": 4, "centroids": 64, "fit": fit, **changes})


def compressed(hc: HCAttention, engine: Engine, ids: list[int]) -> Cache:
    capture = engine.prefill(ids)
    layers = [hc(layer.index, range(2), layer.keys, layer.values, 16) for layer in capture.layers]
    return Cache(list(layers), len(ids))


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("lifetime", ["per_query", "permanent"])
def test_a_model_answers(setup: Setup, cache_folder: Path, lifetime: str, scope: str) -> None:
    hc = small(lifetime=lifetime, scope=scope).prepared(setup)
    cache = compressed(hc, setup.engine, text(60, 1))
    before = cache.fingerprint()
    assert before == compressed(hc, setup.engine, text(60, 1)).fingerprint()
    logits = setup.engine.feed(cache, text(7, 2))
    alone = setup.engine.decode([cache.copy()], logits[None], StopRule(frozenset(), 8))
    other = cache.copy()
    together = setup.engine.decode([cache, other], torch.stack([logits, logits]), StopRule(frozenset(), 8))
    assert alone[0].finite and [row.ids for row in together] == [alone[0].ids] * 2
    assert cache.next_position == 60 + 7 + 7
    if lifetime == "per_query":
        assert cache.entries() == 74
    else:
        assert 1 <= cache.entries() < 74
    facts = hc.facts()
    assert facts["codebook_bytes"] == 2 * (2 if scope == "head" else 1) * 64 * 16 * 4
    assert facts["fit_data"] == "generated" and len(facts["fit_data_sha256"]) == 64
    assert len(facts["codebook_sha256"]) == 64 and facts["scope"] == scope and facts["fit"]["tokens"] == 150


def test_a_model_answers_exactly_with_its_own_keys_as_centroids(setup: Setup) -> None:
    """Codebooks that hold every key of the text: with tau = 1 the logits are those of the full cache."""
    ids = text(50, 3)
    capture = setup.engine.prefill(ids)
    books = {layer.index: layer.keys.unflatten(2, (4, 4)).transpose(1, 2).contiguous() for layer in capture.layers}
    hc = HCAttention(groups=4, centroids=50, tau=1.0, books=Codebooks(books, {}))
    for context in (49, 40, 1, 0):
        cache = compressed(hc, setup.engine, ids[:context])
        torch.testing.assert_close(setup.engine.feed(cache, ids[context:]), capture.logits, atol=1e-3, rtol=1e-4)


def test_groups_that_do_not_divide_a_head_are_refused(setup: Setup) -> None:
    with pytest.raises(InputError, match="Allowed: 1, 2, 4, 8, 16") as caught:
        small(groups=3).prepared(setup)
    assert caught.value.key == "method.codec.groups"


# --- CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("permanent", [False, True])
def test_cuda_answers_like_the_cpu(permanent: bool, dtype: torch.dtype) -> None:
    """Values copied to pinned memory while the device goes on, buffers that grow meanwhile, entries dropped."""
    book, choice, total = codebook(), Choice(0.6, True, permanent), 400
    keys, values = exact_keys(book, total).to(dtype), numbers(KV_HEADS, total, DIM, seed=2).to(dtype)
    on_cuda, options = LayerCodebook(book.centroids.cuda()), OPTIONS["both"]
    cuda_options = replace(options, sinks=options.sinks.cuda())  # type: ignore[union-attr]
    plain = HCLayer(book, choice, keys[:, :300], values[:, :300])
    layer = HCLayer(on_cuda, choice, keys[:, :300].cuda(), values[:, :300].cuda())
    n = 300
    for q in (5, *[1] * 90, 5):
        if n == 340:
            layer = layer.copy()
        query = (2 * numbers(HEADS, q, DIM, seed=n)).to(dtype)
        new = slice(n, n + q)
        out = attend_in_passes(layer, keys[:, new].cuda(), values[:, new].cuda(), query.cuda(), cuda_options)
        expected = attend_in_passes(plain, keys[:, new], values[:, new], query, options)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
        n += q
    held, reference = layer.tensors(), plain.tensors()
    assert held["codes"].is_cuda and held["host_values"].is_pinned()
    assert held.keys() == reference.keys() and all(torch.equal(held[name].cpu(), reference[name]) for name in held)
    assert (layer.entries < total) == permanent


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_cuda_answers_like_on_the_cpu(cache_folder: Path) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        setup = Setup(Engine(tiny_llama(vocab_size=SIZE).to(device)), PromptEncoder(build_byte_tokenizer()), "a" * 64)
        hc = small().prepared(setup)
        cache = compressed(hc, setup.engine, text(60, 1))
        logits = setup.engine.feed(cache, text(7, 2))
        (row,) = setup.engine.decode([cache], logits[None], StopRule(frozenset(), 8))
        answers.append(row.ids)
        assert cache.nbytes() == 2 * KV_HEADS * 74 * 4 * 2 and len(cache.fingerprint()) == 16
    assert answers[0] == answers[1]
