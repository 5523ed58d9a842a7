"""From cells to tables: a row per cell in one tidy frame, and per task a table of methods and budgets by protocol.

Protocols are never averaged. Every number is computed from the records, so a table agrees with the records it lies
beside even when summary.json was written by an older version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from kvbench.results.cells import Cell
from kvbench.results.statistics import bootstrap_ci95, mean
from kvbench.results.summary import LENGTH_BUCKETS, SECONDS, record_group, summarise

if TYPE_CHECKING:  # pandas takes half a second to import: the commands that print help must not wait for it
    from pandas import DataFrame

PROTOCOLS = ("blind", "aware", "swapped")
WRONG = ("failed", "empty", "nonfinite", "truncated", "uncompressed")
ROW_KEYS = ("model", "method", "budget", "variant", "seed")
# Parts of an identity that have a column of their own; whatever else differs between cells becomes their variant.
NAMED_PARTS = frozenset({"budget", "budget_bytes", "protocol.name", "seed", "method.name", "task.name"})


def cells_frame(cells: Sequence[Cell]) -> DataFrame:
    """One row per cell, unknown numbers null; sorted by experiment, task and row keys.

    Cells that cannot be read, and those that failed before their identity was known, have no numbers and no row.
    """
    import pandas as pd

    readable = [cell for cell in cells if cell.fault is None and cell.identity]
    variants = variant_texts(readable)
    rows = [cell_row(cell, variants[cell.folder]) for cell in readable]
    rows.sort(key=lambda row: (row["experiment"], row["task"], *row_order(row), protocol_order(row["protocol"])))
    frame = pd.DataFrame(rows, columns=cell_row_columns())
    # A column of 0.5 and 128 would become floats, and the budget 128.0.
    frame["budget"] = pd.Series([row["budget"] for row in rows], dtype=object)
    return frame


def rows_with(frame: DataFrame, column: str, value: Any) -> DataFrame:
    """The rows whose ``column`` has this value."""
    return frame.loc[frame[column] == value, :]


def known(value: Any) -> bool:
    """Neither None nor pandas' NaN for a missing number."""
    return value is not None and value == value


def cell_row_columns() -> list[str]:
    """The frame's columns."""
    names = ["experiment", "task", *ROW_KEYS, "protocol", "status", "metric", "has_question", "n", "expected"]
    names += ["score", "ci_low", "ci_high", "kv_share", "kept_entries", "entries_at_first_decode"]
    names += ["kv_bytes_device", "kv_bytes_host", "kv_bytes_full", *SECONDS]
    names += ["tokens_per_s", "peak_bytes", "ok", *WRONG, "answer_lost"]
    return [*names, *(f"{what}_{name}" for name, *_ in LENGTH_BUCKETS for what in ("score", "n")), "folder"]


def cell_row(cell: Cell, variant: str) -> dict[str, Any]:
    """One cell as a flat row; the columns are those of :func:`cell_row_columns`."""
    summary = summarise(cell.config, cell.task, cell.records)
    low, high = summary["ci95"] or (None, None)
    kv, time, buckets = summary["kv"], summary["time"], summary.get("buckets", {})
    row = {
        "experiment": cell.experiment,
        "task": cell.task.name,
        **{key: cell.words[key] for key in ("model", "method", "budget", "seed", "protocol")},
        "variant": variant,
        "status": cell.status,
        "metric": cell.task.metric,
        "has_question": cell.task.has_question,
        **{key: summary[key] for key in ("n", "expected", "score")},
        "ci_low": low,
        "ci_high": high,
        "kv_share": kv["share"],
        "kept_entries": summary["budget"]["kept_entries"],
        "entries_at_first_decode": kv["entries_at_first_decode"],
        **{f"kv_{name}": kv[name] for name in ("bytes_device", "bytes_host", "bytes_full")},
        **{name: time[name] for name in (*SECONDS, "tokens_per_s", "peak_bytes")},
        **summary["counts"],
        **{f"{what}_{name}": buckets.get(name, {}).get(what) for name, *_ in LENGTH_BUCKETS for what in ("score", "n")},
        "folder": str(cell.folder),
    }
    return {name: row[name] for name in cell_row_columns()}


def variant_texts(cells: Sequence[Cell]) -> dict[Any, str]:
    """What tells apart cells with the same model, method, budget, protocol, seed and task: ``method.window=32``.

    Only keys that differ between cells of one experiment, task, model and method are named, so that most are empty
    and the two protocols of one variant stand in one row.
    """
    families: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        families[cell.experiment, cell.task.name, cell.words["model"], cell.words["method"]].append(cell)
    texts = {}
    for family in families.values():
        flat = {cell.folder: flatten(cell.identity) for cell in family if cell.identity}
        differing = differing_keys(list(flat.values()))
        for cell in family:
            values = flat.get(cell.folder, {})
            texts[cell.folder] = ", ".join(f"{key}={short(values[key])}" for key in differing if key in values)
    return texts


