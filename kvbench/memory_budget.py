"""``budget_bytes`` and ``match``: the largest budget whose cache fits so many bytes, per sample, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbench.errors import SampleError
from kvbench.protocols import Plan, Start


@dataclass
class Search:
    """Starts a sample with one budget after another, and holds the largest start that fitted."""

    begin: Callable[[Plan], Start]
    everything: Plan
    allowed: int
    best: tuple[Plan, Start] | None = None

    def held(self, budget: int) -> int:
        """Device bytes that the cache of this budget holds when decoding starts."""
        planned = replace(self.everything, budget=budget)
        started = self.begin(planned)
        taken = started.cache.nbytes("device")
        if taken <= self.allowed and (self.best is None or budget > self.best[0].budget):
            self.best = planned, started
        return taken

    def last(self, budgets: range) -> int:
        """How many of the budgets fit, where bytes grow along them."""
        if not budgets or (least := self.held(budgets[0])) > self.allowed:
            return 0
        if len(budgets) == 1 or (most := self.held(budgets[-1])) <= self.allowed:
            return len(budgets)
        fits, misses, tries = 0, len(budgets) - 1, 0
        while misses - fits > 1:
            # Bytes are nearly linear in the budget: a straight line finds it at once; halving bounds the tries.
            share = (self.allowed - least) / max(1, most - least) if tries % 2 == 0 else 0.5
            at = min(misses - 1, max(fits + 1, fits + int(share * (misses - fits))))
            taken, tries = self.held(budgets[at]), tries + 1
            if taken <= self.allowed:
                fits, least = at, taken
            else:
                misses, most = at, taken
        return fits + 1


def largest(begin: Callable[[Plan], Start], everything: Plan, allowed: int, block: int = 1) -> tuple[Plan, Start]:
    """The plan with the largest budget whose cache holds at most ``allowed`` device bytes when decoding starts.

    ``begin`` starts the sample with a plan; ``everything`` is the plan in which nothing is evicted. Bytes are those of
    the tensors that a real start holds, the question's entries included. SampleError if not even one entry fits.

    A codec that codes ``block`` entries at once holds fewer bytes at every multiple of it, where a search over all
    budgets would stop at the first rise that it cannot climb: multiples are searched first, then up to the next. Where
    layers or heads keep unequal counts their blocks fill at different budgets; then the one found fits and the next
    larger does not, but an even larger one may.
    """
    search, most = Search(begin, everything, allowed), everything.region.evictable
    taken = search.held(most)
    if search.best is not None:
        return search.best
    first = block - everything.region.on_top % block
    multiples = range(first, most, block)
    count = search.last(multiples)
    below = multiples[count - 1] if count else 0
    search.last(range(below + 1, min(below + block if count else first, most)))
    if search.best is None:
        taken = search.held(1) if most > 1 else taken
        raise SampleError(f"the cache takes {taken} bytes with one entry of the context, but {allowed} are allowed")
    return search.best
