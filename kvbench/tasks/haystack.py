"""Texts to hide things in, as lists of units (sentences or lines) that may be repeated without end."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from kvbench.errors import InputError

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])|\n\s*\n")


@dataclass(frozen=True)
class Haystack:
    """Units of text, each with its own trailing separator, so that concatenation is the text."""

    units: tuple[str, ...]

    def cut(self, start: int, characters: int) -> list[str]:
        """Units from number ``start`` on, around the end if need be, until they hold ``characters`` characters."""
        taken, total, index = [], 0, start % len(self.units)
        while total < characters:
            unit = self.units[index]
            taken.append(unit)
            total += len(unit)
            index = (index + 1) % len(self.units)
        return taken


def van_der_corput(index: int) -> float:
    """The index-th point of the base-2 sequence in [0, 1): bits mirrored at the binary point.

    Of any first 2**k points exactly one lies in each [j / 2**k, (j + 1) / 2**k), so every prefix is spread evenly.
    """
    point, weight = 0.0, 0.5
    while index:
        point += weight * (index & 1)
        index, weight = index >> 1, weight / 2
    return point


def stratified_depth(seed: int, index: int) -> float:
    """Depth of sample ``index``: the sequence above, turned around the circle by an amount that the seed decides."""
    return (van_der_corput(index) + random.Random(f"depths {seed}").random()) % 1.0


def nearest_boundary(units: Sequence[str], depth: float) -> int:
    """Number of units before the boundary that is nearest to ``depth`` (0..1, in characters)."""
    ends = [0, *accumulate(len(unit) for unit in units)]
    target = depth * ends[-1]
    after = bisect_left(ends, target)
    if after > 0 and target - ends[after - 1] <= ends[after] - target:
        return after - 1
    return after


def sentences(text: str) -> list[str]:
    """Sentences of a plain text in order; a blank line always ends one, other line breaks are spaces."""
    found = (" ".join(piece.split()) for piece in _SENTENCE_END.split(text) if piece)
    return [sentence for sentence in found if sentence]


@cache
def pydoc_haystack() -> Haystack:
    """The prose of the topics that ``help()`` shows, which every CPython carries. Differs between its versions."""
    from pydoc_data.topics import topics

    prose = [sentence for name in sorted(topics) for sentence in sentences(_without_markup(topics[name]))]
    # what is left of tables and grammars is no sentence: those have an end, and words
    units = [s + " " for s in prose if s[-1] in ".!?" and len(re.findall(r"\b[A-Za-z]{2,}\b", s)) >= 5]
    return Haystack(tuple(units))


def _without_markup(topic: str) -> str:
    """Paragraphs that begin at most three columns in; examples, grammars, underlines and markers are dropped."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = paragraph.strip("\n").split("\n")
        if re.match(r" {4,}|\s*>>>|\s*\S+ *::=", lines[0]) or "::=" in paragraph or ">>>" in paragraph:
            continue
        lines = [line for line in lines if not re.fullmatch(r"\s*[*=~\-^\"+|]{3,}\s*", line)]
        text = re.sub(r"^\s*(?:[*+-]|\d+\.)\s+", "", "\n".join(lines))
        kept.append(re.sub(r"[*`]{1,2}([^*`\n]+?)[*`]{1,2}(?!\w)", r"\1", text))
    return "\n\n".join(kept)


def folder_haystack(folder: str, key: str = "task.haystack") -> Haystack:
    """Sentences of all ``*.txt`` files of a folder, in the order of their names."""
    root = Path(folder).expanduser()
    files = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not files:
        reason = "has no *.txt file." if root.is_dir() else "is neither a built-in haystack nor a folder."
        raise InputError(key, folder, f"it {reason}", "Give pydoc or a folder of *.txt files.")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise InputError(key, folder, f"a file in it is not UTF-8: {error}.") from error
    units = tuple(sentence + " " for sentence in sentences(text))
    if not units:
        raise InputError(key, folder, "its files hold no text.")
    return Haystack(units)
