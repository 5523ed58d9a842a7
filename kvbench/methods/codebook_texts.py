"""The texts that codebooks are fitted to, and the settings of the fit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvbench.checks import check_whole
from kvbench.errors import InputError
from kvbench.models.hashing import sha256_file, sha256_json
from kvbench.results.files import parse_strict
from kvbench.suggest import one_of
from kvbench.tasks.haystack import pydoc_haystack

KEY = "method.codec.fit"
GENERATED = "generated"
SUFFIXES = (".txt", ".jsonl")
CHARACTERS = 16  # of a text read per token wanted: no tokenizer has longer tokens on average
DATA_FIX = "Write generated, or the path of a .txt file or of a .jsonl file with a context or a text in every line."


@dataclass(frozen=True)
class FitSettings:
    """On which texts codebooks are fitted, and how.

    ``data`` is ``generated`` or the path of a file. Generated texts are sentences of the topics of ``help()``, which
    every CPython carries, shuffled by the seed: no sample's text, needle or question is in them. (The built-in
    haystack of passkey and niah is made of the same sentences in their own order; name a file to keep even those
    apart.) A .jsonl file has a text in every line (``context`` or ``text``), of which the seed picks; a .txt file is
    cut into ``texts`` equal stretches. Of every text the first ``tokens`` tokens are read.

    ``iterations`` are the most passes over all keys; the paper's settings are said to be 200, with batches of 10,000.
    """

    data: str = GENERATED
    texts: int = 3
    tokens: int = 4096
    seed: int = 1234
    iterations: int = 20
    batch_size: int = 10_000

    def __post_init__(self) -> None:
        # scikit-learn cannot end after a single step
        smallest = {"texts": 1, "tokens": 1, "seed": 0, "iterations": 2, "batch_size": 1}
        for name, least in smallest.items():
            check_whole(f"{KEY}.{name}", getattr(self, name), least, 2**32 - 1)
        if not isinstance(self.data, str) or not self.data:
            raise InputError(f"{KEY}.data", self.data, "is not the name of data.", DATA_FIX)
        if self.data != GENERATED:
            file = Path(self.data).expanduser()
            if file.suffix.lower() not in SUFFIXES:
                raise InputError(f"{KEY}.data", self.data, f"is no {' or '.join(SUFFIXES)} file.", DATA_FIX)
            if not file.is_file():
                raise InputError(f"{KEY}.data", self.data, "there is no such file.", DATA_FIX)

    @property
    def name(self) -> str:
        """What records call the data: not where it lies."""
        return self.data if self.data == GENERATED else Path(self.data).name


def as_settings(value: Any) -> FitSettings:
    """``value`` or what a mapping of a configuration says; InputError names an unknown key."""
    if isinstance(value, FitSettings):
        return value
    if not isinstance(value, Mapping):
        raise InputError(KEY, value, "is not a mapping of settings.", "See conf/method/codec/hcattention.yaml.")
    known = [field.name for field in fields(FitSettings)]
    for name in value:
        if name not in known:
            raise InputError(f"{KEY}.{name}", value[name], "is not a setting.", one_of(str(name), known))
    return FitSettings(**{str(name): value[name] for name in value})


@dataclass(frozen=True)
class Texts:
    """Texts to fit on, and the hash of what they were made from."""

    texts: tuple[str, ...]
    sha256: str


def read_texts(fit: FitSettings) -> Texts:
    """The texts that the settings name; InputError where a file has too few or is not what it should be."""
    if fit.data == GENERATED:
        texts = tuple(generated(fit.seed, index, fit.tokens * CHARACTERS) for index in range(fit.texts))
        return Texts(texts, sha256_json(texts))
    file = Path(fit.data).expanduser()
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{KEY}.data", fit.data, f"cannot be read: {error}.", DATA_FIX) from error
    if file.suffix.lower() == ".txt":
        stretch = len(content) // fit.texts
        texts = [content[index * stretch : (index + 1) * stretch] for index in range(fit.texts)]
    else:
        texts = _lines(content, fit.data)
        if len(texts) < fit.texts:
            reason = f"{fit.data} has only {len(texts)} texts."
            raise InputError(f"{KEY}.texts", fit.texts, reason, f"Use at most {len(texts)}.")
        texts = random.Random(f"codebook {fit.seed}").sample(texts, fit.texts)
    if not all(text.strip() for text in texts):
        raise InputError(f"{KEY}.data", fit.data, "a text that was chosen from it is empty.", DATA_FIX)
    return Texts(tuple(text[: fit.tokens * CHARACTERS] for text in texts), sha256_file(file))


def generated(seed: int, index: int, characters: int) -> str:
    """Text number ``index``: shuffled sentences, shuffled again where all of them are not enough."""
    rng = random.Random(f"codebook {seed} {index}")
    taken: list[str] = []
    length = 0
    while length < characters:
        sentences = list(pydoc_haystack().units)
        rng.shuffle(sentences)
        taken += sentences
        length += sum(map(len, sentences))
    return "".join(taken)[:characters]


def _lines(content: str, path: str) -> list[str]:
    texts = []
    # split at line feeds only: str.splitlines would also split at characters that JSON strings may contain
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_strict(line.encode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{KEY}.data", path, f"line {number} is not JSON: {error}.", DATA_FIX) from error
        text = (entry.get("context") or entry.get("text")) if isinstance(entry, Mapping) else None
        if not isinstance(text, str):
            raise InputError(f"{KEY}.data", path, f"line {number} has neither a context nor a text.", DATA_FIX)
        texts.append(text)
    return texts
