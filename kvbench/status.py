"""``python -m kvbench.status runs=runs``: list cells and how far they are, from the files alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvbench.arguments import parse
from kvbench.errors import InputError
from kvbench.results.cells import Cell, progress, read_cells

USAGE = "python -m kvbench.status [key=value ...]"
KEYS = {
    "runs": "folder that runs were written to, or any folder in it (default: runs)",
    "experiment": "only this experiment (default: all)",
    "status": "only cells that are done, running, failed or incomplete",
}
STATUSES = ("done", "running", "failed", "incomplete")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a missing folder, a wrong key or a wrong status."""
    values = parse(sys.argv[1:] if argv is None else argv, KEYS, USAGE)
    root = Path(values.get("runs", "runs"))
    wanted = values.get("status")
    try:
        if wanted is not None and wanted not in STATUSES:
            raise InputError("status", wanted, "is no status.", f"Write one of {', '.join(STATUSES)}.")
        cells = read_cells(root / values["experiment"] if "experiment" in values else root)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = [cell for cell in cells if wanted in (None, cell.status)]
    print(f"{'status':<10}  {'samples':>9}  {'score':>6}  folder")
    for cell in shown:
        print(status_line(cell))
    tally = Counter(cell.status for cell in shown)
    print(f"{len(shown)} cells: " + ", ".join(f"{tally[name]} {name}" for name in STATUSES if tally[name] or not shown))
    return 0


def status_line(cell: Cell) -> str:
    """Status, valid samples of those asked for, score (of a finished cell), folder, and what stopped it."""
    done, expected = progress(cell)
    score = cell.summary.get("score") if cell.status in ("done", "failed") else None
    text = "-" if score is None else f"{score:.2f}"
    error = cell.fault or cell.summary.get("error")
    return f"{cell.status:<10}  {f'{done}/{expected}':>9}  {text:>6}  {cell.folder}" + (f"  ({error})" if error else "")


if __name__ == "__main__":
    raise SystemExit(main())
