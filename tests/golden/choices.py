"""What a reference vector says of scores and of the positions kept, against a method run through the product."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine import Capture, LayerCapture
from kvbench.engine.attention import AttentionOptions
from kvbench.engine.capture import column_sums
from kvbench.methods import Compressed, Method, Protect, Region
from kvbench.methods.allocators import Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.scorers import Scorer

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
