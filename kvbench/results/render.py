"""Tables as files (CSV, Markdown, LaTeX) and as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.results.averages import BENCHMARKS, average_table
from kvbench.results.cells import Cell, progress
from kvbench.results.checks import last_line
from kvbench.results.files import write_whole
from kvbench.results.identity import file_name
from kvbench.results.summary import LENGTH_BUCKETS
from kvbench.results.tables import WRONG, cells_frame, known, protocol_order, rows_with, task_table

if TYPE_CHECKING:
    from pandas import DataFrame

UNKNOWN = "-"
LEGEND = (
    "Scores are on 0..100, with 95 % bootstrap intervals. KV is the measured share of the full cache's bytes at the "
    "first decode step. n is the number of samples in the mean, of those asked for where they differ."
)
NO_QUESTION = (
    "This task asks no question of its own (the text after the document is the same for every sample), so it is left "
    "out of the comparison of aware with blind."
)
Row = Mapping[str, Any]


def write_tables(cells: Sequence[Cell]) -> list[Path]:
    """Write ``<runs>/<experiment>/tables/<task>.{csv,md,tex}`` for all cells, and the benchmarks' averages.

    Returns the files. ``tables/cells.csv`` beside them has a row per cell with all that is known of it: scores, bytes,
    seconds, counts. Tables lie beside the cells they are made of, whatever folder the cells were searched from.
    """
    frame = cells_frame(cells)
    folders = {str(cell.folder): cell.experiment_folder for cell in cells if cell.fault is None}
    frame["folder_of_experiment"] = [str(folders[name]) for name in frame["folder"]]
    written = []
    for experiment in dict.fromkeys(frame["folder_of_experiment"]):
        part = rows_with(frame, "folder_of_experiment", experiment)
        folder = Path(experiment, "tables")
        folder.mkdir(parents=True, exist_ok=True)
        everything = part.drop(columns="folder_of_experiment").to_csv(index=False)
        write_whole(folder / "cells.csv", everything.encode("utf-8"))
        for task in dict.fromkeys(part["task"]):
            rows = rows_with(part, "task", task)
            written += write_table(folder, task, rows, task_table(rows, cells), task_notes(rows, cells))
        for benchmark in BENCHMARKS:
            if average := average_table(part, cells, benchmark):
                table, notes = average
                written += write_table(folder, f"{benchmark}/average", part, table, [LEGEND, *notes])
    return written


def write_table(folder: Path, task: str, rows: DataFrame, table: DataFrame, notes: list[str]) -> list[Path]:
    """One table in three formats: raw numbers as CSV, formatted ones as Markdown and LaTeX."""
    path = folder.joinpath(*map(file_name, task.split("/")))
    path.parent.mkdir(parents=True, exist_ok=True)
    headers, body = formatted(table)
    metrics = sorted(set(rows["metric"])) if not task.endswith("/average") else ["mean of task means"]
    caption = f"{task}: {', '.join(metrics)}; model {', '.join(sorted(set(rows['model'])))}"
    buckets = bucket_table(rows) if task.startswith("longbench_e/") and not task.endswith("/average") else None
    texts = {
        "csv": table.to_csv(index=False),
        "md": markdown(caption, headers, body, notes, buckets),
        "tex": latex(caption, headers, body, notes),
    }
    for suffix, text in texts.items():
        write_whole(path.with_name(f"{path.name}.{suffix}"), text.encode("utf-8"))
    return [path.with_name(f"{path.name}.{suffix}") for suffix in texts]


def task_notes(rows: DataFrame, cells: Sequence[Cell]) -> list[str]:
    """What a reader must know beside the numbers of one task."""
    notes = [LEGEND]
    if not rows["has_question"].all():
        notes.append(NO_QUESTION)
    unfinished = {str(cell.folder): cell for cell in cells if cell.status != "done"}
    notes += [unfinished_line(unfinished[name]) for name in rows["folder"] if name in unfinished]
    return notes


# -- formatting --------------------------------------------------------------------------------------------------


def formatted(table: DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headers and cells as text. Row keys that are the same everywhere, and empty ones, have no column."""
    rows = table.to_dict("records")
    protocols = [name.removesuffix("_score") for name in table.columns if name.endswith("_score")]
    keys = [
        key
        for key in ("model", "method", "budget", "variant", "seed")
        if key in ("method", "budget") or len({str(row[key]) for row in rows}) > 1
    ]
    headers = [*keys, *(text for name in protocols for text in (name, f"{name} KV", f"{name} n"))]
    gap = "gap" in table
    headers += [*(["aware - blind"] if gap else []), "not ok"]
    body = []
    for row in rows:
        line = [str(row[key]) or UNKNOWN for key in keys]
        for name in protocols:
            line += [
                with_interval(row[f"{name}_score"], row[f"{name}_ci_low"], row[f"{name}_ci_high"]),
                percent(row[f"{name}_kv_share"]),
                out_of(row[f"{name}_n"], row[f"{name}_expected"]),
            ]
        if gap:
            line.append(with_interval(row["gap"], row.get("gap_ci_low"), row.get("gap_ci_high"), sign="+"))
        wrong = [(name, wrong_text({key: row[f"{name}_{key}"] for key in WRONG}, row["budget"])) for name in protocols]
        line.append("; ".join(f"{name}: {text}" for name, text in wrong if text) or UNKNOWN)
        body.append(line)
    return headers, body


