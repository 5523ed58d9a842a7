"""``python -m kvbench.score``: score a file of predictions, or score the records of runs again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.arguments import parse, stop
from kvbench.errors import InputError

USAGE = "python -m kvbench.score task=NAME predictions=FILE.jsonl | runs=FOLDER"
KEYS = {
    "task": "whose rules to score by: longbench/qasper, longbench_e/qasper, ruler/vt, ...",
    "predictions": "JSON lines with pred, answers, all_classes and length, as LongBench's own runner writes them",
    "runs": "score all records.jsonl below this folder again, in place, and renew each summary.json",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if a record of a run could not be scored; 2 for wrong input."""
    values = parse(sys.argv[1:] if argv is None else argv, KEYS, USAGE)
    if values.keys() not in ({"runs"}, {"task", "predictions"}):
        stop("give either task= and predictions=, or runs= alone.", KEYS, USAGE)
    try:
        if "runs" in values:
            return score_runs(Path(values["runs"]))
        from kvbench.tasks.predictions import score_file

        print(json.dumps(score_file(values["task"], values["predictions"]), allow_nan=False))
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def score_runs(root: Path) -> int:
    """Score every cell below ``root`` again; one line of output for each."""
    from kvbench.tasks.rescoring import cells, rescore_cell

    code = 0
    for folder in cells(root):
        try:
            done = rescore_cell(folder)
        except InputError as error:  # one cell's trouble must not keep the others from being scored
            print(f"error: {error}", file=sys.stderr)
            code = 1
            continue
        score = "-" if done.score is None else f"{done.score:.2f}"
        print(f"{folder}: {done.records} records, {done.changed} changed, score {score}")
        for fault in done.faults:
            print(f"error: {folder}: {fault}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
