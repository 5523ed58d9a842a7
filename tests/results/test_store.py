"""C9 at the store: nothing finished is lost, nothing broken stays, one writer at a time."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import yaml

from kvbench.errors import InputError
from kvbench.results import CellBusy, record_unopened, summarise
from kvbench.results.cells import read_cell, read_cells
from kvbench.results.folder import cell_folder
from tests.results.build import failed_record, make_record, make_run, open_store, sample_ids, task_info, write_cell


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]


def ids_of(folder):
    return [line["sample_id"] for line in lines_of(folder)]


def filled(run, count=3, total=5):
    """A folder with ``count`` of ``total`` records, closed without a summary, as a kill leaves it."""
    with open_store(run, task_info(run, total)) as store:
        for name in sample_ids(count):
            store.append(make_record(name))
    return store.folder


# -- what is left behind


def test_files_of_a_finished_cell(run):
    folder = write_cell(run, [make_record("s00"), make_record("s01", 50.0)])
    names = {"config.yaml", "identity.json", "env.json", "task.json", "records.jsonl", "summary.json", "run.log"}
    assert {path.name for path in folder.iterdir()} == names
    assert yaml.safe_load((folder / "config.yaml").read_text())["method"]["name"] == "snapkv"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["n"], summary["score"]) == ("done", 2, 75.0)


def test_task_with_a_slash_is_a_folder_in_a_folder(run, tmp_path):
    folder = write_cell(make_run(tmp_path, task="longbench/qasper", experiment="e1"), [make_record("s00")])
    assert folder.relative_to(tmp_path).parts[:3] == ("e1", "longbench", "qasper")
    assert read_cell(folder).experiment_folder == tmp_path / "e1"


def test_a_running_cell_says_so_and_a_killed_one_is_incomplete(run):
    with open_store(run, task_info(run, 2)) as store:
        store.append(make_record("s00"))
        assert read_cell(store.folder).status == "running"
    assert read_cell(store.folder).status == "incomplete"
    assert json.loads((store.folder / "summary.json").read_text())["status"] == "running"


def test_starts_are_remembered(run):
    for _ in range(3):
        folder = filled(run)
    assert len(json.loads((folder / "env.json").read_text())["starts"]) == 3


def test_log_and_prompts(run):
    with open_store(run, task_info(run, 1)) as store:
        logging.getLogger("kvbench.anything").info("chosen dtype float32")
        store.dump_prompt("s00", text="What the model saw é")
    logging.getLogger("kvbench.anything").info("after the end")
    text = (store.folder / "run.log").read_text()
    assert "chosen dtype float32" in text and "after the end" not in text
    assert json.loads((store.folder / "prompts.jsonl").read_text())["text"] == "What the model saw é"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b"])
def test_experiment_must_be_a_folder_name(name):
    with pytest.raises(InputError, match="experiment"):
        cell_folder("runs", make_run(experiment=name), {})


def test_unwritable_root(tmp_path):
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "file")
    with pytest.raises(InputError, match="runs="):
        open_store(run, task_info(run, 1))


# -- resume


def test_resume_computes_only_what_is_missing(run):
    folder = filled(run, 3, 5)
    with open_store(run, task_info(run, 5)) as store:
        assert list(store.done) == ["s00", "s01", "s02"] and store.missing == ["s03", "s04"]
        for name in store.missing:
            store.append(make_record(name))
        store.finish(summarise(run, store.task, store.records()))
    assert ids_of(folder) == list(sample_ids(5))
    before = (folder / "summary.json").read_bytes(), (folder / "records.jsonl").read_bytes()
    with open_store(run, task_info(run, 5)) as store:
        assert store.missing == []
    assert before == ((folder / "summary.json").read_bytes(), (folder / "records.jsonl").read_bytes())
    assert read_cell(folder).status == "done"


def test_a_smaller_limit_keeps_the_rest(run):
    folder = filled(run, 5, 5)
    with open_store(run, task_info(run, 2)) as store:
        assert store.missing == [] and len(store.records()) == 2
        store.finish(summarise(run, store.task, store.records()))
    assert len(ids_of(folder)) == 5 and json.loads((folder / "summary.json").read_text())["n"] == 2


def test_other_settings_reuse_nothing(run, tmp_path):
    first = filled(run)
    other = make_run(tmp_path, max_new_tokens=7)
    with open_store(other, task_info(other, 5)) as store:
        assert store.folder != first and len(store.missing) == 5


def test_same_data_name_other_content_is_another_cell(run):
    filled(run)
    with open_store(run, task_info(run, 5), data_sha256="d" * 64) as store:
        assert len(store.missing) == 5


@pytest.mark.parametrize("tail", [b'{"sample_id": "s02", "sta', b'{"sample_id": "s02", "status": "ok"}', b"\xff\x00"])
def test_torn_tail_is_cut_and_redone(run, tail, caplog):
    folder = filled(run, 2)
    with open(folder / "records.jsonl", "ab") as file:
        file.write(tail)
    assert read_cell(folder).status == "incomplete"
    with open_store(run, task_info(run, 3)) as store:
        assert store.missing == ["s02"]
        store.append(make_record("s02"))
    assert ids_of(folder) == ["s00", "s01", "s02"]
    assert "cut off" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [b"garbage", b"", b"[1]", b'{"sample_id": 3, "status": "ok"}', b'{"sample_id": "s01", "status": "fine"}',
     b'{"sample_id": "s01", "status": "ok", "score": NaN}', b"\xff\xfe", b"[" * 100_000],
)  # fmt: skip
def test_garbage_in_the_middle_is_reported_and_redone(run, garbage, caplog):
    folder = filled(run, 3, 3)
    lines = (folder / "records.jsonl").read_bytes().split(b"\n")
    lines[1] = garbage
    (folder / "records.jsonl").write_bytes(b"\n".join(lines))
    with open_store(run, task_info(run, 3)) as store:
        assert store.missing == ["s01"]
        assert ids_of(folder) == ["s00", "s02"]
        store.append(make_record("s01"))
        store.finish(summarise(run, store.task, store.records()))
    assert ids_of(folder) == ["s00", "s01", "s02"]  # in the task's order again
    assert "records.jsonl line 2" in caplog.text


def test_of_duplicates_the_last_stays(run):
    folder = filled(run, 2)
    with open(folder / "records.jsonl", "ab") as file:
        file.write(json.dumps(make_record("s00", 7.0)).encode() + b"\n")
    with open_store(run, task_info(run, 2)) as store:
        assert store.done["s00"]["score"] == 7.0 and len(lines_of(folder)) == 2


def test_failed_records_are_retried_and_nonfinite_ones_kept(run):
    folder = write_cell(run, [failed_record("s00"), make_record("s01", None, status="nonfinite"), make_record("s02")])
    assert read_cell(folder).status == "failed"
    with open_store(run, task_info(run, 3)) as store:
        assert store.missing == ["s00"]
        store.append(make_record("s00"))
        store.finish(summarise(run, store.task, store.records()))
    assert ids_of(folder) == ["s00", "s01", "s02"] and read_cell(folder).status == "done"


def test_odd_texts_survive(run):
    text = "half a pair \ud800, line separators \u2028 \x85, new\nline, 漢字"
    with open_store(run, task_info(run, 1)) as store:
        store.append(make_record("s00", prediction=text))
    with open_store(run, task_info(run, 1)) as store:
        assert store.done["s00"]["prediction"] == text


# -- strictness


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_no_nan_is_ever_written(run, value):
    with open_store(run, task_info(run, 1)) as store:
        with pytest.raises(ValueError):
            store.append(make_record("s00", value))
        assert store.missing == ["s00"] and lines_of(store.folder) == []


@pytest.mark.parametrize("record", [{}, {"sample_id": 1, "status": "ok"}, {"sample_id": "a", "status": "great"}])
def test_what_is_no_record(run, record):
    with open_store(run, task_info(run, 1)) as store, pytest.raises(ValueError, match="not a record"):
        store.append(record)


def test_a_full_disk_leaves_no_half_line(run, monkeypatch):
    real = os.write
    with open_store(run, task_info(run, 3)) as store:
        store.append(make_record("s00"))

        def full(handle, data):
            if handle != store._records:
                return real(handle, data)
            if len(data) > 50:
                return real(handle, data[:50])  # the rest does not fit
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", lambda handle, data: full(handle, data[:60]))
        with pytest.raises(OSError, match="No space"):
            store.append(make_record("s01"))
        monkeypatch.undo()
        assert store.missing == ["s01", "s02"]
        store.append(make_record("s02"))
        assert ids_of(store.folder) == ["s00", "s02"]


# -- failures of whole cells


def test_a_cell_that_raises_leaves_its_traceback(run):
    with open_store(run, task_info(run, 2)) as store:
        store.append(make_record("s00"))
        try:
            raise RuntimeError("the engine broke")
        except RuntimeError as error:
            store.fail(error)
    cell = read_cell(store.folder)
    assert cell.status == "failed" and cell.summary["error"] == "RuntimeError: the engine broke"
    log = (store.folder / "run.log").read_text()
    assert "Traceback" in log and "the engine broke" in log
    assert len(cell.records) == 1


def test_a_cell_that_never_opened_leaves_a_folder_until_it_does(run, tmp_path):
    try:
        raise MemoryError("model too large")
    except MemoryError as error:
        folder = record_unopened(tmp_path, run, error, {"time": "now"})
    (cell,) = read_cells(tmp_path)
    assert cell.status == "failed" and "model too large" in cell.summary["error"]
    assert "Traceback" in (folder / "run.log").read_text()
    write_cell(run, [make_record("s00")])
    assert not folder.exists()


def test_unreadable_folders_are_listed_not_raised(run, tmp_path):
    folder = filled(run)
    (folder / "config.yaml").write_text("a: [")
    (cell,) = read_cells(tmp_path)
    assert cell.fault and cell.status == "failed"


# -- one writer

HOLDER = """
import os, sys, time
from tests.results.build import make_run, make_record, open_store, task_info
run = make_run(sys.argv[1])
store = open_store(run, task_info(run, 20))
for name in store.missing:
    store.append(make_record(name, prediction="x" * 5000))
    print(name, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start_writer(root, pause):
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(root), str(pause)], stdout=subprocess.PIPE, text=True)


