"""Score published sets of predictions again and compare with the scores published with them, to the last digit.

    python scripts/rescore.py FOLDER

FOLDER holds v1/<set>/ and e/<set>/, each with <task>.jsonl files and the published result.json.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kvbench.errors import InputError
from kvbench.tasks.predictions import score_file

FAMILIES = {"v1": "longbench", "e": "longbench_e"}
PROCESSES = 2


def compare(family: str, folder: Path) -> list[tuple[str, bool]]:
    """One line per published score of a set, and whether it was reproduced."""
    published = json.loads(
        (folder / "result.json").read_text(encoding="utf-8"),
        parse_constant=lambda constant: None,  # the official evaluation writes NaN for an empty bucket
    )
    lines = []
    for task, wanted in sorted(published.items()):
        name = f"{family}/{task}"
        try:
            result = score_file(name, folder / f"{task}.jsonl")
            found = result["buckets"] if isinstance(wanted, dict) else result["score"]
        except InputError as error:
            found = str(error)
        lines.append((f"{folder.name} {name}: published {wanted}, scored {found}", found == wanted))
    return lines


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(sys.argv[1])
    sets = [
        (family, file.parent)
        for kind, family in FAMILIES.items()
        for file in sorted(root.glob(f"{kind}/*/result.json"))
    ]
    if not sets:
        print(f"error: {root} holds neither v1/<set>/result.json nor e/<set>/result.json", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(PROCESSES) as pool:
        lines = [line for part in pool.map(compare, *zip(*sets, strict=True)) for line in part]
    for text, equal in lines:
        if not equal:
            print(f"MISMATCH {text}")
    failed = sum(not equal for _, equal in lines)
    print(f"{len(lines) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
