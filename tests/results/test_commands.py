"""``status`` and ``report`` as a user calls them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kvbench import report, status
from kvbench.arguments import parse
from tests.results.build import failed_record, make_record, make_run, open_store, task_info, write_cell


@pytest.fixture
def runs(tmp_path):
    write_cell(make_run(tmp_path), [make_record("a", 40.0), make_record("b", 50.0)])
    write_cell(make_run(tmp_path, budget=16), [make_record("a", 40.0), failed_record("b")])
    write_cell(make_run(tmp_path, budget=32, experiment="two"), [make_record("a")], sample_ids=("a", "b", "c"))
    return tmp_path


def words_of(text):
    return [line.split()[:3] for line in text.splitlines()]


def test_status_lists_cells(runs, capsys):
    run = make_run(runs, budget=64)
    with open_store(run, task_info(run, 4)) as store:
        store.append(make_record("s00"))
        assert status.main([f"runs={runs}"]) == 0
    lines = words_of(capsys.readouterr().out)
    assert ["done", "2/2", "45.00"] in lines
    assert ["failed", "1/2", "40.00"] in lines
    assert ["incomplete", "1/3", "-"] in lines
    assert ["running", "1/4", "-"] in lines
    assert lines[-1] == ["4", "cells:", "1"]


def test_status_of_a_part(runs, capsys):
    assert status.main([f"runs={runs}", "status=failed"]) == 0
    assert "b16" in capsys.readouterr().out
    assert status.main([f"runs={runs}", "experiment=two"]) == 0
    assert capsys.readouterr().out.endswith("1 cells: 1 incomplete\n")
    assert status.main([f"runs={runs / 'two'}"]) == 0
    assert "b32" in capsys.readouterr().out


def test_status_of_an_empty_folder(tmp_path, capsys):
    assert status.main([f"runs={tmp_path}"]) == 0
    assert "0 cells" in capsys.readouterr().out


def test_report_writes_every_experiments_tables(runs, capsys):
    assert report.main([f"runs={runs}"]) == 0
    paths = capsys.readouterr().out.split()
    assert len(paths) == 6 and (runs / "two" / "tables" / "passkey.md").is_file()


def test_report_from_inside_writes_to_the_same_place(runs, capsys):
    assert report.main([f"runs={runs / 'two' / 'passkey'}"]) == 0
    assert capsys.readouterr().out.split()[0] == str(runs / "two" / "tables" / "passkey.csv")


@pytest.mark.parametrize("command", [status.main, report.main])
@pytest.mark.parametrize(
    "words, message",
    [
        (["runs=/no/such/folder"], "there is no such folder"),
        (["rnus=x"], "Did you mean runs=...?"),
        (["--runs", "x"], "Did you mean runs=...?"),
        (["runs=a", "runs=b"], "given twice"),
        (["runs="], "has no value"),
        (["experimnt=x"], "Did you mean experiment=...?"),
    ],
)
def test_wrong_input_exits_2(command, words, message, capsys):
    try:
        code = command(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_wrong_status_and_empty_report_exit_2(tmp_path, capsys):
    assert status.main([f"runs={tmp_path}", "status=dnoe"]) == 2
    assert report.main([f"runs={tmp_path}"]) == 2
    assert "no cells" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], {"runs": "folder"}, "usage text")
    assert stop.value.code == 0
    assert capsys.readouterr().out == "usage: usage text\n  runs  folder\n"


@pytest.mark.parametrize("command", ["status", "report"])
def test_commands_start_fast_and_without_torch(command, runs):
    code = f"import sys, kvbench.{command} as c; code = c.main(['runs={runs}']); assert 'torch' not in sys.modules"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - start < 5  # 0.3 and 0.8 s alone; the machine may be busy
