"""Errors that are the user's to mend: they name the key, the value and what to do."""

from __future__ import annotations

from typing import Any


class InputError(Exception):
    """Wrong input, found before anything expensive (exit code 2).

    ``key`` is the configuration key or the file, ``value`` what was given, ``reason`` what is wrong with it and
    ``fix`` what to write instead.
    """

    def __init__(self, key: str, value: Any, reason: str, fix: str = "") -> None:
        self.key, self.value, self.reason, self.fix = key, value, reason, fix
        super().__init__(f"{key}={value}: {reason}" + (f" {fix}" if fix else ""))


class SampleError(Exception):
    """One sample cannot be run; it costs one record, never the run."""
