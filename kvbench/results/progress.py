"""How far a run is: a bar on a terminal, plain lines in logs."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)
EVERY_SECONDS = 30.0


class Progress:
    """Counts ``total`` steps. A log line every 30 s with rate and remaining time; a bar only if stderr is a terminal.

    With a bar, log lines meant for the terminal are printed above it; carriage returns never reach a file.
    """

    def __init__(
        self,
        total: int,
        what: str,
        *,
        unit: str = "sample",
        done: int = 0,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.what, self.unit, self.done = total, what, unit, done
        self._first = done  # samples of an earlier call say nothing about the speed of this one
        self._every, self._clock = every, clock
        self._start = self._last = clock()
        self._stack = contextlib.ExitStack()
        self._bar: tqdm | None = tqdm(
            total=total, initial=done, desc=what, unit=unit, disable=None, file=sys.stderr, leave=False
        )
        if not self._bar.disable:
            self._stack.enter_context(logging_redirect_tqdm())

    def update(self, steps: int = 1, note: str = "") -> None:
        """``steps`` more are done; ``note`` (the sample's id) stands at the end of the line."""
        self.done += steps
        if self._bar is not None:
            self._bar.update(steps)
        now = self._clock()
        if now - self._last >= self._every and self.done < self.total:
            self._last = now
            log.info("%s%s", self.line(now), f", {note}" if note else "")

    def line(self, now: float) -> str:
        """``qasper: 12/50 samples (24 %), 2.0 samples/min, 19m00s left``."""
        elapsed, here = now - self._start, self.done - self._first
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        text = f"{self.what}: {self.done}/{self.total} {self.unit}s{share}"
        if here == 0 or elapsed <= 0:
            return text
        left = elapsed / here * (self.total - self.done)
        return f"{text}, {speed(here / elapsed, self.unit)}, {duration(left)} left"

    def close(self) -> None:
        """Log the last line and take the bar away. Safe to call twice."""
        if self._bar is None:
            return
        now = self._clock()
        log.info("%s: %d/%d %ss in %s", self.what, self.done, self.total, self.unit, duration(now - self._start))
        self._bar.close()
        self._bar = None
        self._stack.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def speed(per_second: float, unit: str) -> str:
    """``3.2 samples/s``, or per minute where it is slow."""
    return f"{per_second:.1f} {unit}s/s" if per_second >= 1 else f"{60 * per_second:.1f} {unit}s/min"


def duration(seconds: float) -> str:
    """``45s``, ``19m00s``, ``3h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
