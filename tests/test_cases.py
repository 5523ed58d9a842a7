"""Small inputs from real bug reports of this field, with the right answer (engine and methods)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvbench.engine import Engine, LayerCapture, Needs
from kvbench.methods import Method, Protect, Region
from kvbench.methods.allocators import PerLayer, Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.scorers import Random
from kvbench.protocols import Switches
from tests.cells import answer, begin, method, text
from tests.conftest import tiny_llama
from tests.oracle import generate, kept_mask, masked_logits


@dataclass(frozen=True)
class Fixed:
    """A scorer that wants exactly these positions."""

    positions: tuple[int, ...]
    needs: Needs = Needs()  # noqa: RUF009

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        scores = torch.zeros(layer.keys.shape[0], layer.tokens)
        scores[:, list(self.positions)] = 1.0
        return scores


def test_evicting_a_given_set_equals_masking_it(llama: torch.nn.Module) -> None:
    """40 context tokens, kept {0,1,2,3,9,17,30..39}, 5 question tokens, blind: positions 40..44 stay true."""
    engine = Engine(llama)
    context, question = text(40, 1), text(5, 9)
    chosen = (0, 1, 2, 3, 9, 17, *range(30, 40))
    fixed = Method("fixed", Fixed(chosen), Uniform(), Protect(), Plain())
    started = begin(engine, fixed, context, question, Switches("blind"), 16)
    assert all(at[0].tolist() == list(chosen) for at in started.compressed.positions.values())
    capture = engine.prefill(context)
    kept = {index: kept_mask(at, 40) for index, at in started.compressed.positions.items()}
    # all five question tokens, one by one, so that each one's logits are seen
    expected = masked_logits(engine, capture, kept, question)
    cache = fixed.compress(capture, Region(40, 40), 16, 8).cache
    seen = torch.stack([engine.feed(cache, [token]) for token in question])
    assert torch.allclose(seen, expected, atol=1e-4)
    assert torch.allclose(started.logits, expected[-1], atol=1e-4)
    # positions counted within the evicted cache (16..20) are off by far more than rounding
    wrong = masked_logits(engine, capture, kept, question, start=16)
    assert (seen - wrong).abs().max() > 1.0
    full = begin(engine, method("full"), context, question, Switches("blind"), "full")
    assert answer(engine, full, 8) == generate(llama, context + question, 8)


def test_layers_of_unequal_length_and_a_question_of_several_tokens() -> None:
    """4 layers of 24, 8, 24, 8 entries from 40; later question tokens must not leak into earlier ones."""
    engine = Engine(tiny_llama(layers=4))
    context, question = text(40, 2), text(5, 3)
    uneven = Method("uneven", Random(0), PerLayer([3, 1, 3, 1]), Protect(0, 2), Plain())
    started = begin(engine, uneven, context, question, Switches("blind"), 16)
    assert started.compressed.kept == (24, 8, 24, 8)
    capture = engine.prefill(context)
    kept = {index: kept_mask(at, 40) for index, at in started.compressed.positions.items()}
    tokens = answer(engine, started, 11)
    expected = masked_logits(engine, capture, kept, [*question, *tokens[:-1]])
    assert torch.allclose(started.logits, expected[4], atol=1e-4)
    assert expected[4:].argmax(-1).tolist() == tokens
    first_logits = []
    for last in (question[-1], (question[-1] + 1) % 128):
        cache = uneven.compress(capture, Region(40, 40), 16, 8).cache
        first_logits.append(all_logits(engine, cache, [*question[:-1], last])[0])
    assert torch.equal(*first_logits)


@torch.inference_mode()
def all_logits(engine: Engine, cache, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits at every fed token, not only at the last."""
    from kvbench.engine.attention import forward_pass
    from kvbench.engine.engine import CachedPass

    positions = torch.arange(cache.next_position, cache.next_position + len(ids))[None]
    with forward_pass(CachedPass([cache])):
        return engine.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False).logits[0]


def test_rows_of_one_batch_answer_as_they_do_alone(llama: torch.nn.Module) -> None:
    """Decoding takes a list of caches; rows of unequal length and method must not touch each other."""
    from kvbench.engine import StopRule

    engine = Engine(llama)
    cells = [("full", "full"), ("snapkv", 20), ("random", 12), ("streamingllm", 30)]
    context, question = text(60, 4), text(6, 5)
    starts = [begin(engine, method(name), context, question, Switches("blind"), budget) for name, budget in cells]
    alone = [answer(engine, s, 10) for s in starts]
    again = [begin(engine, method(name), context, question, Switches("blind"), budget) for name, budget in cells]
    logits = torch.stack([s.logits for s in again])
    together = engine.decode([s.cache for s in again], logits, StopRule(frozenset(), 10))
    assert [list(row.ids) for row in together] == alone


@pytest.mark.parametrize("at_least", [0, 1])
def test_stop_tokens_end_a_row_and_a_minimum_holds(at_least: int, llama: torch.nn.Module) -> None:
    """The first answer token is taken as a stop id: it ends the row at once, unless one token is asked for."""
    from kvbench.engine import StopRule

    engine = Engine(llama)
    context, question = text(30, 1), text(4, 2)
    free = answer(engine, begin(engine, method("full"), context, question, Switches("blind"), "full"), 6)
    started = begin(engine, method("full"), context, question, Switches("blind"), "full")
    stop = StopRule(frozenset([free[0]]), 6, min_new_tokens=at_least)
    (generated,) = engine.decode([started.cache], started.logits[None], stop)
    if at_least == 0:
        assert list(generated.ids) == free[:1]
    else:
        assert generated.ids[0] != free[0]


def test_logits_that_are_not_finite_are_told() -> None:
    model = tiny_llama()
    engine = Engine(model)
    started = begin(engine, method("full"), text(30, 1), text(4, 2), Switches("blind"), "full")
    from kvbench.engine import StopRule

    (generated,) = engine.decode([started.cache], torch.full((1, 128), float("nan")), StopRule(frozenset(), 3))
    assert not generated.finite
