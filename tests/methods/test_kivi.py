"""KIVI: the quantiser by hand, the cache against a slow twin, and a model that answers through it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine import Cache, Engine
from kvbench.engine.attention import AttentionOptions
from kvbench.errors import InputError
from kvbench.methods import kivi
from kvbench.methods.kivi import Kivi, KiviLayer, dequantise, pack, quantise, unpack
from kvbench.methods.setup import LayerShape
from tests.cells import text
from tests.conftest import tiny_llama
from tests.golden.kivi_cases import kivi_cache, kivi_quant

SMALL = Kivi(group=16, residual=32)  # fits 16 channels: at 2 bits a group is one word
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def entries(
    tokens: int, heads: int = 2, dim: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[heads, tokens, dim] with two channels far larger than the others, as real keys have."""
    numbers = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    numbers[..., :2] *= 8
    return numbers.to(dtype)


def fill(codec: Kivi, keys: torch.Tensor, values: torch.Tensor, pieces: list[int], room: int = 0) -> KiviLayer:
    """The layer after a prefill of ``pieces[0]`` tokens and one pass for every further piece."""
    layer = KiviLayer(keys[:, : pieces[0]], values[:, : pieces[0]], codec, room)
    at = pieces[0]
    for piece in pieces[1:]:
        layer.append(keys[:, at : at + piece], values[:, at : at + piece])
        layer.settle()
        at += piece
    return layer


def same(a: KiviLayer, b: KiviLayer) -> bool:
    return all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())


# the quantiser


def test_codes_of_a_group_by_hand() -> None:
    """Zero point 10, scale 2: codes 0..3; the first in the lowest bits; the last, 3, sets the sign bit."""
    codes = [0, 1, 2, 3, 3, 3, 0, 0, 1, 1, 2, 2, 0, 1, 2, 3]
    words, scale, zero = quantise(torch.tensor([10.0 + 2 * code for code in codes]), bits=2, group=16)
    assert scale.tolist() == [2.0] and zero.tolist() == [10.0]
    as_unsigned = sum(code << 2 * at for at, code in enumerate(codes))
    assert words.dtype == torch.int32 and words.tolist() == [as_unsigned - 2**32]
    assert dequantise(words, scale, zero, 2, 16).tolist() == [10.0 + 2 * code for code in codes]


def test_codes_are_rounded_half_to_even() -> None:
    numbers = torch.tensor([0.0, 3.0, 0.5, 1.5, 2.5, 0.49, 0.51, 2.51] * 2)  # zero point 0, scale 1
    words, _, _ = quantise(numbers, bits=2, group=16)
    assert unpack(words, 2).tolist() == [0, 3, 0, 2, 2, 0, 1, 3] * 2


@given(bits=st.sampled_from([2, 4, 8]), words=st.integers(0, 5), seed=st.integers(0, 1000))
def test_packing_keeps_every_code(bits: int, words: int, seed: int) -> None:
    shape = (2, words * 32 // bits)
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.shape == (2, words) and packed.dtype == torch.int32
    assert torch.equal(unpack(packed, bits), codes.int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, 0.1, -1000.0])
