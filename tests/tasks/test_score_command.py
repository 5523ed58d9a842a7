"""``python -m kvbench.score`` and scripts/rescore.py: published scores to the last digit, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvbench import score
from kvbench.results.files import strict_json
from tests.tasks.helpers import GOLDEN, folder_from, lines, write_lines

ROOT = Path(__file__).parents[2]
V1, E = GOLDEN / "v1" / "llama3-8b-instruct", GOLDEN / "e" / "MagicPiG_llama2-7b-chat-4k-snap"


def run(capsys, *arguments):
    """Exit code, parsed output lines and error text."""
    try:
        code = score.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("task", json.loads((V1 / "result.json").read_text()))
def test_a_published_set_scores_as_published(capsys, task):
    code, out, _ = run(capsys, f"task=longbench/{task}", f"predictions={V1 / task}.jsonl")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert result["score"] == json.loads((V1 / "result.json").read_text())[task]
    assert (
        result["task"] == f"longbench/{task}" and result["n"] == 200 and set(result) == {"task", "metric", "score", "n"}
    )


@pytest.mark.parametrize("task", json.loads((E / "result.json").read_text()))
def test_a_published_extended_set_scores_as_published(capsys, task):
    code, out, _ = run(capsys, f"task=longbench_e/{task}", f"predictions={E / task}.jsonl")
    assert code == 0 and json.loads(out)["buckets"] == json.loads((E / "result.json").read_text())[task]


def test_an_empty_bucket_is_null(capsys, tmp_path):
    file = write_lines(tmp_path / "p.jsonl", [{"pred": "yes", "answers": ["yes"], "all_classes": None, "length": 10}])
    code, out, _ = run(capsys, "task=longbench_e/qasper", f"predictions={file}")
    assert code == 0 and json.loads(out)["buckets"] == {"0-4k": 100.0, "4-8k": None, "8k+": None}
    assert "NaN" not in out


def test_lists_may_be_written_as_text_and_the_last_label_set_counts(capsys, tmp_path):
    """Some runners store str(list). "Food" is no class in the last line's set, so it does not halve the first score."""
    records = [
        {"pred": "Plant or Food", "answers": "['Plant']", "all_classes": "['Plant', 'Food']", "length": 1},
        {"pred": "Plant", "answers": ["Plant"], "all_classes": ["Plant"], "length": 1},
    ]
    code, out, _ = run(capsys, "task=longbench/trec", f"predictions={write_lines(tmp_path / 'p.jsonl', records)}")
    assert code == 0 and json.loads(out)["score"] == 100.0


LINE = {"pred": "a", "answers": ["a"], "all_classes": None, "length": 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tsk=longbench/qasper", "predictions=x"], "Did you mean task="),
        (["task=longbench/qaspr", "predictions=x"], "Did you mean longbench/qasper?"),
        (["task=longbenh/qasper", "predictions=x"], "Did you mean longbench/qasper?"),
        (["task=longbench_e/narrativeqa", "predictions=x"], "no such task"),
        (["task=longbench/qasper", "predictions=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["task=longbench/qasper"], "predictions="),
        (["runs=/nowhere"], "no such folder"),
        (["runs=x", "task=passkey"], "runs= alone"),
        ([], "usage"),
    ],
)
def test_wrong_arguments_exit_2_with_a_suggestion(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and says in err


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        {"pred": "a"},
        LINE | {"pred": None},
        LINE | {"answers": []},
        b'{"pred": "a", "answers": ["a"], "length": NaN}',
    ],
)
def test_a_bad_prediction_line_is_named_and_never_counts_as_zero(capsys, tmp_path, bad):
    code, out, err = run(
        capsys, "task=longbench/qasper", f"predictions={write_lines(tmp_path / 'p.jsonl', [LINE, bad])}"
    )
    assert code == 2 and out == "" and "line 2" in err


def test_an_extended_task_needs_lengths(capsys, tmp_path):
    file = write_lines(tmp_path / "p.jsonl", [LINE | {"length": None}])
    code, _, err = run(capsys, "task=longbench_e/qasper", f"predictions={file}")
    assert code == 2 and "length" in err


