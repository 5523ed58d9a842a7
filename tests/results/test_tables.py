"""Tables from cells made by hand: golden strings, and what must never be averaged or hidden."""

from __future__ import annotations

import csv
import io

import pytest

from kvbench.results.averages import average_table
from kvbench.results.cells import read_cells
from kvbench.results.render import end_of_run_table, escape_latex, formatted, write_tables
from kvbench.results.tables import cells_frame, task_table
from tests.results.build import failed_record, make_record, make_run, write_cell


def scored(*scores, **changes):
    return [make_record(f"s{number:02d}", float(score), **changes) for number, score in enumerate(scores)]


@pytest.fixture
def grid(tmp_path):
    """Full, and snapkv at two budgets, in two protocols; budget 0.5 has no aware cell, and one sample failed."""
    full = dict(method="full", runs=tmp_path)
    whole = dict(kv_bytes_device=20480, kept_entries=40.0, uncompressed=True)
    write_cell(make_run(**full), scored(100, 100, **whole))
    write_cell(make_run(**full, protocol="aware"), scored(100, 100, **whole))
    write_cell(make_run(tmp_path, budget=16), scored(20, 40))
    write_cell(make_run(tmp_path, budget=16, protocol="aware"), scored(50, 90))
    write_cell(make_run(tmp_path, budget=0.5), [*scored(80, 80), failed_record("s02")])
    return tmp_path


GOLDEN = """\
# passkey: qa_f1; model tiny

| method   | budget   | blind                   | blind KV   | blind n   | aware                   | aware KV   | aware n   | aware - blind           | not ok          |
|:---------|:---------|:------------------------|:-----------|:----------|:------------------------|:-----------|:----------|:------------------------|:----------------|
| full     | full     | 100.00 [100.00, 100.00] | 100.0 %    | 2         | 100.00 [100.00, 100.00] | 100.0 %    | 2         | +0.00 [0.00, 0.00]      | -               |
| snapkv   | 0.5      | 80.00 [80.00, 80.00]    | 40.0 %     | 2/3       | -                       | -          | -         | -                       | blind: 1 failed |
| snapkv   | 16       | 30.00 [20.00, 40.00]    | 40.0 %     | 2         | 70.00 [50.00, 90.00]    | 40.0 %     | 2         | +40.00 [30.00, 50.00]   | -               |
"""  # noqa: E501


def squeeze(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_markdown_golden(grid):
    files = write_tables(read_cells(grid))
    assert [path.relative_to(grid).as_posix() for path in files] == [
        f"default/tables/passkey.{suffix}" for suffix in ("csv", "md", "tex")
    ]
    found = squeeze(files[1].read_text(encoding="utf-8"))
    golden = squeeze(GOLDEN)
    assert found[:3] == golden[:3] and found[4:7] == golden[4:7]
    assert any(line.startswith("- failed: ") and "s02: RuntimeError: boom" in line for line in found)


def test_csv_has_raw_numbers(grid):
    (path,) = (path for path in write_tables(read_cells(grid)) if path.suffix == ".csv")
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    assert [(row["method"], row["budget"]) for row in rows] == [("full", "full"), ("snapkv", "0.5"), ("snapkv", "16")]
    assert rows[2]["blind_score"] == "30.0" and rows[2]["aware_score"] == "70.0" and rows[2]["gap"] == "40.0"
    assert rows[1]["aware_score"] == "" and rows[1]["blind_failed"] == "1" and rows[2]["blind_kv_share"] == "0.4"


def test_one_file_has_everything_of_every_cell(grid):
    write_tables(read_cells(grid))
    rows = list(csv.DictReader(io.StringIO((grid / "default/tables/cells.csv").read_text(encoding="utf-8"))))
    assert len(rows) == len(read_cells(grid))
    assert {"score", "kv_bytes_device", "kv_bytes_full", "prefill_s", "decode_s", "tokens_per_s"} <= rows[0].keys()


def test_latex_is_escaped(tmp_path):
    write_cell(make_run(tmp_path, model="a_b & 50%", method="x_y#1"), scored(1, 2))
    (path,) = (path for path in write_tables(read_cells(tmp_path)) if path.suffix == ".tex")
    body = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("%"))
    assert r"a\_b \& 50\%" in body and r"x\_y\#1" in body and r"40.0 \%" in body
    assert r"\toprule" in body and r"qa\_f1" in body
    assert escape_latex(r"\~^{}") == r"\textbackslash{}\textasciitilde{}\textasciicircum{}\{\}"


