"""A benchmark's average: the mean of its tasks' means, per protocol, every task weighing the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvbench.results.cells import Cell
from kvbench.results.statistics import mean
from kvbench.results.tables import ROW_KEYS, WRONG, task_table

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARKS = ("longbench", "longbench_e")


def average_table(frame: DataFrame, cells: Sequence[Cell], benchmark: str) -> tuple[DataFrame, list[str]] | None:
    """The table of a benchmark's averages, in the columns of :func:`task_table`, and notes about what it leaves out.

    ``n`` counts tasks. A row that lacks a task which another row has gets no average: means over different tasks cannot
    be compared. The gap is the mean over the tasks that have a question. None if ``frame`` has fewer than two tasks.
    """
    import pandas as pd

    part = frame[frame["task"].str.startswith(f"{benchmark}/")]
    tasks = sorted(part["task"].unique())
    if len(tasks) < 2:
        return None
    rows = [average_row(dict(zip([*ROW_KEYS, "protocol"], key, strict=True)), group, len(tasks))
            for key, group in part.groupby([*ROW_KEYS, "protocol"], sort=False)]  # fmt: skip
    average = pd.DataFrame(rows)
    average["budget"] = pd.Series([row["budget"] for row in rows], dtype=object)
    table = task_table(average, [])
    with_question = sorted(part[part["has_question"].astype(bool)]["task"].unique())
    notes = [f"Mean over {len(tasks)} tasks: {', '.join(name.split('/', 1)[1] for name in tasks)}."]
    if {"blind", "aware"} <= set(part["protocol"]) and with_question:
        table["gap"] = average_gaps(table, [task_table(part[part["task"] == name], cells) for name in with_question])
        table["gap_n"] = len(with_question)
        left_out = [name.split("/", 1)[1] for name in tasks if name not in with_question]
        if left_out:
            notes.append(f"aware - blind is over the tasks that have a question; left out: {', '.join(left_out)}.")
    return table, notes


def average_row(words: dict[str, Any], group: DataFrame, tasks: int) -> dict[str, Any]:
    """One row of averages over the cells in ``group``, in the columns that :func:`task_table` reads."""
    scored = group[group["score"].notna()]
    complete = len(scored) == tasks
    known_share = complete and bool(group["kv_share"].notna().all())
    return {
        **words,
        "has_question": False,  # the gap is over some of the tasks only, and is added afterwards
        "score": round(float(scored["score"].astype(float).mean()), 2) if complete else None,
        "ci_low": None,
        "ci_high": None,
        "n": len(scored),
        "expected": tasks,
        "kv_share": mean(group["kv_share"]) if known_share else None,
        **{name: int(group[name].sum()) for name in WRONG},
    }


def average_gaps(table: DataFrame, of_tasks: Sequence[DataFrame]) -> list[float | None]:
    """For each row of ``table`` the mean of the tasks' gaps, or None where a task has none."""
    known = [
        {tuple(row[key] for key in ROW_KEYS): row["gap"] for row in rows.to_dict("records")} if "gap" in rows else {}
        for rows in of_tasks
    ]
    averages = []
    for row in table.to_dict("records"):
        gaps = [task.get(tuple(row[key] for key in ROW_KEYS)) for task in known]
        there = [gap for gap in gaps if gap is not None and gap == gap]  # pandas writes a missing number as NaN
        averages.append(round(sum(there) / len(there), 2) if len(there) == len(gaps) else None)
    return averages