def test_a_group_of_equal_numbers_is_that_number(dtype: torch.dtype, constant: float) -> None:
    numbers = torch.full((3, 32), constant, dtype=dtype)
    words, scale, zero = quantise(numbers, 2, 16)
    assert not words.any() and not scale.any(), "0 / 0 is no code"
    assert torch.equal(dequantise(words, scale, zero, 2, 16).to(dtype), numbers)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_half_precision_is_quantised_in_half_precision(bits: int) -> None:
    """Every step rounds to fp16, as numpy does; fp32 in between would give some other codes."""
    numbers = entries(512, 4, dtype=torch.float16).flatten()

    def codes(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        groups = exact.reshape(-1, 32)
        zero = groups.min(1)
        scale = (groups.max(1) - zero) / exact.dtype.type(2**bits - 1)
        return np.rint(((groups - zero[:, None]) / scale[:, None]).clip(0, 2**bits - 1)).reshape(-1), scale, zero

    words, scale, zero = quantise(numbers, bits, 32)
    expected, expected_scale, expected_zero = codes(numbers.numpy())
    assert expected_scale.dtype == np.float16 and scale.dtype == torch.float16
    assert (scale.numpy() == expected_scale).all() and (zero.numpy() == expected_zero).all()
    assert (unpack(words, bits).numpy() == expected).all()
    assert (codes(numbers.float().numpy())[0] != expected).any(), "the data would not show the difference"


# what is held


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 3),
    pieces=st.lists(st.integers(0, 75), min_size=1, max_size=6),
    room=st.sampled_from([0, 1, 40, 500]),
    key_bits=st.sampled_from([2, 4, 8]),
    value_bits=st.sampled_from([2, 4, 8]),
)
def test_counts_and_contents_depend_on_the_tokens_alone(
    blocks: int, pieces: list[int], room: int, key_bits: int, value_bits: int
) -> None:
    """t mod R keys and min(t, R) values at full precision after every pass; the same bits however the tokens came."""
    codec, total = Kivi(key_bits, value_bits, 16, 16 * blocks), sum(pieces)
    keys, values = entries(total, seed=1), entries(total, dim=32, seed=2)
    layer, t = fill(codec, keys, values, [0], room), 0
    for piece in pieces:
        layer.append(keys[:, t : t + piece], values[:, t : t + piece])
        layer.settle()
        t += piece
        held = layer.tensors()
        full_keys, full_values = t % codec.residual, min(t, codec.residual)
        assert held["full_keys"].shape == (2, full_keys, 16)
        assert held["full_values"].shape == (2, full_values, 32)
        assert held["key_codes"].shape == (2, 16, (t - full_keys) * key_bits // 32)
        assert held["key_scale"].shape == held["key_zero"].shape == (2, 16, (t - full_keys) // 16)
        assert held["value_codes"].shape == (2, t - full_values, 32 * value_bits // 32)
        assert held["value_scale"].shape == held["value_zero"].shape == (2, t - full_values, 2)
        assert layer.entries == t
    assert same(layer, fill(codec, keys, values, [total]))


def test_one_token_at_a_time_leaves_the_bits_of_all_at_once() -> None:
    keys, values = entries(100, seed=1), entries(100, seed=2)
    assert same(fill(SMALL, keys, values, [1] * 100), fill(SMALL, keys, values, [100]))
    assert same(fill(SMALL, keys, values, [40, *[1] * 60]), fill(SMALL, keys, values, [33, 67]))


def test_bytes_by_hand() -> None:
    """256 tokens, one head of 64 fp16 channels, G = 32, R = 128, 2 bits: 25,600 of 65,536 bytes.

    keys: 256 * 64 codes of 2 bits (4,096 bytes), 64 channels * 8 groups * (scale + zero) * 2 bytes (2,048), none full;
    values: 128 * 64 codes (2,048), 128 tokens * 2 groups * 2 * 2 bytes (1,024), 128 * 64 * 2 bytes full (16,384).
    """
    keys = values = entries(256, 1, 64, dtype=torch.float16)
    layer = Kivi()(0, range(1), keys, values, room=1000)
    assert Cache([layer], 256).nbytes() == 4096 + 2048 + 2048 + 1024 + 16384
    for query_heads in (1, 8):  # nothing is repeated for grouped queries, nothing unpacked stays
        layer.attend(entries(1, query_heads, 64, dtype=torch.float16), AttentionOptions(0.125))
    assert Cache([layer], 256).nbytes() == 25600
    layer.append(keys[:, :1], values[:, :1])
    layer.settle()
    # one more key at full precision; one more value in codes (16 bytes) with two scales and two zero points (8)
    assert Cache([layer], 257).nbytes() == 25600 + 128 + 16 + 8


def test_packed_entries_are_not_copied_while_there_is_room() -> None:
    keys, values = entries(200, seed=1), entries(200, seed=2)
    layer = fill(SMALL, keys, values, [64], room=136)
    packed = [name for name in layer.tensors() if not name.startswith("full_")]
    before = {name: layer.tensors()[name].data_ptr() for name in packed}
    for at in range(64, 200):
        layer.append(keys[:, at : at + 1], values[:, at : at + 1])
        layer.settle()
    assert {name: layer.tensors()[name].data_ptr() for name in packed} == before
    beyond = fill(SMALL, keys, values, [64, *[1] * 136], room=0)
    assert same(layer, beyond), "without room buffers grow, and hold the same"


def test_a_layer_does_not_keep_the_captured_entries_alive() -> None:
    keys, values = entries(100, seed=1), entries(100, seed=2)
    held = fill(SMALL, keys, values, [100]).tensors()
    assert held["full_keys"].untyped_storage().nbytes() == 2 * 4 * 16 * 4
    before = {name: tensor.clone() for name, tensor in held.items()}
    keys.zero_()
    values.zero_()
    assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())


# attention


def slow_attention(codec: Kivi, packed_from: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):  # type: ignore[no-untyped-def]
    """Attention of the last q tokens where the cache was settled after ``packed_from`` tokens, written out in fp32."""

    def rounded(numbers: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
        out = numbers.clone()
        for start in range(0, numbers.shape[axis], codec.group):
            part = numbers.narrow(axis, start, codec.group)
            low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
            scale = (high - low) / (2**bits - 1)
            out.narrow(axis, start, codec.group).copy_((part - low).div(scale).round() * scale + low)
        return out

    old_keys = packed_from // codec.residual * codec.residual
    old_values = max(0, packed_from - codec.residual)
    keys, values = keys.clone(), values.clone()
    keys[:, :old_keys] = rounded(keys[:, :old_keys], codec.key_bits, 1)
    values[:, :old_values] = rounded(values[:, :old_values], codec.value_bits, 2)
    repeat = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    scores = query @ keys.mT * query.shape[-1] ** -0.5
    q, t = scores.shape[1:]
    future = torch.arange(t) > torch.arange(t - q, t)[:, None]
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize("codec", [SMALL, Kivi(4, 2, 16, 16), Kivi(8, 4, 16, 48)], ids=lambda codec: codec.label)
@pytest.mark.parametrize("prompt", [0, 1, 5, 31, 32, 33, 64, 70])
def test_a_pass_sees_what_was_packed_before_it_and_its_own_tokens_at_full_precision(codec: Kivi, prompt: int) -> None:
    """Re-quantising comes after attention, for one new token and for several; query heads share KV heads (2 to 1)."""
    pieces = [1, 1, 3, 40, 1, 1, 20, *[1] * 20]
    total = prompt + sum(pieces)
    query, keys, values = entries(total, 4, seed=3) / 8, entries(total, seed=1), entries(total, seed=2)
    layer = codec(0, range(2), keys[:, :prompt], values[:, :prompt], room=sum(pieces))
    t = prompt
    for piece in pieces:
        new = slice(t, t + piece)
        layer.append(keys[:, new], values[:, new])
        seen = layer.attend(query[:, new], AttentionOptions(16**-0.5))
        expected = slow_attention(codec, t, query[:, new], keys[:, : t + piece], values[:, : t + piece])
        assert torch.allclose(seen, expected, atol=2e-5)
        layer.settle()
        t += piece


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [0, 1, 5, 127, 128, 129, 256])
def test_every_length_and_dtype(dtype: torch.dtype, prompt: int) -> None:
    keys, values = entries(prompt + 6, seed=1, dtype=dtype), entries(prompt + 6, dim=64, seed=2, dtype=dtype)
    layer = Kivi()(0, range(2), keys[:, :prompt], values[:, :prompt], room=0)
    layer.append(keys[:, prompt:], values[:, prompt:])
    out = layer.attend(entries(6, 4, seed=3, dtype=dtype), AttentionOptions(0.25))
    layer.settle()
    assert out.shape == (4, 6, 64) and out.dtype == dtype and torch.isfinite(out).all()
    numbers = {name: tensor.dtype for name, tensor in layer.tensors().items()}
    assert {name for name, held in numbers.items() if held == torch.int32} == {"key_codes", "value_codes"}
    assert {held for name, held in numbers.items() if not name.endswith("_codes")} == {dtype}
    assert Cache([layer], prompt + 6).fingerprint() == Cache([layer.copy()], prompt + 6).fingerprint()


def test_the_error_falls_with_the_bits() -> None:
    """2, 4, 8 bits: a step is 3, 15, 255 parts of a group's range, so attention gets about that much closer."""
    keys, values, query = entries(256, seed=1), entries(256, seed=2), entries(1, 4, seed=3)
    errors = []
    for bits in (2, 4, 8):
        codec = Kivi(bits, bits, 16, 32)
        layer = fill(codec, keys, values, [255])
        layer.append(keys[:, 255:], values[:, 255:])
        exact = slow_attention(codec, 0, query, keys, values)
        errors.append(float((layer.attend(query, AttentionOptions(0.25)) - exact).norm() / exact.norm()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 0.01


def test_working_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, query = entries(200, seed=1), entries(200, dim=32, seed=2), entries(1, 4, seed=3)
    at_once = fill(SMALL, keys, values, [200])
    monkeypatch.setattr(kivi, "AT_ONCE", 1)
    piecewise = fill(SMALL, keys, values, [200])
    assert piecewise._keys.step == SMALL.residual, "the setting is not read"
    assert same(at_once, piecewise)
    options = AttentionOptions(0.25)
    assert torch.equal(at_once.attend(query, options), piecewise.attend(query, options))


# copies, and a model that answers through the cache


def test_a_copy_and_its_original_do_not_see_each_other() -> None:
    keys, values = entries(150, seed=1), entries(150, seed=2)
    layer = fill(SMALL, keys, values, [50], room=100)
    twin = layer.copy()
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    twin.append(keys[:, 50:], values[:, 50:])
    twin.settle()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors().items())
    layer.append(-keys[:, 50:], -values[:, 50:])
    layer.settle()
    assert same(twin, fill(SMALL, keys, values, [150]))


def stored(engine: Engine, context: list[int], codec: Kivi, room: int = 64) -> Cache:
    capture = engine.prefill(context)
    layers = [codec(at.index, range(at.keys.shape[0]), at.keys, at.values, room) for at in capture.layers]
    return Cache(list(layers), capture.tokens)


@pytest.mark.parametrize("tokens", [0, 20, 32, 70])
def test_a_second_question_does_not_see_the_first(llama: torch.nn.Module, tokens: int) -> None:
    """The full-precision entries must not keep the first question and its answer."""
    engine, context = Engine(llama), text(tokens, 1)
    first, second = text(40, 2), text(7, 3)
    cache = stored(engine, context, SMALL)
    fingerprint = cache.fingerprint()
    for question in (first, second, first):
        asked, fresh = cache.copy(), stored(engine, context, SMALL)
        for ids in (question, [5], [6]):
            assert torch.equal(engine.feed(asked, ids), engine.feed(fresh, ids))
        assert asked.fingerprint() == fresh.fingerprint() != fingerprint
    assert cache.fingerprint() == fingerprint


def test_a_prompt_within_the_residual_is_answered_as_by_the_full_cache(llama: torch.nn.Module) -> None:
    """GQA and a prompt shorter than R: nothing is quantised yet."""
    engine, ids = Engine(llama), text(30, 4)
    cache = stored(engine, ids[:20], SMALL)
    seen = torch.stack([engine.feed(cache, [token]) for token in ids[20:]])
    assert torch.allclose(seen, engine.all_logits(ids)[20:], atol=1e-4)


def test_logits_with_8_bits_are_closer_than_with_2(llama: torch.nn.Module) -> None:
    engine, ids = Engine(llama), text(100, 4)
    expected = engine.all_logits(ids)[-1]
    errors = []
    for bits in (2, 8):
        cache = stored(engine, ids[:99], Kivi(bits, bits, 16, 32))
        errors.append(float((engine.feed(cache, ids[99:]) - expected).norm() / expected.norm()))
    assert errors[1] < 0.02 < errors[0]


# settings


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"key_bits": 3}, "method.codec.key_bits", "2, 4 or 8"),
        ({"value_bits": 16}, "method.codec.value_bits", "2, 4 or 8"),
        ({"value_bits": True}, "method.codec.value_bits", "whole number"),
        ({"group": 0}, "method.codec.group", "multiple of 16"),
        ({"group": 8}, "method.codec.group", "multiple of 16"),
        ({"group": 4, "key_bits": 8, "value_bits": 4}, "method.codec.group", "multiple of 8"),
        ({"group": 32.0}, "method.codec.group", "whole number"),
        ({"residual": 0}, "method.codec.residual", "such as 32"),
        ({"residual": 100}, "method.codec.residual", "such as 96"),
        ({"residual": "128"}, "method.codec.residual", "whole number"),
    ],
)
def test_wrong_settings_say_what_to_write(changes: dict, key: str, fix: str) -> None:
    with pytest.raises(InputError, match=fix) as raised:
        Kivi(**changes)
    assert raised.value.key == key


