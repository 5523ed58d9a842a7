"""What a task is made of: samples, and the rules by which their answers are scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One question about one context, with its gold answers.

    The text that the model reads is ``instruction + context`` (the context segment) followed by ``question`` and
    ``answer_prefix`` (the question segment), joined without separators. Only ``context`` is ever truncated.
    """

    id: str
    context: str  # the document; all that truncation may cut
    question: str  # everything after the document, the instructions that follow it included
    answers: tuple[str, ...]
    instruction: str = ""  # everything before the document
    answer_prefix: str = ""  # the first words of the answer, placed after the chat template's tail
    group: str = ""  # samples with the same group share their context; empty: a group of its own
    other_question: str | None = None  # what protocol=swapped asks first; None: another sample's question is taken
    other_answer_prefix: str = (
        ""  # follows other_question as answer_prefix follows question: it must not give that away
    )
    metric: str | None = None  # overrides the task's metric (jsonl)
    max_new_tokens: int | None = None  # overrides the task's limit (jsonl)
    classes: tuple[str, ...] = ()  # label set of classification tasks
    info: dict[str, Any] = field(default_factory=dict)  # depth, keys, language, length ...: copied into the record
    error: str | None = None  # why this record could not be read; such a sample is recorded as failed, never run


@dataclass(frozen=True)
class Task:
    """A named list of samples and the rules that go with it."""

    name: str  # "longbench/qasper"
    metric: str  # a name in kvbench.tasks.metrics.METRICS
    max_new_tokens: int
    samples: tuple[Sample, ...]
    data_sha256: str  # content hash of what the samples were made from
    chat: bool = True  # may the prompt be wrapped in the model's chat template?
    has_question: bool = True  # False: the text after the document is the same for every sample (a fixed instruction)
    stop_at_newline: bool = False  # stop at the first newline token, after at least one token
    first_line: bool = False  # score only the first line of the prediction