def test_a_pipe_in_a_name_does_not_break_markdown(tmp_path):
    write_cell(make_run(tmp_path, method="a|b"), scored(1, 2))
    (path,) = (path for path in write_tables(read_cells(tmp_path)) if path.suffix == ".md")
    assert r"| a\|b " in path.read_text()


def test_frame_has_a_row_per_cell_and_numbers_of_budgets(grid):
    frame = cells_frame(read_cells(grid))
    assert len(frame) == 5
    assert [value for value in frame["budget"]] == ["full", "full", 0.5, 16, 16]
    assert list(frame["protocol"]) == ["blind", "aware", "blind", "blind", "aware"]


def test_the_measured_share_is_shown_whatever_the_budget_was_called(tmp_path):
    """C15: a chain of two halving steps stores a quarter."""
    write_cell(make_run(tmp_path, budget=0.5), scored(1, 2, kv_bytes_device=5120))
    cells = read_cells(tmp_path)
    frame = cells_frame(cells)
    headers, (line,) = formatted(task_table(frame, cells))
    assert dict(zip(headers, line, strict=True))["blind KV"] == "25.0 %"


def test_gap_is_over_the_samples_that_both_answered(tmp_path):
    write_cell(make_run(tmp_path), [*scored(10, 20), failed_record("s02")])
    write_cell(make_run(tmp_path, protocol="aware"), [*scored(30, 60), make_record("s02", 0.0)])
    cells = read_cells(tmp_path)
    (row,) = task_table(cells_frame(cells), cells).to_dict("records")
    assert (row["gap"], row["gap_n"], row["aware_score"], row["blind_score"]) == (30.0, 2, 30.0, 15.0)


def test_no_gap_without_a_question_and_it_is_said(tmp_path):
    for protocol in ("blind", "aware"):
        write_cell(make_run(tmp_path, protocol=protocol), scored(10, 20), has_question=False)
    text = next(path for path in write_tables(read_cells(tmp_path)) if path.suffix == ".md").read_text()
    assert "aware - blind" not in text and "left out of the comparison" in text and "15.00" in text


def test_cells_that_differ_in_anything_else_stay_apart(tmp_path):
    """C14: another window, dtype or data content never shares a row."""
    method = {"name": "snapkv", "positions": "original"}
    write_cell(make_run(tmp_path, method=method | {"window": 8}), scored(10))
    write_cell(make_run(tmp_path, method=method | {"window": 32}), scored(20))
    write_cell(make_run(tmp_path, method=method | {"window": 32}), scored(30), hashes={"data_sha256": "d" * 64})
    write_cell(make_run(tmp_path, method=method | {"window": 32}), scored(40), hashes={"dtype": "float16"})
    write_cell(make_run(tmp_path, method=method | {"window": 32}, seed=1), scored(50))
    cells = read_cells(tmp_path)
    table = task_table(cells_frame(cells), cells)
    assert sorted(table["blind_score"]) == [10, 20, 30, 40, 50]
    assert "dtype=float32, method.window=8, task.sha256=bbbbbbbb" in set(table["variant"])
    assert "variant" in formatted(table)[0] and "seed" in formatted(table)[0]


def test_a_setting_that_is_repeated_inside_is_named_once(tmp_path):
    for window in (8, 32):
        method = {"name": "snapkv", "scorer": {"window": window}, "window": window, "protect": {"recent": window}}
        write_cell(make_run(tmp_path, method=method), scored(1))
    assert list(cells_frame(read_cells(tmp_path))["variant"]) == ["method.window=32", "method.window=8"]


def test_two_protocols_of_one_variant_share_a_row(tmp_path):
    for window in (8, 32):
        for protocol in ("blind", "aware", "swapped"):
            write_cell(
                make_run(tmp_path, method={"name": "snapkv", "window": window}, protocol=protocol), scored(window)
            )
    cells = read_cells(tmp_path)
    table = task_table(cells_frame(cells), cells)
    assert len(table) == 2 and list(table["gap"]) == [0.0, 0.0]
    scores = [name for name in table.columns if name.endswith("_score")]
    assert scores == ["blind_score", "aware_score", "swapped_score"]


# -- averages


def longbench(tmp_path, task, blind, aware, method="snapkv", **info):
    for protocol, score in (("blind", blind), ("aware", aware)):
        if score is not None:
            run = make_run(tmp_path, task=f"longbench/{task}", protocol=protocol, method=method)
            write_cell(run, scored(*score), **info)


