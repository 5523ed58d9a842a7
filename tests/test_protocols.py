"""What the switches mean, number by number: 100 context tokens, 10 question tokens, budget 40 or 30 %."""

from __future__ import annotations

import pytest

from kvbench.budget import Budget
from kvbench.errors import SampleError
from kvbench.methods import Region
from kvbench.protocols import Switches, plan, window_question_tokens

QUESTION, OTHER = tuple(range(10)), tuple(range(50, 57))
CASES = {
    # switches -> (captured after the context, evictable, stored, budget, fed)
    Switches("blind"): ((), 100, 100, 40, QUESTION),
    # the same size at the first decode step as aware: 30 of the context and the 10 of the question
    Switches("blind", "prompt"): ((), 100, 100, 30, QUESTION),
    Switches("blind", first_token="full"): ((), 100, 100, 40, QUESTION),
    # everything but the last prompt token is stored; that one is fed again
    Switches("aware"): (QUESTION, 100, 109, 40, QUESTION[-1:]),
    Switches("aware", "prompt"): (QUESTION, 100, 109, 30, QUESTION[-1:]),
    Switches("aware", "prompt", True): (QUESTION, 110, 109, 40, QUESTION[-1:]),
    # nothing is fed: the first answer token is the uncompressed prompt's
    Switches("aware", first_token="full"): (QUESTION, 100, 110, 40, ()),
    Switches("aware", "prompt", True, "full"): (QUESTION, 110, 110, 40, ()),
    # the other question is seen, then forgotten
    Switches("swapped"): (OTHER, 100, 100, 40, QUESTION),
    Switches("swapped", "prompt"): (OTHER, 100, 100, 30, QUESTION),
    Switches("swapped", "prompt", True): (OTHER, 100, 100, 30, QUESTION),
}


@pytest.mark.parametrize("switches", CASES, ids=str)
def test_plan(switches: Switches) -> None:
    captured, evictable, stored, budget, fed = CASES[switches]
    made = plan(switches, 100, QUESTION, OTHER, Budget.parse(40))
    assert (made.captured, made.region, made.budget, made.fed) == (
        captured,
        Region(evictable, stored, len(fed), len(fed) if switches.protocol == "aware" else 0),
        budget,
        fed,
    )
    assert made.first_from_full == (switches.first_token == "full")


@pytest.mark.parametrize(
    ("scope", "evictable", "entries"),
    [("context", False, 30), ("prompt", True, 33), ("prompt", False, 23)],
)
def test_a_share_is_one_of_the_tokens_in_scope(scope: str, evictable: bool, entries: int) -> None:
    """30 % of 100 context tokens, or of 110 prompt tokens, less the question's 10 where those are kept anyway."""
    assert plan(Switches("aware", scope, evictable), 100, QUESTION, None, Budget.parse(0.3)).budget == entries


def test_a_question_that_fills_the_budget_is_told() -> None:
    with pytest.raises(SampleError, match="the question alone takes 10 entries"):
        plan(Switches("blind", "prompt"), 100, QUESTION, None, Budget.parse(10))


@pytest.mark.parametrize(
    ("window", "question", "tail", "seen"),
    [
        (8, 30, 6, 2),  # a template's tail of 6 leaves 2 of the window's 8 for the question
        (8, 30, 9, 0),  # ... a longer one leaves none
        (32, 30, 6, 24),  # the window reaches into the context: all 24 question tokens are in it
        (8, 30, 0, 8),
        (0, 30, 6, None),  # a method without a window
    ],
)
def test_how_much_of_the_window_is_the_question(window: int, question: int, tail: int, seen: int | None) -> None:
    assert window_question_tokens(Switches("aware"), window, question, tail) == seen
    assert window_question_tokens(Switches("blind"), window, question, tail) is None
