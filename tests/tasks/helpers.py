"""What the task tests share: a stand-in for the prompt encoder, and predictable files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvbench.tasks.sample import Sample

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics"
TEMPLATE_TOKENS = 7

TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "word": str.split,
    "character": list,
    # like a byte-pair tokenizer: a blank joins the word after it, long words fall apart, digits stand alone
    "pieces": lambda text: re.findall(r" ?[A-Za-z]{1,4}|\d|\s+|.", text, re.DOTALL),
}


class CountingEncoder:
    """Counts tokens of the two segments as PromptEncoder does, and how often it was asked."""

    def __init__(self, kind: str = "pieces") -> None:
        self.tokens, self.calls = TOKENIZERS[kind], 0

    def count(self, sample: Sample, chat: bool) -> int:
        self.calls += 1
        head = len(self.tokens(sample.instruction + sample.context))
        return head + len(self.tokens(sample.question + sample.answer_prefix)) + (TEMPLATE_TOKENS if chat else 0)


def joined(sample: Sample) -> str:
    return sample.instruction + sample.context + sample.question


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines() if line.strip()]


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    """One line per record; bytes are written as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = (r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in records)
    file.write_bytes(b"".join(line + b"\n" for line in content))
    return file


def folder_from(variable: str) -> Path | None:
    """A folder of real data that an environment variable names, or None."""
    value = os.environ.get(variable)
    return Path(value) if value else None
