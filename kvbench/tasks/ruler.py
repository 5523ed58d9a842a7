"""RULER from its own JSON-lines files (``prepare.py`` of NVIDIA/RULER and its copies write them)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import InputError
from kvbench.suggest import one_of
from kvbench.tasks.lines import read_objects
from kvbench.tasks.sample import Sample, Task


@dataclass(frozen=True)
class RulerFamily:
    """How the ``input`` of one family of tasks is put together: instruction, context, question, answer prefix."""

    instruction: str  # pattern at the start of the input
    question: str  # pattern at the start of the question; the last occurrence counts (examples come before it)
    answer_prefix: str  # how the answer prefix begins
    max_new_tokens: int
    metric: str = "string_match_all"
    has_question: bool = True


FAMILIES = {
    "niah": RulerFamily(
        r"\s*(?:A|Some) special magic .*? afterwards\.\n",
        r"\nWhat (?:is|are all) the special magic ",
        " The special magic ",
        128,
    ),
    "vt": RulerFamily(
        r"\s*Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\s*",
        r"\nQuestion: Find all variables that are assigned the value ",
        " Answer: According to the chain(s) ",
        30,
    ),
    "cwe": RulerFamily(
        r"\s*Below is a numbered list of words\. .*? most often\.\n",
        r"\nQuestion: What are the 10 most common words ",
        " Answer: The top 10 words ",
        120,
        has_question=False,
    ),
    "fwe": RulerFamily(
        r"\s*Read the following coded text .*? coded words\. ",
        r"\nQuestion: Do not provide any explanation\. ",
        " Answer: According to the coded text ",
        50,
        has_question=False,
    ),
    "qa": RulerFamily(
        r"\s*Answer the question based on the given documents\. .*?The following are given documents\.\s*",
        r"\n\nAnswer the question based on the given documents\. [^\n]*\n\nQuestion: ",
        " Answer:",
        32,
        metric="string_match_part",
    ),
}
SUBSETS = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)


def family(subset: str) -> RulerFamily:
    """The family of a task. Raises InputError with the nearest name if there is no such task."""
    if subset not in SUBSETS:
        raise InputError("task", f"ruler/{subset}", "there is no such task.", one_of(subset, SUBSETS))
    return FAMILIES[subset.split("_")[0]]


def build(
    *, encoder: Any = None, seed: int = 0, name: str, subset: str, path: str | None = None, chat: bool = True
) -> Task:
    """All records of one file, in order. ``encoder`` and ``seed`` are unused: the data is fixed.

    ``path`` is the file, or a folder that holds ``<subset>.jsonl`` or ``<subset>/validation.jsonl``.
    """
    rules = family(subset)
    file = _file(subset, path)
    content = file.read_bytes()
    samples = tuple(_sample(rules, subset, number, record, error) for number, record, error in read_objects(content))
    if not samples:
        raise InputError("task.path", str(file), "there is not one record in it.")
    return Task(
        name=name,
        metric=rules.metric,
        max_new_tokens=rules.max_new_tokens,
        samples=samples,
        data_sha256=hashlib.sha256(content).hexdigest(),
        chat=chat,
        has_question=rules.has_question,
    )


def split_input(rules: RulerFamily, text: str) -> tuple[str, str, str, str]:
    """Instruction, context, question and answer prefix; joined they are ``text`` again.

    Raises ValueError if the family's question is not in it.
    """
    questions = list(re.finditer(rules.question, text))
    if not questions:
        raise ValueError("the input does not hold this task's question; is it another task's file?")
    asked = questions[-1]
    prefix = text.rfind(rules.answer_prefix, asked.end())
    end = prefix if prefix >= 0 else len(text)
    head = re.match(rules.instruction, text[: asked.start()], re.DOTALL)
    start = head.end() if head else 0
    return text[:start], text[start : asked.start()], text[asked.start() : end], text[end:]


def _file(subset: str, path: str | None) -> Path:
    if path is None:
        raise InputError("task.path", None, "RULER is read from its files.", f"Give the folder of {subset}.jsonl.")
    source = Path(path).expanduser()
    candidates = [source / f"{subset}.jsonl", source / subset / "validation.jsonl"] if source.is_dir() else [source]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = " nor ".join(str(candidate) for candidate in candidates)
    raise InputError("task.path", path, f"there is no file {names}.")


def _sample(rules: RulerFamily, subset: str, number: int, record: Any, error: str | None) -> Sample:
    if error is None:
        try:
            return _parsed(rules, subset, number, record)
        except (KeyError, TypeError, ValueError) as problem:
            error = f"no RULER record: {problem}"
    return Sample(id=f"line-{number}", context="", question="", answers=(), error=f"line {number}: {error}")


def _parsed(rules: RulerFamily, subset: str, number: int, record: dict[str, Any]) -> Sample:
    text, outputs = record["input"], record["outputs"]
    if not isinstance(text, str) or not isinstance(outputs, list) or not outputs:
        raise TypeError("input must be a text and outputs a list of texts")
    instruction, context, question, prefix = split_input(rules, text)
    separate = record.get("answer_prefix")  # newer releases keep it beside the input
    if not prefix and isinstance(separate, str):
        prefix = separate
    return Sample(
        id=f"{subset}-{record.get('index', number)}-{number}",
        instruction=instruction,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=tuple(str(output) for output in outputs),
        info={"length": record.get("length"), "index": record.get("index")},
    )
