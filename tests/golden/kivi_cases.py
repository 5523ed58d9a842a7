"""KIVI against the reference vectors of its original code: quantiser, packer and cache, as the product runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvbench.engine.attention import AttentionOptions, causal_attention
from kvbench.engine.cache import LayerCache
from kvbench.methods.kivi import WORD, Kivi, dequantise, quantise, unpack

Tensors = dict[str, torch.Tensor]
Case = dict[str, Any]
NOT_COVERED = "not covered"
ATTENTION_ATOL = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def kivi_quant(case: Case, tensors: Tensors) -> str | None:
    """The quantiser alone, on x [1, H, T, d]."""
    params = case["params"]
    bits, group, turned = params["bits"], params["group_size"], params["kind"] == "key"
    numbers = tensors["x"].mT if turned else tensors["x"]
    found = quantise(numbers, bits, group)
    expected = tensors["packed"], tensors["scale"], tensors["zero"]
    fault = wrong_groups(found, expected, bits, group)
    if fault:
        return fault
    varied = varies(tensors["scale"], group)
    codes = tensors["codes"].mT if turned else tensors["codes"]
    if (unpack(found[0], bits) != codes)[varied].any():
        return "codes do not unpack in the order of the input"
    dequantised = dequantise(*found, bits, group)
    return differs("dequantised numbers", dequantised.mT if turned else dequantised, tensors["dequant"])


def kivi_cache(case: Case, tensors: Tensors) -> str | None:
    """A prefill, then decode steps, one sequence of the batch after the other."""
    params = case["params"]
    group = params["group_size"]
    if any(group * params[bits] % WORD for bits in ("k_bits", "v_bits")):
        return NOT_COVERED  # kvbench wants groups that fill words
    codec = Kivi(params["k_bits"], params["v_bits"], group, params["residual_length"])
    batch = tensors["q"].shape[0]
    for row in range(batch):
        fault = wrong_sequence(codec, {**tensors, **{n: tensors[n][row] for n in tensors if n != "lengths"}}, params)
        if fault:
            return fault
    return None


def wrong_sequence(codec: Kivi, tensors: Tensors, params: dict[str, Any]) -> str | None:
    """The first thing wrong with one sequence: q [Hq, T, d], k and v [Hkv, T, d], attn_out [T, Hq * d]."""
    query, keys, values = tensors["q"], tensors["k"], tensors["v"]
    prefill, steps = params["prefill"], params["steps"]
    options = AttentionOptions(query.shape[-1] ** -0.5)
    first = causal_attention(query[None, :, :prefill], keys[None, :, :prefill], values[None, :, :prefill], options)[0]
    fault = wrong_attention("prefill", first, tensors["attn_out"][:prefill])
    layer = codec(0, range(keys.shape[0]), keys[:, :prefill], values[:, :prefill], room=steps)
    fault = fault or wrong_lengths("prefill", layer, codec, tensors["lengths"][0])
    for step in range(steps):
        at = slice(prefill + step, prefill + step + 1)
        layer.append(keys[:, at], values[:, at])
        out = layer.attend(query[:, at], options)
        layer.settle()
        fault = fault or wrong_attention(f"step {step + 1}", out, tensors["attn_out"][at])
        fault = fault or wrong_lengths(f"step {step + 1}", layer, codec, tensors["lengths"][step + 1])
    return fault or wrong_storage(layer, codec, tensors)


def wrong_attention(when: str, out: torch.Tensor, expected: torch.Tensor) -> str | None:
    """out [Hq, q, d], expected [q, Hq * d]."""
    difference = (out.transpose(0, 1).flatten(1).float() - expected.float()).abs()
    if not bool((difference <= ATTENTION_ATOL[expected.dtype]).all()):  # NaN is not <= anything
        return f"{when}: attention differs by up to {difference.max():.2e}"
    return None


def wrong_lengths(when: str, layer: LayerCache, codec: Kivi, expected: torch.Tensor) -> str | None:
    """Packed keys, full-precision keys, packed values, full-precision values."""
    held = layer.tensors()
    packed_keys = held["key_codes"].shape[2] * WORD // codec.key_bits
    found = [packed_keys, held["full_keys"].shape[1], held["value_codes"].shape[1], held["full_values"].shape[1]]
    return None if found == expected.tolist() else f"{when}: holds {found} instead of {expected.tolist()}"


def wrong_storage(layer: LayerCache, codec: Kivi, tensors: Tensors) -> str | None:
    """What is stored at the end: codes, scales, zero points, what they are read as, and the newest entries."""
    held = layer.tensors()
    for kind, letter, bits in (("key", "k", codec.key_bits), ("value", "v", codec.value_bits)):
        found = held[f"{kind}_codes"], held[f"{kind}_scale"], held[f"{kind}_zero"]
        numbers = dequantise(*found, bits, codec.group)
        fault = differs(f"dequantised {kind}s", numbers.mT if kind == "key" else numbers, tensors[f"{letter}_dequant"])
        if numbers.numel():  # a case need not store what is empty
            expected = tensors[f"{letter}_packed"], tensors[f"{letter}_scale"], tensors[f"{letter}_zero"]
            fault = fault or wrong_groups(found, expected, bits, codec.group)
        newest = held[f"full_{kind}s"]
        if not torch.equal(newest, tensors[letter][:, tensors[letter].shape[1] - newest.shape[1] :]):
            fault = fault or f"the full-precision {kind}s are not those of the newest tokens"
        if fault:
            return f"{kind}: {fault}"
    return None


def wrong_groups(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], bits: int, group: int
) -> str | None:
    """Codes are compared bit for bit, except where all numbers of a group are equal: there the reference has none."""
    words, scale, zero = found
    if words.shape != expected[0].shape or words.dtype != torch.int32:
        return f"packed codes are {words.dtype} {tuple(words.shape)} instead of int32 {tuple(expected[0].shape)}"
    fault = differs("scales", scale, expected[1]) or differs("zero points", zero, expected[2])
    if fault:
        return fault
    per_word = WORD // bits
    varied = varies(expected[1], group)
    full = varied.unflatten(-1, (varied.shape[-1] // per_word, per_word)).all(-1)  # words without such a group
    if (words != expected[0])[full].any():
        different = (unpack(words, bits) != unpack(expected[0], bits)) & varied
        return f"{int(different.sum())} of {different.numel()} codes differ"
    return None


def varies(scale: torch.Tensor, group: int) -> torch.Tensor:
    """Bool [..., n] from scales [..., n / group]: does a number's group hold unequal numbers?"""
    return (scale != 0).repeat_interleave(group, dim=-1)


def differs(what: str, found: torch.Tensor, expected: torch.Tensor) -> str | None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{what} are {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not torch.allclose(found.float(), expected.float(), rtol=1e-6, atol=1e-6):
        return f"{what} differ by up to {(found.float() - expected.float()).abs().max():.2e}"
    return None


CHECKS: dict[str, Callable[[Case, Tensors], str | None]] = {"kivi_quant": kivi_quant, "kivi_cache": kivi_cache}
