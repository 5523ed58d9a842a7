"""The user's own data: one JSON object a line, with a context, a question about it and the answers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvbench.errors import InputError
from kvbench.tasks.lines import read_objects
from kvbench.tasks.made import at_least
from kvbench.tasks.metrics import unknown_metric
from kvbench.tasks.sample import Sample, Task

_TEXTS = ("instruction", "answer_prefix", "other_question", "other_answer_prefix", "group", "metric")


def build(
    *,
    encoder: Any = None,
    seed: int = 0,
    name: str = "jsonl",
    path: str | None = None,
    metric: str = "qa_f1_score",
    max_new_tokens: int = 64,
    separator: str = "\n\n",
    chat: bool = True,
    has_question: bool = True,
    stop_at_newline: bool = False,
    first_line: bool = False,
) -> Task:
    """All lines of the file, in order. ``encoder`` and ``seed`` are unused: the data is fixed.

    A line is ``{"id", "context", "question", "answers"}``; ``answer`` may stand for a list of one. Optional:
    ``metric``, ``max_new_tokens``, ``classes``, ``group`` (samples with the same context; found by itself otherwise),
    ``instruction``, ``answer_prefix``, ``other_question``, ``other_answer_prefix``. ``separator`` goes before every
    question that is not empty. A wrong line becomes a sample with an error, named after its line.
    """
    problem = unknown_metric(metric)
    if problem:
        raise InputError("task.metric", metric, problem + ".")
    at_least("task.max_new_tokens", max_new_tokens, 1)
    content = _read(path)
    samples = _samples(content, separator)
    if not samples:
        raise InputError("task.path", path, "the file has no lines.")
    return Task(
        name=name,
        metric=metric,
        max_new_tokens=max_new_tokens,
        samples=samples,
        data_sha256=hashlib.sha256(content).hexdigest(),
        chat=chat,
        has_question=has_question,
        stop_at_newline=stop_at_newline,
        first_line=first_line,
    )


def _read(path: str | None) -> bytes:
    if path is None:
        raise InputError("task.path", None, "no file is named.", "Give a file of JSON lines: task.path=FILE.jsonl.")
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InputError("task.path", path, f"the file cannot be read: {error.strerror}.") from error


def _samples(content: bytes, separator: str) -> tuple[Sample, ...]:
    samples: list[Sample] = []
    seen: set[str] = set()
    contexts: dict[str, str] = {}  # group -> its context segment
    for number, record, error in read_objects(content):
        sample = None
        if error is None:
            try:
                sample = _sample(record, separator)
                _check_against(sample, seen, contexts)
            except ValueError as problem:
                error = str(problem)
        if error is not None or sample is None:
            sample = Sample(f"line-{number}", "", "", (), error=f"line {number}: {error}")
            while sample.id in seen:  # a sound line has taken the name
                sample = Sample(sample.id + "-bad", "", "", (), error=sample.error)
        seen.add(sample.id)
        samples.append(sample)
    return tuple(samples)


def _check_against(sample: Sample, seen: set[str], contexts: dict[str, str]) -> None:
    if sample.id in seen:
        raise ValueError(f"the id {sample.id!r} is taken by an earlier line")
    if contexts.setdefault(sample.group, sample.instruction + sample.context) != sample.instruction + sample.context:
        raise ValueError(f"group {sample.group!r} has another context in an earlier line")


def _sample(record: dict[str, Any], separator: str) -> Sample:
    """One line as a sample. Raises ValueError that says what is wrong with it."""
    for key in ("id", "context", "question"):
        if key not in record:
            raise ValueError(f"the key {key} is missing")
    identity = record["id"]
    if isinstance(identity, bool) or not isinstance(identity, (str, int)) or identity == "":
        raise ValueError(f"id must be a text or a whole number, not {identity!r:.60}")
    context, question = _text(record, "context"), _text(record, "question")
    texts = {key: _text(record, key) for key in _TEXTS if record.get(key) is not None}
    if "metric" in texts and (problem := unknown_metric(texts["metric"])):
        raise ValueError(problem)
    limit = record.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_new_tokens must be a whole number, 1 or more, not {limit!r:.60}")
    classes = tuple(_texts(record, "classes")) if record.get("classes") is not None else ()
    if "other_question" in texts:
        texts["other_question"] = _separated(texts["other_question"], separator)
    instruction = texts.get("instruction", "")
    segment = (instruction + "\0" + context).encode(
        "utf-8", "surrogatepass"
    )  # half a character is the encoder's to mend
    texts.setdefault("group", hashlib.sha256(segment).hexdigest()[:16])
    info = {"metric": texts["metric"]} if "metric" in texts else {}  # re-scoring a run's records needs both
    return Sample(
        id=str(identity),
        context=context,
        question=_separated(question, separator),
        answers=_answers(record),
        max_new_tokens=limit,
        classes=classes,
        info={**info, **({"classes": list(classes)} if classes else {})},
        **texts,
    )


def _separated(question: str, separator: str) -> str:
    return separator + question if question else ""


def _answers(record: dict[str, Any]) -> tuple[str, ...]:
    if "answers" not in record and "answer" not in record:
        raise ValueError("the key answers is missing")
    answers = _texts(record, "answers") if "answers" in record else [_text(record, "answer")]
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError("answers must name at least one text, and none that is blank")
    return tuple(answers)


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{key} must be a text, not {record[key]!r:.60}")
    return record[key]


def _texts(record: dict[str, Any], key: str) -> list[str]:
    value = record[key]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key} must be a list of texts, not {value!r:.60}")
    return value
