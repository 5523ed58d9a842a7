"""Checks kvbench's methods against reference vectors of the methods' original code.

    python tests/golden/check.py FOLDER

FOLDER holds ``manifest.json`` and the ``.safetensors`` files that it names. Every case whose method and variant kvbench
has runs through the product's own scorers, allocators, selection and codecs. Prints a line for each failure and a last
line ``N passed, M failed, K not covered``; exit code 1 if any failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvbench.engine import Capture
from kvbench.engine.attention import AttentionOptions
from kvbench.methods import Method, Protect, Region
from kvbench.methods.allocators import Adaptive, Allocator, PerHead, Pyramid
from kvbench.methods.codecs import Plain
from kvbench.methods.decode import HeavyHitters
from kvbench.methods.evicting import EvictingLayer
from kvbench.methods.scorers import ColumnSums, KeyNorm, Random, Recency, Scorer, SnapKV, Tova

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.golden import kivi_cases, neighbour_cases, streaming_cases
from tests.golden.choices import Case, Tensors, capture_of, check, compress
from tests.golden.rotary import rope, rotated


def snapkv(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    if params.get("gqa_mode") == "query_head":
        return NOT_COVERED  # stores one cache per query head; kvbench stores per KV head
    window = params["window_size"]
    pooling = {"avgpool": "avg", "maxpool": "max"}[params.get("pooling", "avgpool")]
    scorer = SnapKV(window, params["kernel_size"], pooling, params.get("gqa_score_agg") or "mean")
    budget = params.get("max_capacity_prompt", params["n_kept"])
    if budget < window:
        return NOT_COVERED  # the reference keeps an arbitrary part of its window there
    return check(scorer, Protect(0, window), case, tensors, budget)


def knorm(case: Case, tensors: Tensors) -> str | None:
    return check(KeyNorm(), Protect(), case, tensors, case["params"]["n_kept"])


def l2norm(case: Case, tensors: Tensors) -> str | None:
    if case["params"]["layer_idx"] in case["params"]["skip_layers"]:
        return NOT_COVERED  # kvbench leaves no layer uncompressed
    return check(KeyNorm(), Protect(), case, tensors, case["params"]["max_capacity_prompt"])


def tova(case: Case, tensors: Tensors) -> str | None:
    return check(Tova(), Protect(0, 1), case, without_last_score(tensors), case["params"]["n_kept"])


def without_last_score(tensors: Tensors) -> Tensors:
    """The reference gives the newest token a score of its own making; kvbench protects it by index."""
    return {**tensors, "scores": tensors["scores"][..., :-1]}


def streamingllm(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    budget = params.get("max_capacity_prompt", params.get("n_kept"))
    flat = {name: tensor for name, tensor in tensors.items() if name != "scores"}  # there 0 and 1, not an order
    return check(Recency(), Protect(params["n_sink"], 0), case, flat, budget)


def random(case: Case, tensors: Tensors) -> str | None:
    """Another generator: only the count and the independence of heads can be compared."""
    compressed = compress(Random(seed=0), Protect(), capture_of(tensors, 0, 0), case["params"]["n_kept"])
    kept = torch.stack(list(compressed.positions[0]))
    if kept.shape != tensors["kept"][0].shape:
        return f"keeps {tuple(kept.shape)} entries instead of {tuple(tensors['kept'][0].shape)}"
    return None if not torch.equal(kept[0], kept[1]) else "two heads keep the same entries"


def key_rotation(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    kept = tensors["kept"][0]
    keys = tensors["k"][0].gather(1, kept[:, :, None].expand(-1, -1, params["head_dim"]))
    moved = rope(params).turn(keys, torch.arange(kept.shape[1]) - kept)
    difference = (moved - tensors["k_out"][0]).abs().max()
    return None if difference < 1e-5 else f"re-rotated keys differ by up to {difference:.2e}"


def h2o_prefill(case: Case, tensors: Tensors) -> str | None:
    """KVCache-Factory's one-shot variant: column sums, a recent window, one choice."""
    params = case["params"]
    if params["gqa_mode"] == "query_head":
        return NOT_COVERED
    scorer = ColumnSums(params.get("gqa_score_agg") or "mean")
    return check(scorer, Protect(0, params["window_size"]), case, tensors, params["max_capacity_prompt"])


