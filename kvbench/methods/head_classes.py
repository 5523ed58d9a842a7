"""Retrieval heads keep everything, streaming heads keep sinks and a recent window (DuoAttention, arXiv 2410.10819)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.checks import check_whole
from kvbench.engine.streaming import Band
from kvbench.errors import InputError
from kvbench.methods.head_calibration import Calibration, Matrix, calibrated
from kvbench.models.hashing import sha256_json

if TYPE_CHECKING:
    from kvbench.methods.setup import LayerShape, Setup

KEY = "method.allocator"
FORMATS = (".tsv", ".json")
FIX = (
    "Give a .tsv or .json file with a row per layer and a number per KV head (such as a full_attention_heads.tsv that "
    "DuoAttention's authors publish), or leave path out to measure the heads of this model."
)


@dataclass(frozen=True)
class HeadClasses:
    """Allocator: all entries for as many of the most important heads as the budget allows, a window for the others.

    Heads are ranked over all layers by ``importance``, one number per compressed layer and KV head, higher is more
    retrieval-like (the paper's gate values, section 2.2); ties go to the earlier layer, then the earlier head. Every
    head gets ``sinks + recent`` entries, the first heads in rank all n of them. What is left and not enough for one
    more whole head goes to the next in rank, as a longer recent window, so that totals are exact. A budget of at most
    ``sinks + recent`` is the same for every head: there is nothing to tell them apart by.

    This decides how many entries a head keeps; that a streaming head keeps its first and last ones is for the method's
    protected entries and scorer to say (sinks protected, scores by recency).

    Importance comes from ``path`` (a matrix of numbers in a .tsv or .json file) or, without one, from the model itself
    (``kvbench.methods.head_calibration``, which says how that differs from the paper).

    Deviations: the paper fixes the share of retrieval heads, here the budget decides it; its code clips the published
    gates to 0..1 and breaks ties by random noise; it computes prefill with streaming heads too, here prefill is full.
    """

    path: str | None = None
    sinks: int = 64
    recent: int = 256
    importance: Matrix | None = None  # rows: compressed layers, in order; None until the method is prepared
    texts: int = 4  # what follows: the texts that heads are measured on, without a path
    tokens: int = 2048
    seed: int = 0
    source: str = ""  # where importance came from, set by ``prepared``

    def __post_init__(self) -> None:
        smallest = {"sinks": 0, "recent": 1, "texts": 1, "tokens": 1, "seed": 0}
        for name, least in smallest.items():
            check_whole(f"{KEY}.{name}", getattr(self, name), least)
        if self.path is not None:
            self._check_path()
        if self.importance is not None:
            rows = as_rows(self.importance, f"{KEY}.importance", "the matrix")
            object.__setattr__(self, "importance", rows)

    def _check_path(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise InputError(f"{KEY}.path", self.path, "is not the name of a file.", FIX)
        if self.importance is not None and not self.source:
            raise InputError(f"{KEY}.path", self.path, "importance is given as well.", "Leave one of the two out.")
        file = Path(self.path).expanduser()
        if file.suffix.lower() not in FORMATS:
            raise InputError(f"{KEY}.path", self.path, f"is no {' or '.join(FORMATS)} file.", FIX)
        if not file.is_file():
            raise InputError(f"{KEY}.path", self.path, "there is no such file.", FIX)

    def prepared(self, setup: Setup) -> HeadClasses:
        """With the importance of the model's heads; InputError where a file does not fit the model."""
        if self.importance is not None:
            key, value = (f"{KEY}.importance", "(matrix)") if self.path is None else (f"{KEY}.path", self.path)
            return replace(self, importance=fitting(self.importance, setup.layers, key, value))
        if self.path is None:
            calibration = Calibration(self.texts, self.tokens, self.seed, Band(self.sinks, self.recent))
            return replace(self, importance=calibrated(setup, calibration), source="calibrated")
        rows, sha256 = read_matrix(self.path)
        rows = fitting(rows, setup.layers, f"{KEY}.path", self.path)
        return replace(self, importance=rows, source=f"{Path(self.path).name} sha256:{sha256}")

    def facts(self) -> dict[str, Any]:
        """What the records say about the heads' ranking."""
        if self.importance is None:
            return {}
        return {
            "source": self.source or "given",
            "heads": sum(len(row) for row in self.importance),
            "importance_sha256": sha256_json(self.importance),
        }

    def __call__(self, budget: int, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Entries per KV head, int64 [kv_heads] on the CPU for every compressed layer; scores [kv_heads, n] each."""
        heads = [score.shape[0] for score in scores]
        if self.importance is None:
            raise RuntimeError("head classes rank nothing before prepared(setup)")
        if [len(row) for row in self.importance] != heads:
            reason = f"ranks {shape_of(self.importance)} heads, the model compresses {heads}."
            raise InputError(f"{KEY}.importance", "(matrix)", reason)
        if not heads:
            return []
        n = scores[0].shape[1]
        budget, window = min(budget, n), min(self.sinks + self.recent, n)
        entries = torch.full((sum(heads),), min(budget, window), dtype=torch.int64)
        if budget > window:
            flat = torch.tensor([number for row in self.importance for number in row], dtype=torch.float64)
            order = flat.sort(descending=True, stable=True).indices
            whole, rest = divmod((budget - window) * sum(heads), n - window)
            entries[order[:whole]] = n
            entries[order[whole : whole + 1]] += rest  # no head is next where all are whole, and then nothing is left
        return [layer.clone() for layer in entries.split(heads)]


def read_matrix(path: str) -> tuple[Matrix, str]:
    """The numbers of a file, and its SHA-256. Columns of a .tsv file are separated by white space."""
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"{KEY}.path", path, f"cannot be read: {error.strerror}.", FIX) from error
    try:
        text = content.decode("utf-8")
        if Path(path).suffix.lower() == ".json":
            rows = json.loads(text)
        else:
            rows = [[float(number) for number in line.split()] for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{KEY}.path", path, f"is no table of numbers: {error}.", FIX) from error
    return as_rows(rows, f"{KEY}.path", path), hashlib.sha256(content).hexdigest()


def as_rows(rows: Any, key: str, value: Any) -> Matrix:
    """Rows of finite numbers; InputError that says which one is not."""
    if isinstance(rows, torch.Tensor):
        rows = rows.tolist()
    if not _is_list(rows) or not all(_is_list(row) for row in rows):
        raise InputError(key, value, "is not a list of rows, one per layer.", FIX)
    matrix = tuple(tuple(row) for row in rows)
    for layer, row in enumerate(matrix):
        for head, number in enumerate(row):
            if not _is_finite(number):
                reason = f"row {layer + 1}, column {head + 1} is {number!r}, not a finite number."
                raise InputError(key, value, reason, FIX)
    return tuple(tuple(float(number) for number in row) for row in matrix)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def fitting(rows: Matrix, layers: Sequence[LayerShape], key: str, value: str) -> Matrix:
    """The rows of the compressed layers, from a matrix with rows for those or for all layers of the model."""
    found = [len(row) for row in rows]
    every = [layer.kv_heads for layer in layers]
    compressed = [layer.kv_heads for layer in layers if not layer.sliding]
    if found == compressed:
        return rows
    if found == every:
        return tuple(row for row, layer in zip(rows, layers, strict=True) if not layer.sliding)
    expected = f"{_shape(compressed)} (layers x KV heads of this model)"
    if compressed != every:
        expected = f"{_shape(compressed)} (compressed layers x KV heads) or {_shape(every)} (all layers)"
    raise InputError(key, value, f"has {_shape(found)} numbers, expected {expected}.", FIX)


def shape_of(rows: Matrix) -> str:
    return _shape([len(row) for row in rows])


def _shape(lengths: list[int]) -> str:
    """``32 x 8``, or the length of every row where they differ."""
    if len(set(lengths)) <= 1:
        return f"{len(lengths)} x {lengths[0] if lengths else 0}"
    return f"{len(lengths)} rows of {', '.join(map(str, lengths))}"
