"""Scores of prediction files as LongBench's own runner writes them: ``pred, answers, all_classes, length`` a line.

Added, divided and rounded in the order in which the official evaluation does it, so that published scores come out to
the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import InputError
from kvbench.tasks.lines import read_objects
from kvbench.tasks.longbench import BUCKETS, bucket
from kvbench.tasks.longbench_data import strings
from kvbench.tasks.rules import ScoringRules, scoring_rules
from kvbench.tasks.scoring import score_answers


def score_file(task: str, file: str | Path) -> dict[str, Any]:
    """``{"task", "metric", "score", "n"}``, and ``buckets`` for LongBench-E (null for a bucket without lines).

    Raises InputError for an unknown task, a file that cannot be read, and a line that cannot be scored.
    """
    rules = scoring_rules(task)
    lines = _read(Path(file))
    # the official evaluation uses the label set of the last line for all of them
    classes = lines[-1]["all_classes"]
    scores = [_score(rules, classes, line, file) for line in lines]
    total = 0.0
    for score in scores:  # in order: sum() adds differently from Python 3.12 on
        total += score
    result = {"task": task, "metric": rules.metric, "score": round(100 * total / len(scores), 2), "n": len(scores)}
    if rules.extended:
        result["buckets"] = _buckets(scores, lines, file)
    return result


def _score(rules: ScoringRules, classes: Sequence[str], line: dict[str, Any], file: str | Path) -> float:
    try:
        return score_answers(rules.metric, line["pred"], line["answers"], classes, rules.first_line)
    except ValueError as error:
        raise InputError("predictions", file, f"line {line['number']}: {error}.") from error


def _buckets(scores: list[float], lines: list[dict[str, Any]], file: str | Path) -> dict[str, float | None]:
    import numpy as np  # the official means and roundings are numpy's, which differ from Python's in the last digit

    found: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for score, line in zip(scores, lines, strict=True):
        length = line["length"]
        if isinstance(length, bool) or not isinstance(length, (int, float)):
            raise InputError("predictions", file, f"line {line['number']}: LongBench-E needs its length.")
        found[bucket(length)].append(score)
    return {name: float(np.round(100 * np.mean(values), 2)) if values else None for name, values in found.items()}


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError("predictions", file, f"the file cannot be read: {error.strerror}.") from error
    lines = []
    for number, record, error in read_objects(content):
        if error is None:
            try:
                lines.append(_line(number, record))
                continue
            except (KeyError, ValueError) as problem:
                error = f"the key {problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise InputError("predictions", file, f"line {number}: {error}.")
    if not lines:
        raise InputError("predictions", file, "there is not one prediction in it.")
    return lines


def _line(number: int, record: dict[str, Any]) -> dict[str, Any]:
    prediction, answers = record["pred"], strings(record["answers"])
    if not isinstance(prediction, str):
        raise ValueError(f"pred must be a text, not {prediction!r:.60}")
    if not answers:
        raise ValueError("there is no gold answer")
    classes = strings(record.get("all_classes"))
    return {
        "number": number,
        "pred": prediction,
        "answers": answers,
        "all_classes": classes,
        "length": record.get("length"),
    }