def observed_attention(case: Case, tensors: Tensors) -> str | None:
    return check(ColumnSums("mean", normalise=True), Protect(), case, tensors, case["params"]["n_kept"])


def h2o_decode(case: Case, tensors: Tensors) -> str | None:
    """The original's real eviction, chunk by chunk, through the layer that decoding uses."""
    params = case["params"]
    if "q" not in tensors:
        return NOT_COVERED  # its cache class alone on given fp16 weights; kvbench accumulates in fp32
    if params["rope"] != "none":
        tensors = {**tensors, **rotated(tensors, params)}
    q, k, v = (tensors[name][0] for name in "qkv")
    limit, recent = params["cache_size"], params["recent_size"]
    options = AttentionOptions(scaling=params["head_dim"] ** -0.5)
    rotation = rope(params) if params["rope"] == "cache" else None
    empty = k[:, :0], v[:, :0]
    carried = torch.zeros(k.shape[0], 0)
    layer = EvictingLayer(*empty, HeavyHitters(), limit, Protect(0, recent), carried, rotation)
    start = 0
    for at, chunk in enumerate(params["chunks"]):
        stop = start + chunk
        layer.append(k[:, start:stop], v[:, start:stop])
        out = layer.attend(q[:, start:stop], options).transpose(0, 1).flatten(1)
        layer.settle()
        if not torch.allclose(out, tensors["attn_out"][0, start:stop], atol=2e-5):
            return f"chunk {at}: attention differs"
        count = int(tensors["cache_len"][at])
        expected = tensors["kept"][at][:, :count]
        if layer.length != count:
            return f"chunk {at}: {layer.length} entries instead of {count}"
        if not torch.equal(layer.keys, k.gather(1, expected[:, :, None].expand(-1, -1, k.shape[2]))):
            return f"chunk {at}: other entries are kept"
        if not torch.allclose(layer.tensors()["scores"], tensors["hh_score"][at][:, :count], rtol=1e-4, atol=1e-5):
            return f"chunk {at}: scores differ"
        start = stop
    return None


