"""Scorers and allocators, where the reference vectors do not reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine import Engine, LayerCapture, Needs
from kvbench.engine.attention import AttentionOptions
from kvbench.methods.allocators import PerLayer, Uniform
from kvbench.methods.scorers import KeyNorm, Random, Recency, SnapKV, Tova, window_attention
from tests.cells import text


def layer(tokens: int = 30, heads: int = 4, kv_heads: int = 2, window: int = 5, index: int = 0) -> LayerCapture:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (torch.randn(kv_heads, tokens, 8, generator=generator) for _ in range(2))
    queries = torch.randn(heads, min(window, tokens), 8, generator=generator)
    return LayerCapture(keys, values, queries, AttentionOptions(8**-0.5), index, seed=7)


SCORERS = [SnapKV(5, 3), SnapKV(5, 1, "none"), Tova(), Tova("kv"), KeyNorm(), Recency(), Random(3)]


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 30])
@pytest.mark.parametrize("scorer", SCORERS, ids=str)
def test_a_score_for_every_kv_head_and_token(scorer, tokens: int) -> None:  # type: ignore[no-untyped-def]
    scores = scorer(layer(tokens))
    assert scores.shape == (2, tokens)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()


def test_window_attention_is_the_attention_of_the_model(llama: torch.nn.Module) -> None:
    """The weights that SnapKV sums are those that eager attention reports for the last queries."""
    engine, ids = Engine(llama), text(40, 3)
    capture = engine.prefill(ids, Needs(query_window=6))
    llama.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.inference_mode():
        expected = llama(torch.tensor([ids]), output_attentions=True).attentions
    llama.set_attn_implementation("kvbench")  # type: ignore[operator]
    for captured, weights in zip(capture.layers, expected, strict=True):
        found = window_attention(captured, 6).flatten(0, 1)
        assert torch.allclose(found, weights[0, :, -6:], atol=1e-5)


def test_random_scores_of_the_context_do_not_depend_on_what_follows() -> None:
    short, long = layer(20), layer(30)
    assert torch.equal(Random(0)(short), Random(0)(long)[:, :20])
    assert not torch.equal(Random(0)(short)[0], Random(0)(short)[1]), "heads draw their own"
    assert not torch.equal(Random(0)(layer(20, index=1)), Random(0)(short)), "layers draw their own"
    assert not torch.equal(Random(1)(short), Random(0)(short))


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    budget=st.integers(1, 300),
    tokens=st.integers(1, 400),
)
def test_per_layer_totals_are_exact_unless_a_layer_overflows(weights: list[int], budget: int, tokens: int) -> None:
    scores = [torch.zeros(2, tokens)] * len(weights)
    counts = PerLayer(weights)(budget, scores)
    assert all(int(a) == int(b) for a, b in counts)
    entries = [int(layer[0]) for layer in counts]
    assert all(1 <= count <= tokens for count in entries)
    exact = [budget * len(weights) * weight / sum(weights) for weight in weights]
    if all(share >= 1 and share + 1 <= tokens for share in exact):
        assert sum(entries) == budget * len(weights)
        assert all(abs(count - share) < 1.0 + 1e-9 for count, share in zip(entries, exact, strict=True))
    assert all(layer.tolist() == [min(budget, tokens)] * 2 for layer in Uniform()(budget, scores))


def test_weights_for_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 numbers, the model compresses 3 layers"):
        PerLayer([1, 2])(8, [torch.zeros(2, 100)] * 3)