def number(value: Any, pattern: str = ".2f") -> str:
    """A formatted number, or a dash."""
    return format(value, pattern) if known(value) else UNKNOWN


def with_interval(score: Any, low: Any, high: Any, sign: str = "") -> str:
    """``41.30 [37.00, 45.80]``."""
    interval = f" [{low:.2f}, {high:.2f}]" if known(low) and known(high) else ""
    return number(score, f"{sign}.2f") + (interval if known(score) else "")


def percent(share: Any) -> str:
    """``12.5 %``."""
    return f"{100 * share:.1f} %" if known(share) else UNKNOWN


def out_of(n: Any, expected: Any) -> str:
    """``50``, or ``48/50`` where some are not in the mean."""
    if not known(n):
        return UNKNOWN
    return f"{int(n)}" if int(n) == int(expected) else f"{int(n)}/{int(expected)}"


def wrong_text(counts: Row, budget: Any) -> str:
    """``2 failed, 1 empty``. A cell whose budget is ``full`` is uncompressed because it was asked to be."""
    names = [name for name in WRONG if not (name == "uncompressed" and budget == "full")]
    return ", ".join(f"{int(counts[name])} {name}" for name in names if known(counts[name]) and counts[name])


def markdown(
    caption: str, headers: list[str], body: list[list[str]], notes: list[str], buckets: list[list[str]] | None = None
) -> str:
    """A heading, the table (and the one by length, for LongBench-E), and the notes as a list."""
    tables = [pipe_table([headers, *body]), *([pipe_table(buckets)] if buckets else [])]
    return "\n\n".join([f"# {escape_pipe(caption)}", *tables, "\n".join(f"- {note}" for note in notes)]) + "\n"


def pipe_table(lines: list[list[str]]) -> str:
    """A Markdown table whose first line is the header."""
    from tabulate import tabulate

    escaped = [[escape_pipe(text) for text in line] for line in lines]
    return tabulate(escaped[1:], headers=escaped[0], tablefmt="pipe", disable_numparse=True)


