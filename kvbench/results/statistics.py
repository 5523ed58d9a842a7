"""Means and confidence intervals that say "unknown" (None) where nothing is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_240_601  # fixed: the same records give the same interval, whatever the run's seed
CHUNK_ELEMENTS = 4_000_000  # indices drawn at once: 32 MB


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known, or None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def bootstrap_ci95(scores: Sequence[float], groups: Sequence[str] | None = None) -> list[float] | None:
    """Percentile bootstrap interval [low, high] of the mean, 10,000 resamples, rounded to two digits.

    Records of one group (questions about the same context) are not independent: whole groups are drawn, and the mean of
    a resample is over the records in it. An empty group name is a group of its own. None for fewer than two groups,
    which say nothing about how groups differ.
    """
    names = [group or f"\0{index}" for index, group in enumerate(groups if groups is not None else [""] * len(scores))]
    _, member = np.unique(np.array(names, dtype=object), return_inverse=True)
    count = int(member.max()) + 1 if len(scores) else 0
    if count < 2:
        return None
    sums = np.bincount(member, weights=np.asarray(scores, dtype=np.float64), minlength=count)  # [groups]
    sizes = np.bincount(member, minlength=count)  # [groups]
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    means = np.empty(RESAMPLES)
    rows = max(1, CHUNK_ELEMENTS // count)
    for start in range(0, RESAMPLES, rows):
        drawn = generator.integers(0, count, size=(min(rows, RESAMPLES - start), count))  # [rows, groups]
        means[start : start + len(drawn)] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return [round(float(low), 2), round(float(high), 2)]