def differing_keys(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ between flattened identities, shortest first.

    Of several that say the same (``method.window`` and ``method.scorer.window``) only the shortest is named.
    """
    found = {key for values in identities for key in values} - NAMED_PARTS
    keys = sorted((k for k in found if not told_by_match(k, identities)), key=lambda key: (key.count("."), key))
    named: dict[tuple[str, ...], str] = {}
    for key in keys:
        column = tuple(repr(values.get(key)) for values in identities)
        if len(set(column)) > 1:
            named.setdefault(column, key)
    return list(named.values())


def told_by_match(key: str, identities: Sequence[Mapping[str, Any]]) -> bool:
    """Does the name of the matched method, which the budget's column shows, say what this key of it is?"""
    if not key.startswith("match."):
        return False
    values: dict[Any, set[str]] = defaultdict(set)
    for identity in identities:
        values[identity.get("match.name")].add(repr(identity.get(key)))
    return all(len(of_name) == 1 for of_name in values.values())


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: item
        for key, inner in value.items()
        for name, item in flatten(inner, f"{prefix}.{key}".strip(".")).items()
    }


def short(value: Any) -> str:
    """A hash cut to 8 digits, other values as they are."""
    text = str(value)
    return text[:8] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def row_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key of a row: the uncompressed reference first, numbers by size (shares before counts), then bytes."""
    budget = row["budget"]
    number = isinstance(budget, Real)
    text = str(budget)
    full = (0, 0.0, "") if budget == "full" else (1, float(budget), "") if number else (2, 0.0, text)
    if text.startswith("bytes="):
        full = (2, float(text.removeprefix("bytes=")), "")
    method = str(row["method"])
    return str(row["model"]), method != "full", method, full, str(row["variant"]), row["seed"]


def protocol_order(name: str) -> int:
    """Blind, aware, swapped, then others."""
    return PROTOCOLS.index(name) if name in PROTOCOLS else len(PROTOCOLS)


# -- one task's table --------------------------------------------------------------------------------------------


def task_table(frame: DataFrame, cells: Sequence[Cell]) -> DataFrame:
    """Methods and budgets by protocol, from the rows of one task.

    Columns: the row keys, then for each protocol ``<protocol>_score``, ``_ci_low``, ``_ci_high``, ``_n``, ``_kv_share``
    and one for each way to go wrong; where the task has a question, ``aware_minus_blind`` with its interval and n.
    """
    import pandas as pd

    by_folder = {str(cell.folder): cell for cell in cells}
    protocols = sorted(frame["protocol"].unique(), key=lambda name: (protocol_order(name), name))
    compare = bool(frame["has_question"].all()) and {"blind", "aware"} <= set(protocols)
    grouped: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
    for row in frame.to_dict("records"):
        grouped[tuple(row[key] for key in ROW_KEYS)][row["protocol"]] = row
    rows = []
    for key, of_protocol in grouped.items():
        row = dict(zip(ROW_KEYS, key, strict=True))
        for protocol in protocols:
            row |= protocol_columns(protocol, of_protocol.get(protocol))
        if compare:
            pair = [by_folder.get(of_protocol.get(name, {}).get("folder", "")) for name in ("aware", "blind")]
            row |= gap_columns(*pair)
        rows.append(row)
    rows.sort(key=row_order)
    return pd.DataFrame(rows)


PROTOCOL_COLUMNS = ("score", "ci_low", "ci_high", "n", "expected", "kv_share", *WRONG)


def protocol_columns(protocol: str, row: Mapping[str, Any] | None) -> dict[str, Any]:
    """One protocol's columns in a row of a task's table; nulls where there is no such cell."""
    return {f"{protocol}_{name}": None if row is None else row[name] for name in PROTOCOL_COLUMNS}


def gap_columns(aware: Cell | None, blind: Cell | None) -> dict[str, Any]:
    """What sight of the question is worth: the mean of aware minus blind over the samples that both answered."""
    nothing: dict[str, Any] = dict.fromkeys(("gap", "gap_ci_low", "gap_ci_high", "gap_n"))
    if aware is None or blind is None:
        return nothing
    scores = {record["sample_id"]: record["score"] for record in blind.records if is_scored(record)}
    both = [record for record in aware.records if is_scored(record) and record["sample_id"] in scores]
    differences = [record["score"] - scores[record["sample_id"]] for record in both]
    low, high = bootstrap_ci95(differences, [record_group(record) for record in both]) or (None, None)
    average = mean(differences)
    values = (None if average is None else round(average, 2), low, high, len(differences))
    return dict(zip(nothing, values, strict=True))


def is_scored(record: Mapping[str, Any]) -> bool:
    """Whether a record counts in the mean."""
    return record["status"] == "ok" and record.get("score") is not None