def escape_pipe(text: str) -> str:
    """A name may hold what ends a Markdown cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def latex(caption: str, headers: list[str], body: list[list[str]], notes: list[str]) -> str:
    """A table environment (booktabs) with everything escaped; the notes are comments."""
    from tabulate import tabulate

    inner = tabulate(body, headers=headers, tablefmt="latex_booktabs", disable_numparse=True)
    comments = "\n".join(f"% {' '.join(note.split())}" for note in notes)
    return f"{comments}\n\\begin{{table}}\n\\centering\n{inner}\n\\caption{{{escape_latex(caption)}}}\n\\end{{table}}\n"


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def escape_latex(text: str) -> str:
    """``text`` with LaTeX's special characters escaped."""
    return re.sub(r"[\\~^&%$#_{}]", lambda match: LATEX_ESCAPES[match[0]], text)


def bucket_table(rows: DataFrame) -> list[list[str]]:
    """LongBench-E's scores by length: a header and a line per cell."""
    lines = [["method", "budget", "variant", "protocol", *(name for name, *_ in LENGTH_BUCKETS)]]
    for row in rows.to_dict("records"):
        scores = [
            f"{number(row[f'score_{name}'])} (n {number(row[f'n_{name}'], '.0f')})" for name, *_ in LENGTH_BUCKETS
        ]
        lines.append([str(row["method"]), str(row["budget"]), row["variant"], row["protocol"], *scores])
    return lines


# -- the end of a run --------------------------------------------------------------------------------------------

TEXT_WIDTH, BUDGET_WIDTH = 16, 8  # longer texts go on in the next line; with the numbers, at most 100 columns


def end_of_run_table(cells: Sequence[Cell]) -> str:
    """The cells of a run for a terminal of 100 columns, a block per model and task; what failed comes last."""
    from tabulate import tabulate

    frame = cells_frame(cells)
    blocks: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in frame.to_dict("records"):
        blocks[row["model"], row["task"], row["metric"]].append(row)
    texts = []
    for (model, task, metric), rows in blocks.items():
        rows = sorted(rows, key=lambda row: protocol_order(row["protocol"]))
        lines = [terminal_line(row) for row in sorted(rows, key=lambda row: row_position(frame, row))]
        headers = ["method", "budget", "protocol", "n", "score", "95% CI", "KV", "tok/s", "not ok"]
        # The headers go in as a row: tabulate pads headers, and 100 columns are few.
        table = tabulate([headers, *lines], tablefmt="plain", disable_numparse=True)
        texts.append(f"{task} ({metric}), model {model}\n{table}")
    ended_badly = [unfinished_line(cell) for cell in cells if cell.status != "done"]
    return "\n\n".join([*texts, *(["\n".join(ended_badly)] if ended_badly else [])])


def row_position(frame: DataFrame, row: Row) -> int:
    """Where the frame, which is sorted, has this row."""
    return list(frame["folder"]).index(row["folder"])


def terminal_line(row: Row) -> list[str]:
    """One cell's line."""
    interval = f"{row['ci_low']:.1f}..{row['ci_high']:.1f}" if known(row["ci_low"]) else UNKNOWN
    return [
        "\n".join(textwrap.wrap(f"{row['method']} {row['variant']}", TEXT_WIDTH)),
        "\n".join(textwrap.wrap(str(row["budget"]).replace("=", "= "), BUDGET_WIDTH)),
        row["protocol"],
        out_of(row["n"], row["expected"]),
        number(row["score"]),
        interval,
        percent(row["kv_share"]),
        number(row["tokens_per_s"], ".1f"),
        wrong_text(row, row["budget"]).replace(", ", ",\n") or UNKNOWN,
    ]


def unfinished_line(cell: Cell) -> str:
    """Which cell is not done, how far it came, what stopped it, and where to look."""
    done, expected = progress(cell)
    reason = cell.fault or cell.summary.get("error")
    if not reason:
        failed = [record for record in cell.records if record["status"] == "failed"]
        reason = f"{failed[0]['sample_id']}: {last_line(failed[0].get('error'))}" if failed else ""
    return f"{cell.status}: {cell.folder} ({done} of {expected} samples){': ' if reason else ''}{reason}"
