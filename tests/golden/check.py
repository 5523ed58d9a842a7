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
from typing import Any

import torch
from safetensors.torch import load_file

from kvbench.engine import Capture, LayerCapture
from kvbench.engine.attention import AttentionOptions
from kvbench.engine.capture import column_sums
from kvbench.engine.moments import moments
from kvbench.engine.rotation import Rotation
from kvbench.methods import Compressed, Method, Protect, Region
from kvbench.methods.allocators import Adaptive, Allocator, Global, PerHead, Pyramid, Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.decode import HeavyHitters
from kvbench.methods.evicting import EvictingLayer
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.kvzip import KVzip, chunk_scores
from kvbench.methods.lagkv import LagKV
from kvbench.methods.scorers import ColumnSums, KeyDiff, KeyNorm, Random, Recency, Scorer, SnapKV, Tova

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.golden import kivi_cases, streaming_cases
from tests.golden.rotary import rope, rotated

Tensors = dict[str, torch.Tensor]
Case = dict[str, Any]


def capture_of(tensors: Tensors, batch: int, window: int) -> Capture:
    """A one-layer capture of a case's q [B, Hq, T, d], k and v [B, Hkv, T, d] (queries or values may be missing)."""
    keys = tensors["k"][batch]
    queries = tensors.get("q", tensors["k"])[batch]
    layer = LayerCapture(
        keys=keys,
        values=tensors.get("v", tensors["k"])[batch],
        window_queries=queries[:, max(0, queries.shape[1] - window) :],
        options=AttentionOptions(scaling=keys.shape[-1] ** -0.5),
        index=0,
        seed=0,
        column_sums=column_sums(queries, keys, AttentionOptions(scaling=keys.shape[-1] ** -0.5)),
    )
    return Capture((layer,), keys.shape[1], None)


def compress(scorer: Scorer, protect: Protect, capture: Capture, budget: int) -> Compressed:
    """The method made of ``scorer`` and ``protect``, plainly stored."""
    method = Method("golden", scorer, Uniform(), protect, Plain())
    return method.compress(capture, Region(capture.tokens, capture.tokens), min(budget, capture.tokens), room=0)


def check(scorer: Scorer, protect: Protect, case: Case, tensors: Tensors, budget: int) -> str | None:
    """The first thing that is wrong with a selection case, or None."""
    exact = case["params"].get("dtype", "float32") == "float32"
    for batch in range(tensors["k"].shape[0]):
        capture = capture_of(tensors, batch, scorer.needs.query_window)
        compressed = compress(scorer, protect, capture, budget)
        kept, expected = torch.stack(list(compressed.positions[0])), tensors["kept"][batch]
        if kept.shape != expected.shape:
            return f"keeps {tuple(kept.shape)} entries instead of {tuple(expected.shape)}"
        fault = wrong_scores(scorer(capture.layers[0]), tensors, batch) if exact else None
        fault = fault or wrong_choice(kept, tensors, batch, exact)
        if fault:
            return fault
        held = compressed.cache.layers[0].tensors()
        for name, source in (("keys", capture.layers[0].keys), ("values", capture.layers[0].values)):
            if not torch.equal(held[name], source.gather(1, kept[:, :, None].expand(-1, -1, source.shape[2]))):
                return f"the stored {name} are not those of the kept positions"
    return None


def wrong_scores(scores: torch.Tensor, tensors: Tensors, batch: int) -> str | None:
    """Scores are compared where the reference ranked them: on the prefix, up to one factor (a sum against a mean)."""
    if "scores" not in tensors:
        return None
    expected = tensors["scores"][batch].float()
    ranked = min(expected.shape[1], int((scores != 0).any(0).nonzero().max()) + 1) if scores.any() else 0
    scores, expected = scores[:, :ranked].float(), expected[:, :ranked]
    if ranked == 0:
        return None
    factor = float((scores * expected).sum() / (scores * scores).sum())
    if not torch.allclose(scores * factor, expected, rtol=1e-4, atol=1e-7):
        return f"scores differ by up to {(scores * factor - expected).abs().max():.2e}"
    return None


def wrong_choice(kept: torch.Tensor, tensors: Tensors, batch: int, exact: bool) -> str | None:
    """must_keep <= kept <= may_keep where the case has them, else equality with the reference's set."""
    if "must_keep" not in tensors:
        same = torch.equal(kept.sort(-1).values, tensors["kept"][batch].sort(-1).values)
        return None if same else "keeps other positions than the reference"
    must, may = tensors["must_keep"][batch], tensors["may_keep"][batch]
    mask = torch.zeros(kept.shape[0], int(kept.max()) + 1, dtype=torch.bool).scatter(1, kept, True)
    width = must.shape[1]
    mask = torch.nn.functional.pad(mask, (0, max(0, width - mask.shape[1])))[:, :width]
    if exact and (must & ~mask).any():
        return f"drops {int((must & ~mask).sum())} positions that every correct implementation keeps"
    if exact and (mask & ~may).any():
        return f"keeps {int((mask & ~may).sum())} positions that no correct implementation keeps"
    overlap = (mask & may).sum() / mask.sum()
    return None if overlap > 0.98 else f"only {overlap:.1%} of the kept positions may be kept"


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