def test_values_must_be_whole_groups_of_channels() -> None:
    def model(*dims: int, sliding: int = 32) -> Any:
        layers = [LayerShape(2, 8, dim, False) for dim in dims]
        return SimpleNamespace(layers=(*layers, LayerShape(2, 8, sliding, True)))

    assert Kivi().prepared(model(64, 128)) == Kivi()
    assert Kivi().prepared(model(64, sliding=80)) == Kivi(), "sliding layers are not compressed"
    with pytest.raises(InputError, match=r"80 channels.*method\.codec\.group=16\.") as raised:
        Kivi().prepared(model(80))
    assert (raised.value.key, raised.value.value) == ("method.codec.group", 32)
    with pytest.raises(InputError, match="=8 or 16"):
        Kivi(4, 8, residual=64).prepared(model(64, 80))
    with pytest.raises(InputError, match=r"raise method\.codec\.key_bits"):
        Kivi().prepared(model(8))


def test_labels() -> None:
    assert [codec.label for codec in (Kivi(), Kivi(4, 4), Kivi(4, 2))] == ["kivi2", "kivi4", "kivi-k4v2"]


# the checker of reference vectors


def made_case() -> tuple[dict, dict[str, torch.Tensor]]:
    """A case as reference vectors have it, of our own making: 40 tokens and 30 steps, group and residual of 16."""
    query, keys, values = entries(70, 4, seed=3) / 8, entries(70, seed=1), entries(70, seed=2)
    codec, rows, lengths = Kivi(4, 2, 16, 16), [], []
    layer = fill(codec, keys, values, [40])
    prefill = slow_attention(codec, 0, query[:, :40], keys[:, :40], values[:, :40]).transpose(0, 1).flatten(1)
    for t in range(40, 71):
        lengths.append([t // 16 * 16, t % 16, t - 16, 16])
        if t < 70:
            out = slow_attention(codec, t, query[:, t : t + 1], keys[:, : t + 1], values[:, : t + 1])
            rows.append(out.transpose(0, 1).flatten(1))
            layer.append(keys[:, t : t + 1], values[:, t : t + 1])
            layer.settle()
    held = layer.tensors()
    tensors = {"q": query, "k": keys, "v": values, "attn_out": torch.cat([prefill, *rows])}
    for kind, letter, bits in (("key", "k", 4), ("value", "v", 2)):
        words, scale, zero = (held[f"{kind}_{name}"].clone() for name in ("codes", "scale", "zero"))
        numbers = dequantise(words, scale, zero, bits, 16)
        tensors |= {f"{letter}_packed": words, f"{letter}_scale": scale, f"{letter}_zero": zero}
        tensors[f"{letter}_dequant"] = numbers.mT if kind == "key" else numbers
    params = {"k_bits": 4, "v_bits": 2, "group_size": 16, "residual_length": 16, "prefill": 40, "steps": 30}
    return {"params": params}, {**{n: x[None] for n, x in tensors.items()}, "lengths": torch.tensor(lengths)}


def test_the_checker_sees_what_is_wrong() -> None:
    """A checker that cannot fail proves nothing."""
    case, tensors = made_case()
    assert kivi_cache(case, tensors) is None
    for name in ("attn_out", "lengths", "k_packed", "v_packed", "k_scale", "v_zero", "k_dequant", "v_dequant"):
        wrong = tensors[name].clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[-1] += 1
        assert kivi_cache(case, {**tensors, name: wrong}) is not None, name


def test_the_checker_of_the_quantiser_sees_what_is_wrong() -> None:
    numbers = entries(64, 2, seed=5)[None]
    numbers[..., 3] = 0.5  # a channel whose groups are constant: its codes mean nothing
    words, scale, zero = quantise(numbers.mT, 2, 32)
    tensors = {"x": numbers, "packed": words, "scale": scale, "zero": zero, "codes": unpack(words, 2).mT.byte()}
    tensors["dequant"] = dequantise(words, scale, zero, 2, 32).mT
    case = {"params": {"kind": "key", "bits": 2, "group_size": 32}}
    meaningless = words.clone()
    meaningless[:, :, 3] = -1
    assert kivi_quant(case, {**tensors, "packed": meaningless}) is None
    for name in ("packed", "scale", "zero", "codes", "dequant"):
        wrong = tensors[name].clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[-1] += 1
        assert kivi_quant(case, {**tensors, name: wrong}) is not None, name


def test_another_model_head_size() -> None:
    """16 channels with groups of 16, in a model of more KV heads, through the engine."""
    engine = Engine(tiny_llama(num_key_value_heads=4))
    cache = stored(engine, text(50, 1), Kivi(4, 4, 16, 16))
    assert torch.isfinite(engine.feed(cache, text(5, 2))).all()
    assert cache.entries() == 55
