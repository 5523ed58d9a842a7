"""KeyDiff, LagKV, Expected Attention and KVzip by hand, where the reference vectors do not reach."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.engine import Engine, LayerCapture, Needs
from kvbench.engine.attention import AttentionOptions
from kvbench.engine.moments import moments
from kvbench.engine.rotation import discover
from kvbench.errors import InputError
from kvbench.methods.allocators import Global
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.kvzip import KVzip
from kvbench.methods.lagkv import LagKV
from kvbench.methods.scorers import KeyDiff
from kvbench.methods.setup import Setup
from kvbench.models.byte_tokenizer import build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from tests.cells import text
from tests.models.tiny_configs import build


def layer(keys: list[list[float]], values: list[list[float]] | None = None) -> LayerCapture:
    keys_ = torch.tensor([keys])
    values_ = keys_ if values is None else torch.tensor([values])
    return LayerCapture(keys_, values_, keys_[:, :0], AttentionOptions(1.0), 0, seed=7)


def test_keydiff_is_minus_the_cosine_with_the_mean_direction() -> None:
    """Lengths do not count: the mean direction of (1, 0), (5, 0), (0, 1) is along (2, 1)."""
    found = KeyDiff()(layer([[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]))[0]
    expected = [-2 / math.sqrt(5), -2 / math.sqrt(5), -1 / math.sqrt(5)]
    assert torch.allclose(found, torch.tensor(expected))


def test_lagkv_scales_by_the_next_window() -> None:
    """Two windows of two tokens; the second spans [0, 2] in both channels and scores the first.

    Token 0 is (0, 2), scaled (0, 1), deviation sqrt(1/2); token 1 is (1, 1), scaled (1/2, 1/2), deviation 0.
    """
    keys = [[0.0, 2.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0], [9.0, 9.0]]
    found = LagKV(sinks=0, lag=2, compare="all")(layer(keys))[0]
    expected = torch.tensor([math.sqrt(0.5), 0.0]).softmax(0)
    assert torch.allclose(found[:2], expected)
    assert found[2:].tolist() == sorted(found[2:].tolist()) and found[2:].min() >= 1, "the rest first, newest first"
    ranks = LagKV(sinks=0, lag=2)(layer(keys))[0]
    assert ranks[:2].tolist() == [0.5, 0.0]


def test_lagkv_with_a_constant_channel_is_finite() -> None:
    keys = [[1.0, float(i % 3)] for i in range(8)]
    assert torch.isfinite(LagKV(sinks=0, lag=2)(layer(keys))).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi", "glm", "gpt_neox", "smollm3"])
def test_query_moments_are_those_of_the_model_without_rotary_embedding(name: str) -> None:
    """The queries of a model are turned back to what it computes at position 0, whatever its rotation is like."""
    engine, ids, skip = Engine(build(name)), text(40, 3), 4
    rotation = discover(engine)
    capture = engine.prefill(ids, Needs(query_window=40, moments=frozenset({skip}), rotation=rotation))
    found = next(layer for layer in capture.layers if layer.options.sliding_window is None)
    assert capture.layers[0].options.sliding_window is not None or found.index == 0
    first = engine.prefill(ids[:1], Needs(query_window=1)).layers[found.index].window_queries[:, 0]
    turn = rotation.layers[found.index]
    queries = found.window_queries
    if turn is not None:
        queries = turn.turn(queries, -torch.arange(40).expand(queries.shape[0], -1))
    assert torch.allclose(queries[:, 0], first, atol=1e-5)
    counted = queries[:, skip:]
    of_layer = found.moments[skip]
    assert of_layer.count == 36
    assert torch.allclose(of_layer.mean, counted.mean(1), atol=1e-5)
    for head, covariance in enumerate(of_layer.covariance()):
        assert torch.allclose(covariance, torch.cov(counted[head].T, correction=0), atol=1e-4)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
def test_moments_of_an_extended_capture_are_those_of_the_whole(llama: torch.nn.Module, cut: int) -> None:
    engine, ids = Engine(llama), text(40, 3)
    needs = Needs(moments=frozenset({0, 4}), rotation=discover(engine))
    whole = engine.prefill(ids, needs)
    parts = engine.extend(engine.prefill(ids[:cut], needs), ids[cut:], needs)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for skip in (0, 4):
            assert one.moments[skip].count == other.moments[skip].count == 40 - skip
            assert torch.allclose(one.moments[skip].mean, other.moments[skip].mean, atol=1e-5)
            assert torch.allclose(one.moments[skip].covariance(), other.moments[skip].covariance(), atol=1e-4)


def test_expected_attention_is_the_formula_written_out(llama: torch.nn.Module) -> None:
    """Against rotation matrices, means and covariances made one by one."""
    engine, ids, sinks, future = Engine(llama), text(30, 3), 3, 5
    rotation = discover(engine)
    scorer = ExpectedAttention(future, sinks, rotation=rotation)
    captured = engine.prefill(ids, replace(scorer.needs, query_window=30)).layers[1]
    turn = rotation.layers[1]
    assert turn is not None
    eye = torch.eye(16)
    at = [turn.turn(eye[:, None], torch.full((16, 1), p)).squeeze(1).T for p in range(30, 30 + future)]
    mean_rotation = torch.stack(at).mean(0)
    back = turn.turn(captured.window_queries, -torch.arange(30).expand(4, -1))[:, sinks:]
    for kv_head in range(2):
        weights = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            mean = mean_rotation @ back[head].mean(0)
            covariance = mean_rotation @ torch.cov(back[head].T, correction=0) @ mean_rotation.T
            keys = captured.keys[kv_head, sinks:]
            logits = [float(mean @ k / 4 + k @ covariance @ k / 2 / 16) for k in keys]
            weights.append(torch.tensor(logits).softmax(0))
        expected = (weights[0] + weights[1]) / 2 * captured.values[kv_head, sinks:].norm(dim=-1)
        found = scorer(captured)[kv_head]
        assert torch.allclose(found[sinks:], expected, rtol=1e-4, atol=1e-6)
        assert found[:sinks].min() > found[sinks:].max()


def test_expected_attention_of_a_text_no_longer_than_its_sinks(llama: torch.nn.Module) -> None:
    engine = Engine(llama)
    scorer = ExpectedAttention(rotation=discover(engine))
    for tokens in (0, 1, 4, 5):
        for captured in engine.prefill(text(tokens, 1), scorer.needs).layers:
            assert torch.isfinite(scorer(captured)).all()
            assert scorer(captured).shape == (2, tokens)


def test_expected_attention_refuses_a_model_whose_queries_cannot_be_turned_back() -> None:
    with pytest.raises(InputError, match=r"method\.scorer"):
        ExpectedAttention().prepared(setup_of(build("gpt2")))


def setup_of(model: torch.nn.Module) -> Setup:
    return Setup(Engine(model), PromptEncoder(build_byte_tokenizer()), "tiny")


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("chunk", [16, 100])
def test_kvzip_is_the_attention_of_a_text_that_repeats_itself(name: str, chunk: int) -> None:
    """Context, instruction and chunk read in one go: the same queries and keys, the softmax written out."""
    setup, ids, sinks = setup_of(build(name)), text(40, 3), 2
    scorer = KVzip(chunk, sinks).prepared(setup)
    scores = scorer.of_capture(setup.engine.prefill(ids))
    assert scores
    for start in range(sinks, 40, chunk):
        part = ids[start : start + chunk]
        fed = (*scorer.instruction(ids, start), *part)
        whole = setup.engine.prefill((*ids, *fed), Needs(query_window=len(fed)))
        for index, found in scores.items():
            captured = whole.layers[index]
            seen = [*range(sinks), *range(start, start + len(part)), *range(40, 40 + len(fed))]
            for kv_head in range(captured.keys.shape[0]):
                group = captured.window_queries.view(captured.keys.shape[0], -1, len(fed), 16)[kv_head]
                logits = group @ captured.keys[kv_head, seen].T * captured.options.scaling
                future = torch.ones(len(fed), len(fed)).triu(1).bool()
                logits[..., -len(fed) :] = logits[..., -len(fed) :].masked_fill(future, float("-inf"))
                expected = logits.softmax(-1)[..., sinks : sinks + len(part)].amax((0, 1))
                assert torch.allclose(found[kv_head, start : start + len(part)], expected, atol=1e-5)
            assert (found[:, :sinks] == 1).all()


def test_kvzip_asks_for_a_later_chunk_by_the_words_before_it(llama: torch.nn.Module) -> None:
    setup = setup_of(llama)
    scorer = KVzip(16, 2).prepared(setup)
    ids = tuple(b"once upon a time there was a model that could not forget")
    read = setup.encoder.decode
    assert read(scorer.instruction(ids, 2)) == "\n\nRepeat the previous context:"
    assert read(scorer.instruction(ids, 18)) == "\n\nRepeat the previous context starting with a time t:"


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_kvzip_of_a_text_no_longer_than_its_sinks(llama: torch.nn.Module, tokens: int) -> None:
    setup = setup_of(llama)
    scores = KVzip(16, 2).prepared(setup).of_capture(setup.engine.prefill(text(tokens, 1)))
    assert [tuple(of_layer.shape) for of_layer in scores.values()] == [(2, tokens)] * 2


@pytest.mark.parametrize("bad", [{"chunk": 0}, {"sinks": -1}, {"ask": 3}, {"go_on": None}])
def test_kvzip_says_which_setting_is_wrong(bad: dict) -> None:
    with pytest.raises(InputError, match=rf"method\.scorer\.{next(iter(bad))}"):
        KVzip(**bad)


def test_global_budgets_go_where_the_scores_are() -> None:
    """Of 2 x 2 heads of 10 tokens, one head outshines all: it gets what the others need not keep."""
    scores = [torch.rand(2, 10, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    scores[1][0] += 5
    counts = Global(sinks=1, recent=1)(4, scores)
    assert sum(int(count.sum()) for count in counts) == 16
    assert [count.tolist() for count in counts] == [[2, 2], [10, 2]]


def test_global_budgets_leave_no_head_empty() -> None:
    scores = [torch.zeros(2, 10), torch.ones(2, 10)]
    counts = Global()(3, scores)
    assert sum(int(count.sum()) for count in counts) == 12
    assert [count.tolist() for count in counts] == [[1, 1], [9, 1]], "ties go to the first head"


def test_moments_cancel_nothing() -> None:
    """Queries far from zero: raw second moments would lose the covariance in fp32."""
    queries = torch.randn(1, 3000, 4, generator=torch.Generator().manual_seed(0)) + 1e4
    expected = torch.cov(queries[0].double().T, correction=0).float()
    assert torch.allclose(moments(queries, 0, 0, None).covariance()[0], expected, atol=1e-2)
