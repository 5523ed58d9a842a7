"""Scores of predictions, 0..100, by a task's rules."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.metrics import EXTRA_METRICS, MEAN_OVER_ANSWERS, METRICS, unknown_metric
from kvbench.tasks.sample import Sample, Task


def first_line_of(prediction: str) -> str:
    """What LongBench scores of few-shot tasks: the rest is the model inventing further examples."""
    return prediction.lstrip("\n").split("\n")[0]


def score_answers(
    metric: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = (), first_line: bool = False
) -> float:
    """Score 0..1 over all gold answers: the best one, starting at 0 (string_match_all: their mean).

    Raises ValueError if the metric is unknown or cannot be computed.
    """
    problem = unknown_metric(metric)
    if problem:
        raise ValueError(problem)
    if first_line:
        prediction = first_line_of(prediction)
    values = [METRICS[metric](prediction, answer, classes) for answer in answers]
    if metric in MEAN_OVER_ANSWERS and values:
        return sum(values) / len(values)
    return max([0.0, *values])


def score(task: Task, sample: Sample, prediction: str) -> float:
    """Score 0..100 of one prediction. A metric that raises is the caller's to record, never a zero."""
    return _score(task, sample, prediction, sample.metric or task.metric)


def extra_scores(task: Task, sample: Sample, prediction: str) -> dict[str, float]:
    """Further named metrics of the same prediction, 0..100 (rouge-score's rougeL beside the official ROUGE)."""
    names = EXTRA_METRICS.get(sample.metric or task.metric, {})
    return {name: _score(task, sample, prediction, metric) for name, metric in names.items()}


def _score(task: Task, sample: Sample, prediction: str, metric: str) -> float:
    if not sample.answers:
        raise ValueError(f"sample {sample.id} has no gold answer to score against")
    return 100 * score_answers(metric, prediction, sample.answers, sample.classes, task.first_line)
