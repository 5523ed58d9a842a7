"""Prompts of an exact number of tokens: needles in a haystack of which just enough is taken.

Tokenising a long prompt is what costs time, so the search interpolates: about five counts of the whole prompt per
sample, whatever its length. All state is local to one call; a sample never depends on the ones before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvbench.errors import InputError
from kvbench.tasks.haystack import Haystack, nearest_boundary

_MOST_COUNTS = 80
_PROBE = 20_000  # characters that tell how many characters a token has


@dataclass(frozen=True)
class Needle:
    """A text to hide, and how deep (0: at the start, 1: at the end)."""

    text: str
    depth: float


def fit(
    haystack: Haystack,
    needles: Sequence[Needle],
    start: int,
    length: int,
    count: Callable[[str], int],
    key: str = "task.length",
) -> tuple[str, list[float]]:
    """A document with the needles for which ``count(document) == length``, and the depth each needle came to.

    ``start`` is the haystack's first unit. Needles stand at the unit boundaries nearest to their depths; only one
    stretch of hay is cut inside a unit, at its side away from the needles. Raises InputError where no text fits.
    """
    order = sorted(range(len(needles)), key=lambda i: needles[i].depth)
    ordered = [needles[i] for i in order]
    bare = count("".join(needle.text for needle in ordered))
    if bare >= length:
        raise InputError(key, length, f"the prompt has {bare} tokens without any filler.", "Ask for a longer prompt.")
    empty = count("")
    rate, hay = _hay_of(haystack, start, length - bare, lambda text: count(text) - empty)
    while True:
        document, guess, most = _layout(haystack, start, hay, ordered)
        size = _search(lambda size, document=document: count(document(size)), length, guess, most, rate)
        if size is not None:
            break
        if not hay:
            raise InputError(key, length, f"no prompt of exactly {length} tokens was found.", "Try one token more.")
        hay = hay[:-1]  # few long units: those beside the stretch that is cut are too long already
    text = document(size)
    depths = [0.0] * len(needles)
    for i, needle in zip(order, ordered, strict=True):
        depths[i] = round(text.index(needle.text) / max(1, len(text) - len(needle.text)), 4)
    return text, depths


def _layout(
    haystack: Haystack, start: int, hay: list[str], needles: list[Needle]
) -> tuple[Callable[[int], str], int, int]:
    """The document as a function of the size of its variable stretch, the size it has in ``hay``, and the largest."""
    bounds = [0, *(nearest_boundary(hay, needle.depth) for needle in needles), len(hay)]
    stretches = ["".join(hay[a:b]) for a, b in pairwise(bounds)]
    vary = _stretch_to_cut(stretches, max(map(len, hay), default=0))
    # the stretch may have to grow: this is the text that follows the hay
    spare = "".join(haystack.cut(start + len(hay), 1024 + sum(map(len, hay)) // 4))

    def document(characters: int) -> str:
        pieces = list(stretches)
        pieces[vary] = _resized(pieces[vary], characters, vary, len(pieces), spare)
        return pieces[0] + "".join(needle.text + piece for needle, piece in zip(needles, pieces[1:], strict=True))

    return document, len(stretches[vary]), len(stretches[vary]) + len(spare)


def _hay_of(haystack: Haystack, start: int, tokens: int, count: Callable[[str], int]) -> tuple[float, list[str]]:
    """Characters per token, and the units that hold about ``tokens`` tokens.

    Measured on a short piece first, then on the whole, so that the needles' places, which are set on this estimate,
    are right to a fraction of a percent.
    """
    probe = "".join(haystack.cut(start, min(_PROBE, 4 * tokens)))
    rate = len(probe) / max(1, count(probe))
    whole = "".join(haystack.cut(start, max(1, round(tokens * rate))))
    rate = len(whole) / max(1, count(whole))
    return rate, haystack.cut(start, max(1, round(tokens * rate)))


def _stretch_to_cut(stretches: list[str], unit: int) -> int:
    """The last stretch, or the first, or the longest: whichever comes first that has room to give.

    The hay is too long by up to one unit, and by the error of its estimate.
    """
    room = unit + sum(map(len, stretches)) // 50
    last = len(stretches) - 1
    for index in (last, 0):
        if len(stretches[index]) >= room:
            return index
    return max(range(last + 1), key=lambda index: len(stretches[index]))


def _resized(stretch: str, characters: int, index: int, number: int, spare: str) -> str:
    """The stretch with ``characters`` characters, cut (or grown) at its side away from the needles."""
    if index == number - 1:
        return (stretch + spare)[:characters]
    if index == 0:
        grown = spare + stretch
        return grown[len(grown) - characters :]
    half = stretch.find(" ", len(stretch) // 2) + 1 or len(stretch) // 2  # between two needles: in the middle
    if characters <= len(stretch) - half:
        return stretch[len(stretch) - characters :]
    return (stretch[:half] + spare)[: characters - (len(stretch) - half)] + stretch[half:]


def _search(tokens: Callable[[int], int], length: int, guess: int, most: int, rate: float) -> int | None:
    """A number of characters in 0..most for which ``tokens(characters) == length``; ``rate`` is characters per token.

    Steps by what is missing, keeps what is known to be too short and too long, and halves where stepping does not
    help. A character more adds at most one token, so between too short and too long there is one that fits.
    """
    short, long, size = -1, most + 1, guess
    for step in range(_MOST_COUNTS):
        if long - short < 2:
            break
        size = min(max(size, short + 1), long - 1)
        found = tokens(size)
        if found == length:
            return size
        if found < length:
            short = size
        else:
            long = size
        size = (short + long) // 2 if step % 4 == 3 else size + _step(length - found, rate)
    # a tokenizer that gains two tokens at one character, or loses one: look around
    around = range(max(0, short - 8), min(most, long + 8) + 1) if short >= 0 and long <= most else range(0)
    return next((size for size in around if tokens(size) == length), None)


def _step(missing: int, rate: float) -> int:
    step = round(missing * rate)
    return step if step else (1 if missing > 0 else -1)
