"""What ``budget=...`` means: stored entries, a share of the tokens in scope, or everything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvbench.errors import InputError

ALLOWED = 'a whole number of entries (128), a share between 0 and 1 (0.25), or "full"'
LARGEST = 2**63 - 1  # what a signed 64-bit integer, and so torch, can hold


@dataclass(frozen=True)
class Budget:
    """How many entries may be stored per KV head, averaged over the layers.

    ``kind`` is ``entries`` (``count`` of them), ``share`` (``count`` is the exact decimal fraction of the tokens in
    scope) or ``full`` (nothing is evicted). ``str(budget)`` is exact, so that 0.875 and 0.88 name different cells.
    """

    kind: str  # entries | share | full
    count: Fraction = Fraction(0)

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """The budget that ``value`` (an int, a float or "full") stands for. Raises InputError for anything else."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and value == "full":
            return cls("full")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError("budget", value, "is not a number.", f"Allowed: {ALLOWED}.")
        if isinstance(value, int):
            if value < 1:
                raise InputError("budget", value, "would store nothing.", f"Allowed: {ALLOWED}.")
            if value > LARGEST:
                raise InputError("budget", value, "is larger than any cache.", f"Allowed: {ALLOWED}.")
            return cls("entries", Fraction(value))
        if not math.isfinite(value):
            raise InputError("budget", value, "is not a finite number.", f"Allowed: {ALLOWED}.")
        if not 0 < value < 1:
            raise InputError("budget", value, _why_not_a_share(value), f"Allowed: {ALLOWED}.")
        # repr is the shortest decimal that reads back as this float: what the user wrote, read exactly
        return cls("share", Fraction(repr(value)))

    def entries(self, tokens: int) -> int:
        """Entries to keep of ``tokens``: at least 1 and at most ``tokens`` (0 of 0); shares round half up, exactly."""
        if tokens < 0:
            raise ValueError(f"a number of tokens cannot be negative: {tokens}")
        if self.kind == "full":
            return tokens
        if self.kind == "entries":
            wanted = int(self.count)
        else:
            # round-half-up(f * n) in integers: (2 * numerator * n + denominator) // (2 * denominator)
            numerator, denominator = self.count.numerator, self.count.denominator
            wanted = (2 * numerator * tokens + denominator) // (2 * denominator)
        return min(max(wanted, 1), tokens)

    def __str__(self) -> str:
        if self.kind == "full":
            return "full"
        if self.kind == "entries":
            return str(int(self.count))
        return _decimal(self.count)


def _why_not_a_share(value: float) -> str:
    """What is wrong with a float outside (0, 1), with what was probably meant."""
    if value <= 0:
        return "would store nothing."
    if value == 1:
        return "is neither a share below 1 nor a whole number: write budget=full to keep everything, or budget=1."
    if value == int(value):
        return f"is not written as a whole number: did you mean {int(value)}?"
    return "is above 1 and not a whole number."


def _decimal(share: Fraction) -> str:
    """The finite decimal of ``share`` in plain digits; below 1e-16 in scientific ones (folder names have a limit)."""
    if share < Fraction(1, 10**16):
        return repr(float(share))
    places = 0
    while (share * 10**places).denominator != 1:
        places += 1
    return f"0.{int(share * 10**places):0{places}d}"
