"""How a task's predictions are scored, from its name alone: no data, no tokenizer, nothing heavy imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import InputError
from kvbench.suggest import did_you_mean
from kvbench.tasks import longbench, ruler
from kvbench.tasks.metrics import unknown_metric

_OWN = {"passkey": "passkey", "niah": "contains"}


@dataclass(frozen=True)
class ScoringRules:
    """What is needed beside prediction and answers."""

    metric: str
    first_line: bool = False
    extended: bool = False  # LongBench-E: scores by length bucket as well


def scoring_rules(name: str, config: Mapping[str, Any] | None = None) -> ScoringRules:
    """The rules of task ``name``; ``config`` is its resolved config (jsonl keeps its metric there).

    Raises InputError with the nearest name for an unknown task.
    """
    family, _, subset = name.partition("/")
    if family in ("longbench", "longbench_e") and subset:
        extended = family == "longbench_e"
        task = longbench.rules(subset, extended)
        return ScoringRules(task.metric, task.first_line, extended)
    if family == "ruler" and subset:
        return ScoringRules(ruler.family(subset).metric)
    if name in _OWN:
        return ScoringRules(_OWN[name])
    if config is not None and "metric" in config:  # the user's own data
        problem = unknown_metric(config["metric"])
        if problem:
            raise InputError("task.metric", config["metric"], problem + ".")
        return ScoringRules(config["metric"], bool(config.get("first_line", False)))
    raise InputError("task", name, "there is no task of this name with rules of its own.", did_you_mean(name, _names()))


def _names() -> list[str]:
    return [
        *_OWN,
        *(f"longbench/{subset}" for subset in longbench.tasks()),
        *(f"longbench_e/{subset}" for subset, task in longbench.tasks().items() if task.extended),
        *(f"ruler/{subset}" for subset in ruler.SUBSETS),
    ]