def pyramidkv(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    if case["variant"] == "budget_table":
        for row, kept in zip(tensors["params"].tolist(), tensors["kept_per_layer"].tolist(), strict=True):
            layers, capacity, window, beta, tokens = row
            scores = [torch.zeros(1, tokens)] * layers
            found = [int(count) for count in Pyramid(window, beta, "reference")(capacity, scores)]
            if found != kept[:layers]:
                return f"{row}: {found[:4]}... instead of {kept[:4]}..."
        return None
    if not case["variant"].startswith("per_layer_selection") or params["gqa_mode"] == "query_head":
        return NOT_COVERED  # kvpress's own steps
    pooling = {"avgpool": "avg", "maxpool": "max"}[params["pooling"]]
    window = params["window_size"]
    scorer = SnapKV(window, params["kernel_size"], pooling, params["gqa_score_agg"] or "mean")
    layers = [capture_of({n: tensors[n][i][None] for n in "qk"}, 0, window).layers[0] for i in range(len(tensors["k"]))]
    capture = Capture(tuple(replace(layer, index=i) for i, layer in enumerate(layers)), layers[0].tokens, None)
    method = Method("golden", scorer, Pyramid(window, params["beta"], "reference"), Protect(0, window), Plain())
    tokens = capture.tokens
    compressed = method.compress(capture, Region(tokens, tokens), min(params["max_capacity_prompt"], tokens), room=0)
    for index, expected in enumerate(tensors["kept"]):
        expected = expected[:, : int(tensors["kept_len"][index])].sort(-1).values
        if not torch.equal(torch.stack(list(compressed.positions[index])), expected):
            return f"layer {index} keeps other positions than the reference"
    return None


def adakv(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    if case["variant"].startswith("kvpress"):
        return adakv_press(case, tensors)
    window = params["window_size"]
    pooling = {"avgpool": "avg", "maxpool": "max"}[params["pooling"]]
    scorer = SnapKV(window, params["kernel_size"], pooling, params.get("gqa_score_agg") or "mean")
    allocator = Adaptive(window, params["floor"], params["normalize"], "reference")
    return ragged(scorer, allocator, window, case, tensors, params["max_capacity_prompt"])


def headkv(case: Case, tensors: Tensors) -> str | None:
    params = case["params"]
    window = params["window_size"]
    counts = [count + window for count in params["head_capacity"]]
    if sum(counts) % len(counts):
        return NOT_COVERED  # kvbench's shares are of a whole budget per head
    scorer = SnapKV(window, params["kernel_size"], {"avgpool": "avg", "maxpool": "max"}[params["pooling"]])
    return ragged(scorer, PerHead(counts), window, case, tensors, sum(counts) // len(counts))


def adakv_press(case: Case, tensors: Tensors) -> str | None:
    """kvpress guarantees ``n_safe`` entries per head, the observation window included, and takes the rest globally."""
    params = case["params"]
    window = params.get("window_size", 0)
    scorer = SnapKV(window, params["kernel_size"], "avg") if window else KeyNorm()
    base = params["n_kept_mean"] - window
    if base < 1:
        return NOT_COVERED
    allocator = Adaptive(window, max(0, params["n_safe"] - window) / base, False, "exact")
    capture = capture_of(tensors, 0, window)
    method = Method("golden", scorer, allocator, Protect(0, window), Plain())
    compressed = method.compress(capture, Region(capture.tokens, capture.tokens), params["n_kept_mean"], room=0)
    for head, kept in enumerate(compressed.positions[0]):
        if not torch.equal(kept, tensors["kept_mask"][0, head].nonzero()[:, 0]):
            return f"head {head} keeps other positions than the reference"
    return None


def ragged(scorer: Scorer, allocator: Allocator, window: int, case: Case, tensors: Tensors, budget: int) -> str | None:
    """A layer whose heads keep unequal counts: the same sets, and really only those stored."""
    capture = capture_of(tensors, 0, window)
    method = Method("golden", scorer, allocator, Protect(0, window), Plain())
    tokens = capture.tokens
    if budget == tokens and case["params"].get("compressed"):
        return NOT_COVERED  # the reference loses entries where nothing had to go; kvbench keeps all
    compressed = method.compress(capture, Region(tokens, tokens), min(budget, tokens), room=0)
    lengths = tensors["head_lens"].tolist()
    for head, expected in enumerate(tensors["kept_flat"].split(lengths)):
        if not torch.equal(compressed.positions[0][head], expected.sort().values):
            return (
                f"head {head} keeps {len(compressed.positions[0][head])} entries, not the reference's {len(expected)}"
            )
    held = compressed.cache.layers[0].tensors()["keys"]
    return None if held.shape[-2] * (1 if held.dim() == 2 else held.shape[0]) == sum(lengths) else "stores more"


NOT_COVERED = "not covered"
CHECKS: dict[str, Callable[[Case, Tensors], str | None]] = {
    "snapkv": snapkv,
    "knorm": knorm,
    "l2norm": l2norm,
    "tova": tova,
    "streamingllm_prefill": streamingllm,
    "random": random,
    "key_rerotation": key_rotation,
    "h2o_prefill": h2o_prefill,
    "h2o_decode": h2o_decode,
    "observed_attention": observed_attention,
    "pyramidkv": pyramidkv,
    "adakv": adakv,
    "headkv": headkv,
    **kivi_cases.CHECKS,
    **neighbour_cases.CHECKS,
    **streaming_cases.CHECKS,
}


def run_case(folder: Path, case: Case) -> str | None:
    """None if the case passes, ``NOT_COVERED``, or what is wrong."""
    if case["method"] not in CHECKS:
        return NOT_COVERED
    return CHECKS[case["method"]](case, load_file(folder / case["file"]))


def main(folder: Path) -> int:
    manifest = json.loads((folder / "manifest.json").read_text())
    results = {case["file"]: run_case(folder, case) for case in manifest["cases"]}
    failed = {name: fault for name, fault in results.items() if fault not in (None, NOT_COVERED)}
    for name, fault in failed.items():
        print(f"FAILED {name}: {fault}")
    passed, uncovered = list(results.values()).count(None), list(results.values()).count(NOT_COVERED)
    print(f"{passed} passed, {len(failed)} failed, {uncovered} not covered")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
