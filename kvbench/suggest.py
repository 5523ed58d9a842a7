"""Near misses: what somebody who wrote an unknown name probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Words for the same thing that no spelling distance finds.
SYNONYMS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "gpu": "cuda",
    "metal": "mps",
}


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names closest to ``word``: none, one, or several of which only the last part was written.

    ``qasper`` means longbench/qasper, and ``window`` method.window or model.window. Case and ``-`` against ``_`` do not
    count.
    """
    names = list(dict.fromkeys(known))
    word = _plain(word)
    if SYNONYMS.get(word) in names:
        return [SYNONYMS[word]]
    whole = {_plain(name): [name] for name in names}
    last: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda n: len(re.split(r"[./]", n))):
        last.setdefault(_plain(re.split(r"[./]", name)[-1]), []).append(name)
    for table in (whole, last):
        if word in table:
            return table[word][:2]
    for table in (whole, last):
        close = difflib.get_close_matches(word, table, n=1, cutoff=0.6)
        if close:
            return table[close[0]][:2]
    return []


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean x?``, or nothing."""
    names = [name for name in nearest(word, known) if name != word]
    return f"Did you mean {' or '.join(names)}?" if names else ""


def one_of(word: object, allowed: Iterable[str]) -> str:
    """The fix of a wrong choice: the near miss, if any, and all that is allowed."""
    allowed = list(allowed)
    return f"{did_you_mean(str(word), allowed)} Allowed: {', '.join(allowed)}.".strip()


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