def test_longbench_average(tmp_path):
    longbench(tmp_path, "qasper", [10, 20, 30], [40])  # 20, 40: every task weighs the same, not every sample
    longbench(tmp_path, "trec", [60], [70])
    longbench(tmp_path, "lcc", [1], [2], has_question=False)
    longbench(tmp_path, "qasper", [90], None, method="tova")
    cells = read_cells(tmp_path)
    table, notes = average_table(cells_frame(cells), cells, "longbench")
    rows = {row["method"]: row for row in table.to_dict("records")}
    assert rows["snapkv"]["blind_score"] == 27.0 and rows["snapkv"]["aware_score"] == pytest.approx(37.33)
    assert rows["snapkv"]["blind_n"] == 3 and rows["snapkv"]["blind_kv_share"] == pytest.approx(0.4)
    assert rows["snapkv"]["gap"] == 20.0  # qasper on the one sample that both have: 30; trec: 10
    assert rows["tova"]["blind_score"] != rows["tova"]["blind_score"], "one of three tasks is no average"
    assert any("left out: lcc" in note for note in notes)
    files = {path.relative_to(tmp_path).as_posix() for path in write_tables(cells)}
    assert "default/tables/longbench/average.md" in files and "default/tables/longbench/qasper.tex" in files
    text = (tmp_path / "default/tables/longbench/average.md").read_text()
    assert "27.00" in text and "+20.00" in text and "1/3" in text


def test_no_average_of_one_task(tmp_path):
    longbench(tmp_path, "qasper", [10], [40])
    cells = read_cells(tmp_path)
    assert average_table(cells_frame(cells), cells, "longbench") is None


def test_longbench_e_shows_lengths(tmp_path):
    run = make_run(tmp_path, task="longbench_e/qasper")
    write_cell(run, [make_record("a", 10.0, info={"length": 5}), make_record("b", 30.0, info={"length": 9000})])
    text = next(path for path in write_tables(read_cells(tmp_path)) if path.suffix == ".md").read_text()
    assert "0-4k" in text and "10.00 (n 1)" in text and "- (n 0)" in text and "30.00 (n 1)" in text


# -- the terminal

TERMINAL = """\
passkey (qa_f1), model tiny
method budget protocol n score 95% CI KV tok/s not ok
full full blind 2 100.00 100.0..100.0 100.0 % 5.0 -
full full aware 2 100.00 100.0..100.0 100.0 % 5.0 -
snapkv 0.5 blind 2/3 80.00 80.0..80.0 40.0 % 5.0 1 failed
snapkv 16 blind 2 30.00 20.0..40.0 40.0 % 5.0 -
snapkv 16 aware 2 70.00 50.0..90.0 40.0 % 5.0 -
"""


def test_terminal_golden(grid):
    text = end_of_run_table(read_cells(grid))
    lines = [line for line in squeeze(text) if not line.startswith("---")]
    assert lines[:7] == TERMINAL.splitlines()
    assert lines[-1].startswith("failed: ") and lines[-1].endswith("s02: RuntimeError: boom")


def test_terminal_fits_in_100_columns(tmp_path):
    method = {"name": "a_method_with_a_rather_long_name", "window": 8}
    bad = [make_record("s00", truncated_tokens=5, prediction="", uncompressed=True), failed_record("s01")]
    bad.append(make_record("s02", None, status="nonfinite"))
    write_cell(make_run(tmp_path, method=method, protocol="swapped", budget=131072), bad)
    write_cell(make_run(tmp_path, method=method | {"window": 9}, budget=0.0001), bad)
    table = end_of_run_table(read_cells(tmp_path)).split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 100
    for word in ("failed", "empty", "nonfinite", "truncated", "uncompressed"):
        assert f"1 {word}" in " ".join(table.split())


def test_budgets_in_bytes_are_told_by_their_column_alone(tmp_path):
    for bits in (2, 4):
        match = {"name": f"kivi{bits}", "scorer": None, "codec": {"key_bits": bits}}
        for protocol in ("blind", "aware"):
            write_cell(make_run(tmp_path, match=match, protocol=protocol), scored(20, 40))
    for given in (1048576, 524288):
        write_cell(make_run(tmp_path, budget_bytes=given), scored(20, 40))
    frame = cells_frame(read_cells(tmp_path))
    assert set(frame["variant"]) == {""}
    assert list(dict.fromkeys(frame["budget"])) == ["match=kivi2", "match=kivi4", "bytes=524288", "bytes=1048576"]
    changed = {"name": "kivi2", "scorer": None, "codec": {"key_bits": 8}}  # somebody edited the file meanwhile
    write_cell(make_run(tmp_path, match=changed), scored(20, 40))
    variants = cells_frame(read_cells(tmp_path))["variant"]
    assert "match.codec.key_bits=8" in set(variants) and "match.codec.key_bits=2" in set(variants)