def test_the_second_writer_is_refused_with_the_holder_named(run, tmp_path):
    writer = start_writer(tmp_path, 30)
    try:
        assert writer.stdout.readline() == "s00\n"
        start = time.monotonic()
        with pytest.raises(CellBusy, match=f"pid {writer.pid} on host") as caught:
            open_store(run, task_info(run, 20))
        assert time.monotonic() - start < 5
        assert str(tmp_path) in str(caught.value) and isinstance(caught.value, InputError)
        (cell,) = read_cells(tmp_path)
        assert cell.status == "running"
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    with open_store(run, task_info(run, 20)) as store:  # a dead holder's lock does not stay
        assert "s00" in store.done


def test_twice_in_one_process_is_refused(run):
    with open_store(run, task_info(run, 1)), pytest.raises(CellBusy, match=f"pid {os.getpid()}"):
        open_store(run, task_info(run, 1))


@pytest.mark.parametrize("lines", [1, 9])
def test_kill_minus_nine_then_resume(run, tmp_path, lines):
    writer = start_writer(tmp_path, 0.01)
    for _ in range(lines):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    (folder,) = (cell.folder for cell in read_cells(tmp_path))
    assert read_cell(folder).status == "incomplete"
    content = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(content[: content[:-1].rfind(b"\n") + 1 + 100])  # cut the last line
    kept = content.count(b"\n") - 1
    with open_store(run, task_info(run, 20)) as store:
        assert len(store.done) == kept and len(store.missing) == 20 - kept
        for name in store.missing:
            store.append(make_record(name, prediction="x" * 5000))
        store.finish(summarise(run, store.task, store.records()))
    assert ids_of(folder) == list(sample_ids(20))
    assert lines_of(folder) == [make_record(name, prediction="x" * 5000) for name in sample_ids(20)]


