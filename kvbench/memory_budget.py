"""``budget_bytes`` and ``match``: the largest budget whose cache fits so many bytes, per sample, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvbench.errors import SampleError
from kvbench.protocols import Plan, Start


def largest(begin: Callable[[Plan], Start], everything: Plan, allowed: int) -> tuple[Plan, Start]:
    """The plan with the largest budget whose cache holds at most ``allowed`` device bytes when decoding starts.

    ``begin`` starts the sample with a plan; ``everything`` is the plan in which nothing is evicted. Bytes are those of
    the tensors that a real start holds, the question's entries included. A budget one larger does not fit: bytes are
    taken to grow with the budget, which is only searched between one that fits and one that does not. SampleError if
    not even a single entry fits.
    """
    tried: dict[int, tuple[Plan, Start]] = {}

    def held(budget: int) -> int:
        planned = replace(everything, budget=budget)
        tried.clear()  # one cache at a time
        tried[budget] = planned, begin(planned)
        return tried[budget][1].cache.nbytes("device")

    most = everything.region.evictable
    too_much, tries = held(most), 0
    if too_much <= allowed or most == 0:
        return tried[most]
    fits, misses, bytes_fits = 1, most, held(1) if most > 1 else too_much
    if bytes_fits > allowed:
        raise SampleError(
            f"the cache takes {bytes_fits} bytes with one entry of the context, but {allowed} are allowed"
        )
    found = tried[1]
    while misses - fits > 1:
        # Bytes are nearly linear in the budget: a straight line finds it at once; halving bounds the number of tries.
        share = (allowed - bytes_fits) / max(1, too_much - bytes_fits) if tries % 2 == 0 else 0.5
        budget = min(misses - 1, max(fits + 1, fits + int(share * (misses - fits))))
        taken, tries = held(budget), tries + 1
        if taken <= allowed:
            fits, bytes_fits, found = budget, taken, tried[budget]
        else:
            misses, too_much = budget, taken
    return found
