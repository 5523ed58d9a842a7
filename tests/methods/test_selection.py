"""Which entries are kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.methods.selection import Protect, select


def test_ties_keep_protected_entries_and_then_the_earliest() -> None:
    """All scores equal: sinks and recent entries stay by index, the rest by position, the same on every device."""
    kept = select(torch.ones(2, 40), 12, Protect(sinks=3, recent=4))
    assert kept.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 39]] * 2
    lowest = torch.arange(40.0).flip(0).expand(2, -1).clone()
    assert select(-lowest, 12, Protect(3, 4))[0].tolist() == [0, 1, 2, *range(31, 36), 36, 37, 38, 39]


@pytest.mark.parametrize("count", range(1, 10))
def test_protected_entries_that_do_not_fit_shrink_to_the_budget(count: int) -> None:
    kept = select(torch.rand(2, 50), count, Protect(sinks=4, recent=32))
    assert kept.shape == (2, count)
    assert kept[0, -1] == 49, "the newest entry is never the victim"
    sinks = min(4, count - 1)
    assert kept[0].tolist() == [*range(sinks), *range(50 - (count - sinks), 50)]


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 60), heads=st.integers(1, 3), sinks=st.integers(0, 6), recent=st.integers(0, 6), data=st.data())
def test_any_selection(n: int, heads: int, sinks: int, recent: int, data: st.DataObject) -> None:
    """Exactly the promised entries, ascending, the protected among them, and none dropped that beats a chosen one."""
    count = data.draw(st.integers(1, n))
    levels = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=heads, max_size=heads))
    scores = torch.tensor(levels, dtype=torch.float32)
    kept = select(scores, count, Protect(sinks, recent))
    assert kept.shape == (heads, count)
    assert bool((kept.diff(dim=1) > 0).all())
    if sinks + recent > count:
        return
    protected = {*range(min(sinks, n)), *range(max(0, n - recent), n)}
    for head, positions in enumerate(kept.tolist()):
        assert protected <= set(positions)
        chosen, dropped = set(positions) - protected, set(range(n)) - set(positions)
        worst = min((levels[head][at] for at in chosen), default=3)
        assert all(levels[head][at] <= worst for at in dropped)