def keydiff(case: Case, tensors: Tensors) -> str | None:
    return check(KeyDiff(), Protect(), case, tensors, case["params"]["n_kept"])


def lagkv(case: Case, tensors: Tensors) -> str | None:
    """The reference gives all that cannot be scored 1; kvbench ranks that by recency, from 1 on."""
    params = case["params"]
    scorer = LagKV(params["n_sink"], params["lag_size"], "all" if params["cross_scoring"] else "windows")
    for batch in range(tensors["k"].shape[0]):
        scores = scorer(capture_of(tensors, batch, 0).layers[0])
        fault = wrong_scores(scores.clamp_max(1), tensors, batch)
        if fault:
            return fault
    flat = {name: tensor for name, tensor in tensors.items() if name != "scores"}
    return check(scorer, Protect(params["n_sink"], 0), case, flat, params["n_kept"])


def expected_attention(case: Case, tensors: Tensors) -> str | None:
    """The case's queries are those before rotary embedding: they are rotated first, as the engine sees them."""
    params = case["params"]
    turn = rope(params)
    scorer = ExpectedAttention(
        params["n_future_positions"],
        params["n_sink"],
        params["use_covariance"],
        params["use_vnorm"],
        params["epsilon"],
        Rotation((turn,)),
    )
    at = torch.arange(params["seq_len"])
    for batch in range(tensors["k"].shape[0]):
        one = {name: tensor[batch : batch + 1] for name, tensor in tensors.items()}
        queries = turn.turn(one["q"][0], at.expand(one["q"].shape[1], -1))
        skip = params["n_sink"]
        layer = replace(capture_of(one, 0, 0).layers[0], moments={skip: moments(queries, 0, skip, turn)})
        fault = wrong_scores(scorer(layer), one, 0)
        if fault:
            return fault
        method = Method("golden", scorer, Uniform(), Protect(skip), Plain())
        capture = Capture((layer,), layer.tokens, None)
        kept = method.compress(capture, Region(layer.tokens, layer.tokens), params["n_kept"], room=0).positions[0]
        fault = wrong_choice(torch.stack(list(kept)), one, 0, exact=True)
        if fault:
            return fault
    return None


def kvzip(case: Case, tensors: Tensors) -> str | None:
    """Scores chunk by chunk; the reference leaves the prefix tokens behind its sinks at 0.

    Its totals need not be a whole number of entries per head: then its choice must lie between those of the budgets
    just below and just above.
    """
    params = case["params"]
    sinks, fed = min(params["n_sink"], params["prefix_length"]), 0
    layers, scores = [], []
    for index, keys in enumerate(tensors["k_ctx"]):
        layers.append(replace(capture_of({"k": keys[None]}, 0, 0).layers[0], index=index))
        scores.append(torch.zeros(keys.shape[:2]))
        scores[-1][:, :sinks], fed, start = 1.0, 0, params["prefix_length"]
        for chunk in params["chunk_lengths"]:
            queries, repeated = (
                tensors[n][index][:, fed : fed + chunk + params["repeat_extra"]] for n in ("q_rep", "k_rep")
            )
            scores[-1][:, start : start + chunk] = chunk_scores(
                layers[-1], queries, repeated, sinks, start, start + chunk
            )
            start, fed = start + chunk, fed + chunk + params["repeat_extra"]
        if not torch.allclose(scores[-1], tensors["scores"][index], rtol=1e-4, atol=1e-7):
            return f"layer {index}: scores differ"
    expected, tokens = tensors["kept_mask"], layers[0].tokens
    allocator = Adaptive(0, 0.0, False) if params["layerwise"] else Global()
    method = Method("golden", KVzip(), allocator, Protect(sinks), Plain())
    total, heads = int(expected.sum()), expected.shape[0] * expected.shape[1]
    for budget in (total // heads, -(-total // heads)):
        capture = Capture(tuple(layers), tokens, None)
        found = method.compress(capture, Region(tokens, tokens), budget, 0, None, scores).positions
        mask = torch.zeros_like(expected)
        for index in range(len(layers)):
            for head, kept in enumerate(found[index]):
                mask[index, head, kept] = True
        less, more = (mask, expected) if budget * heads <= total else (expected, mask)
        if (less & ~more).any() or (budget * heads == total and (more & ~less).any()):
            return f"keeps other positions than the reference at {budget} entries per head"
    return None


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
    "keydiff": keydiff,
    "lagkv": lagkv,
    "expected_attention": expected_attention,
    "kvzip": kvzip,
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
