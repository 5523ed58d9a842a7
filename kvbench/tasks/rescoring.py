"""New scores for the records of finished runs: predictions are kept, scores and summaries are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import InputError
from kvbench.results.files import read_json, read_lines, strict_json, write_json, write_whole
from kvbench.results.folder import TaskInfo
from kvbench.results.lock import take_cell
from kvbench.results.summary import summarise
from kvbench.tasks.metrics import EXTRA_METRICS
from kvbench.tasks.rules import ScoringRules, scoring_rules
from kvbench.tasks.scoring import score_answers


@dataclass
class Rescored:
    """What became of one cell."""

    folder: Path
    records: int = 0
    changed: int = 0
    score: float | None = None
    faults: tuple[str, ...] = ()  # records that kept their old score, and why


def cells(root: Path) -> list[Path]:
    """Folders below ``root`` that hold a cell's records. Raises InputError if there are none."""
    if not root.is_dir():
        raise InputError("runs", root, "there is no such folder.")
    found = sorted(file.parent for file in root.rglob("records.jsonl"))
    if not found:
        raise InputError("runs", root, "there is no records.jsonl in it.")
    return found


def rescore_cell(folder: Path) -> Rescored:
    """Score a cell's records again and replace records.jsonl and summary.json, each as a whole.

    Raises InputError if its config cannot be read, its task is unknown, or another process is writing the cell.
    """
    config = _config(folder)
    rules = scoring_rules(str(config["task"].get("name")), config["task"])
    lease = take_cell(folder)
    try:
        return _rescore(folder, config, rules)
    finally:
        lease.release()


def _rescore(folder: Path, config: dict[str, Any], rules: ScoringRules) -> Rescored:
    records, faults, torn = read_lines(folder / "records.jsonl")
    if faults or torn:  # a resumed run repairs them; rewriting here would hide that samples are missing
        problem = faults[0] if faults else "its last line is cut off"
        raise InputError("runs", folder, f"records.jsonl is damaged: {problem}.", "Run the cell again first.")
    result = Rescored(folder, records=len(records))
    problems = []
    for record in records:
        if record.get("status") != "ok":
            continue
        try:
            new = _scores(record, rules)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{record.get('sample_id')}: {error}")
            continue
        result.changed += any(record.get(key) != value for key, value in new.items())
        record.update(new)
    result.faults = tuple(problems)
    if result.changed:
        write_whole(folder / "records.jsonl", b"".join(strict_json(record) + b"\n" for record in records))
    result.score = _renew_summary(folder, config, rules, records)
    return result


def _scores(record: Mapping[str, Any], rules: ScoringRules) -> dict[str, Any]:
    """``score`` and ``scores`` of one record, 0..100."""
    info = record.get("info") or {}
    metric, classes = info.get("metric") or rules.metric, info.get("classes") or ()
    if not record["answers"]:
        raise ValueError("it has no gold answer")

    def scored(name: str) -> float:
        return 100 * score_answers(name, record["prediction"], record["answers"], classes, rules.first_line)

    extra = {name: scored(other) for name, other in EXTRA_METRICS.get(metric, {}).items()}
    return {"score": scored(metric), "scores": {**(record.get("scores") or {}), **extra}}


def _renew_summary(
    folder: Path, config: dict[str, Any], rules: ScoringRules, records: list[dict[str, Any]]
) -> float | None:
    """Replace what depends on the scores in summary.json; how far the cell came is not this command's to say."""
    old = read_json(folder / "summary.json")
    if old is None or old.get("status") == "running":
        return None
    ids = tuple(record["sample_id"] for record in records)
    task = TaskInfo(str(config["task"]["name"]), rules.metric, ids, bool(old.get("has_question", True)))
    new = summarise(config, task, records)
    kept = {key: old[key] for key in ("status", "expected", "error") if key in old}
    write_json(folder / "summary.json", {**old, **new, **kept})
    return new.get("score")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError("runs", folder, f"its config.yaml cannot be read: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("task"), dict):
        raise InputError("runs", folder, "its config.yaml names no task.")
    return config
