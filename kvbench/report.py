"""``python -m kvbench.report runs=runs``: write every experiment's tables from the records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.arguments import parse
from kvbench.errors import InputError
from kvbench.results.cells import read_cells

USAGE = "python -m kvbench.report [key=value ...]"
KEYS = {
    "runs": "folder that runs were written to (default: runs)",
    "experiment": "only this experiment (default: all)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a missing folder or a wrong key."""
    values = parse(sys.argv[1:] if argv is None else argv, KEYS, USAGE)
    root = Path(values.get("runs", "runs"))
    try:
        cells = read_cells(root / values["experiment"] if "experiment" in values else root)
        if not cells:
            raise InputError("runs", root, "no cells in this folder.", "Run python -m kvbench.run first.")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from kvbench.results.render import write_tables  # pandas comes in here, after all that could be wrong

    for path in write_tables(cells):
        print(path)
    for cell in cells:
        if cell.fault is not None:
            print(f"left out, unreadable: {cell.folder}: {cell.fault}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