def test_the_command_starts_without_torch():
    """A score of a file should answer at once."""
    code = (
        "import sys, kvbench.score, kvbench.tasks.predictions; print('torch' in sys.modules, 'datasets' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


# --- runs=: the records of finished cells ---------------------------------------------------------------------------


def record(identity, prediction, **changes):
    return {
        "sample_id": identity,
        "status": "ok",
        "prediction": prediction,
        "answers": ["yes"],
        "score": 0.0,
        "scores": {},
    } | changes


def cell(folder, records, task=None, **summary):
    folder.mkdir(parents=True)
    config = {
        "task": task or {"name": "longbench/qasper"},
        "model": {"name": "m"},
        "method": {"name": "full"},
        "protocol": {"name": "blind"},
        "budget": "full",
        "seed": 0,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "records.jsonl").write_bytes(b"".join(strict_json(record) + b"\n" for record in records))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_records_and_summaries_get_new_scores(capsys, tmp_path):
    """Only scores change: failed records, other fields and how far the cell came stay."""
    failed = record("c", "", status="failed", score=None, error="boom")
    folder = cell(
        tmp_path / "default" / "x",
        [record("a", "Yes.", context_tokens=5), record("b", "no", score=77.0), failed],
        status="failed",
        expected=9,
        score=1.0,
        has_question=True,
    )
    code, out, err = run(capsys, f"runs={tmp_path}")
    assert (code, err) == (0, "") and "3 records, 2 changed, score 50.00" in out
    found = lines(folder / "records.jsonl")
    assert [r["score"] for r in found] == [100.0, 0.0, None]
    assert found[0]["context_tokens"] == 5 and found[2] == failed
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["score"], summary["status"], summary["expected"], summary["n"]) == (50.0, "failed", 9, 2)
    before = (folder / "records.jsonl").stat().st_mtime_ns
    assert "0 changed" in run(capsys, f"runs={tmp_path}")[1]
    assert (folder / "records.jsonl").stat().st_mtime_ns == before


def test_user_data_is_scored_by_the_metric_of_its_config_or_its_record(capsys, tmp_path):
    records = [record("a", "yes it is"), record("b", "Yes it is", info={"metric": "contains"})]
    folder = cell(tmp_path / "x", records, {"name": "mine", "metric": "rouge_score"})
    assert run(capsys, f"runs={tmp_path}")[0] == 0
    first, second = lines(folder / "records.jsonl")
    assert first["score"] == pytest.approx(50.0, abs=1e-5) and first["scores"] == {"rouge_score_rougeL": 50.0}
    assert second["score"] == 100.0 and second["scores"] == {}


def test_a_record_that_cannot_be_scored_is_an_error_and_keeps_its_score(capsys, tmp_path):
    folder = cell(tmp_path / "x", [record("a", "Plant", score=12.0), record("b", "yes")], {"name": "longbench/trec"})
    code, _, err = run(capsys, f"runs={tmp_path}")
    assert code == 1 and "a: classification_score needs" in err
    assert lines(folder / "records.jsonl")[0]["score"] == 12.0


def test_damaged_cells_are_left_alone_and_the_others_are_scored(capsys, tmp_path):
    """A line cut in half is a sample that is missing; rewriting the file would hide it."""
    torn = cell(tmp_path / "a", [record("a", "yes")])
    with (torn / "records.jsonl").open("ab") as file:
        file.write(b'{"sample_id": "b", ')
    content = (torn / "records.jsonl").read_bytes()
    (cell(tmp_path / "b", [record("a", "yes")]) / "config.yaml").unlink()
    good = cell(tmp_path / "c", [record("a", "yes")])
    code, out, err = run(capsys, f"runs={tmp_path}")
    assert code == 1 and "damaged" in err and "config.yaml" in err and out.count("\n") == 1
    assert (torn / "records.jsonl").read_bytes() == content
    assert lines(good / "records.jsonl")[0]["score"] == 100.0


# --- scripts/rescore.py ---------------------------------------------------------------------------------------------


def rescore(folder):
    command = [sys.executable, str(ROOT / "scripts" / "rescore.py"), str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_rescore_counts_what_it_reproduced(tmp_path):
    done = rescore(GOLDEN)
    assert (done.returncode, done.stdout) == (0, "4 passed, 0 failed\n")
    shutil.copytree(GOLDEN / "v1", tmp_path / "v1")
    (tmp_path / "v1" / V1.name / "result.json").write_text('{"2wikimqa": 44.91, "passage_count": 6.72}')
    done = rescore(tmp_path)
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "1 passed, 1 failed"
    assert "published 44.91, scored 44.9" in done.stdout
    assert rescore(tmp_path / "nowhere").returncode == 2


def test_all_published_sets_are_reproduced():
    """KVBENCH_PREDICTIONS names a folder with v1/<set> and e/<set>."""
    folder = folder_from("KVBENCH_PREDICTIONS")
    if folder is None:
        pytest.skip("KVBENCH_PREDICTIONS is not set")
    done = rescore(folder)
    assert done.returncode == 0, done.stdout
