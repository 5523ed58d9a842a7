"""KeyDiff, LagKV, Expected Attention and KVzip against the reference vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvbench.engine import Capture
from kvbench.engine.moments import moments
from kvbench.engine.rotation import Rotation
from kvbench.methods import Method, Protect, Region
from kvbench.methods.allocators import Adaptive, Global, Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.kvzip import KVzip, chunk_scores
from kvbench.methods.lagkv import LagKV
from kvbench.methods.scorers import KeyDiff
from tests.golden.choices import Case, Tensors, capture_of, check, wrong_choice, wrong_scores
from tests.golden.rotary import rope


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


CHECKS: dict[str, Callable[[Case, Tensors], str | None]] = {
    "keydiff": keydiff,
    "lagkv": lagkv,
    "expected_attention": expected_attention,
    "kvzip": kvzip,
}
