"""Longest common subsequences of word lists, bit-parallel: one big integer per row of the dynamic programme.

The plain table costs gigabytes for two texts of 5,000 words, and walking it recursively exceeds Python's limit; a row
of bits costs one bit per word.
"""

from __future__ import annotations

from collections.abc import Sequence


def _rows(rows: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Row i has bit j set where table[i + 1][j + 1] == table[i + 1][j], i.e. where column j adds nothing."""
    positions: dict[str, int] = {}
    for j, word in enumerate(columns):
        positions[word] = positions.get(word, 0) | 1 << j
    full = (1 << len(columns)) - 1
    state, history = full, []
    for word in rows:
        match = positions.get(word, 0)
        state = ((state + (state & match)) | (state & ~match)) & full
        history.append(state)
    return history


def lcs_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence of two word lists."""
    if not first or not second:
        return 0
    return len(second) - _rows(first, second)[-1].bit_count()


def lcs_words(reference: Sequence[str], evaluated: Sequence[str]) -> list[str]:
    """One longest common subsequence, the one that ``rouge`` 1.0.1 reconstructs.

    Several may exist, and the union over sentences depends on which is taken: walking back from the ends, equal words
    are taken first; otherwise the step goes up (drops a reference word) only if that keeps more than going left does.
    """
    history = _rows(reference, evaluated)
    words: list[str] = []
    i, j = len(reference), len(evaluated)
    while i and j:
        if reference[i - 1] == evaluated[j - 1]:
            words.append(reference[i - 1])
            i, j = i - 1, j - 1
        elif history[i - 1] >> (j - 1) & 1:  # table[i][j - 1] == table[i][j] >= table[i - 1][j]: left loses nothing
            j -= 1
        else:
            i -= 1
    return words[::-1]