def test_a_lost_lease_stops_the_writer(run):
    """A process that was suspended for longer than the lease must not write beside its successor."""
    with open_store(run, task_info(run, 2), lease_seconds=0.4) as store:
        (store.folder / "cell.lock").unlink()
        deadline = time.monotonic() + 10
        while store._lease.compromise is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(CellBusy, match="lost to another process"):
            store.append(make_record("s00"))
        assert lines_of(store.folder) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_holder_on_another_machine_is_judged_by_its_heartbeat(run, alive, caplog):
    folder = filled(run)
    marker = folder / "cell.lock"
    fields = ["filelock/2", "pid=1", "host=elsewhere", "mode=lease", f"token={'a' * 32}", "duration=0.8", "start=1"]
    marker.write_text("\n".join(fields) + "\n")
    beat = threading.Event()
    heart = threading.Thread(target=lambda: [os.utime(marker) for _ in iter(lambda: beat.wait(0.1), True)])
    if alive:
        heart.start()
        with pytest.raises(CellBusy, match="pid 1 on host elsewhere"):
            open_store(run, task_info(run, 5), lease_seconds=0.8)
        assert read_cell(folder).status == "running"
        beat.set()
        heart.join()
    else:
        with open_store(run, task_info(run, 5), lease_seconds=0.8) as store:
            assert len(store.done) == 3
    assert "waiting" in caplog.text
