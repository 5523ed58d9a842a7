"""A benchmark's average: the mean of its tasks' means, per protocol, every task weighing the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.results.cells import Cell
from kvbench.results.statistics import mean
from kvbench.results.tables import ROW_KEYS, WRONG, known, rows_with, task_table

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARKS = ("longbench", "longbench_e")


def average_table(frame: DataFrame, cells: Sequence[Cell], benchmark: str) -> tuple[DataFrame, list[str]] | None:
    """The table of a benchmark's averages, in the columns of :func:`task_table`, and notes about what it leaves out.

    ``n`` counts tasks. A row that lacks a task which another row has gets no average: means over different tasks cannot
    be compared. The gap is the mean over the tasks that have a question. None if ``frame`` has fewer than two tasks.
    """
    import pandas as pd

    part = frame.loc[frame["task"].str.startswith(f"{benchmark}/"), :]
    tasks = sorted(set(part["task"]))
    if len(tasks) < 2:
        return None
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in part.to_dict("records"):
        groups[tuple(row[key] for key in (*ROW_KEYS, "protocol"))].append(row)
    rows = [average_row(group, len(tasks)) for group in groups.values()]
    average = pd.DataFrame(rows)
    average["budget"] = pd.Series([row["budget"] for row in rows], dtype=object)
    table = task_table(average, [])
    with_question = sorted({row["task"] for row in part.to_dict("records") if row["has_question"]})
    notes = [f"Mean over {len(tasks)} tasks: {', '.join(name.split('/', 1)[1] for name in tasks)}."]
    if {"blind", "aware"} <= set(part["protocol"]) and with_question:
        of_tasks = [task_table(rows_with(part, "task", name), cells) for name in with_question]
        table["gap"] = average_gaps(table, of_tasks)
        table["gap_n"] = len(with_question)
        left_out = [name.split("/", 1)[1] for name in tasks if name not in with_question]
        if left_out:
            notes.append(f"aware - blind is over the tasks that have a question; left out: {', '.join(left_out)}.")
    return table, notes


def average_row(group: Sequence[Mapping[str, Any]], tasks: int) -> dict[str, Any]:
    """One row of averages over the tasks' rows in ``group``, in the columns that :func:`task_table` reads."""
    scores = [row["score"] for row in group if known(row["score"])]
    shares = [row["kv_share"] for row in group if known(row["kv_share"])]
    average = mean(scores) if len(scores) == tasks else None
    return {
        **{key: group[0][key] for key in (*ROW_KEYS, "protocol")},
        "has_question": False,  # the gap is over some of the tasks only, and is added afterwards
        "score": None if average is None else round(average, 2),
        "ci_low": None,
        "ci_high": None,
        "n": len(scores),
        "expected": tasks,
        "kv_share": mean(shares) if len(shares) == tasks else None,
        **{name: sum(row[name] for row in group) for name in WRONG},
    }


def average_gaps(table: DataFrame, of_tasks: Sequence[DataFrame]) -> list[float | None]:
    """For each row of ``table`` the mean of the tasks' gaps, or None where a task has none."""
    gaps_of_tasks = [
        {tuple(row[key] for key in ROW_KEYS): row["gap"] for row in rows.to_dict("records")} if "gap" in rows else {}
        for rows in of_tasks
    ]
    averages = []
    for row in table.to_dict("records"):
        gaps = [task.get(tuple(row[key] for key in ROW_KEYS)) for task in gaps_of_tasks]
        average = mean(gaps) if all(known(gap) for gap in gaps) else None
        averages.append(None if average is None else round(average, 2))
    return averages
