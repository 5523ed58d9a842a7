"""One cell's folder: what was asked, one line per sample, and what came of it. Nothing finished is ever lost."""

from __future__ import annotations

import logging
import os
import shutil
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbench.results.files import plain, read_json, read_lines, strict_json, sync_folder, write_json, write_whole
from kvbench.results.folder import (
    TaskInfo,
    attach_log,
    cell_folder,
    check_identity,
    failure,
    make_folder,
    remember_start,
    running_summary,
    task_name,
    unopened_folder,
    yaml_text,
)
from kvbench.results.lock import LEASE_SECONDS, CellBusy, take_cell

STATUSES = ("ok", "failed", "nonfinite")

log = logging.getLogger(__name__)


class CellStore:
    """The one writer of a cell's folder. Made by :func:`open_cell`; a context manager that lets go of the cell."""

    def __init__(self, folder: Path, task: TaskInfo, lease: Any) -> None:
        self.folder, self.task = folder, task
        self.done: dict[str, dict[str, Any]] = {}  # sample id -> its valid record (ok or nonfinite)
        self._failed: dict[str, dict[str, Any]] = {}  # failed records of this opening: kept in the file, not reused
        self._lease = lease
        self._log_handler = attach_log(folder / "run.log")
        self._records: int | None = None  # descriptor of records.jsonl

    # -- opening -------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read what earlier calls left, repair it and open the file for appending.

        A torn last line, lines that are not records, repeated ids (the last stays) and failed records go, and are
        computed again; the file is rewritten whole if any were there.
        """
        path = self.folder / "records.jsonl"
        records, faults, torn = read_lines(path, record_fault)
        for fault in faults:
            log.warning("%s: %s; the line is dropped and its sample runs again", self.folder, fault)
        if torn:
            log.warning("%s: the last line of records.jsonl was cut off; its sample runs again", self.folder)
        last = {record["sample_id"]: record for record in records}
        failed = [name for name, record in last.items() if record["status"] == "failed"]
        if failed:
            log.warning("%s: %d failed samples run again: %s", self.folder, len(failed), shorten(failed))
        self.done = {name: record for name, record in last.items() if record["status"] != "failed"}
        if torn or len(self.done) != len(records) + len(faults):
            self._write_records(self.done.values())
        self._records = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        sync_folder(self.folder)

    @property
    def missing(self) -> list[str]:
        """Ids of the samples that have no valid record yet, in the task's order."""
        return [name for name in self.task.sample_ids if name not in self.done]

    def records(self) -> list[dict[str, Any]]:
        """The records of the samples asked for, failed ones included, in the task's order."""
        everything = self._failed | self.done
        return [everything[name] for name in self.task.sample_ids if name in everything]

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record so that it survives the process and the machine: a single write, then fsync.

        Raises ValueError or TypeError for what is not a strict-JSON record (NaN included), CellBusy if another process
        took the cell over, and OSError (disk full) after removing the part of the line that was written.
        """
        kept: dict[str, Any] = plain(record)
        if fault := record_fault(kept):
            raise ValueError(f"not a record: {fault}")
        self._write_line(strict_json(kept) + b"\n")
        here, there = (self._failed, self.done) if kept["status"] == "failed" else (self.done, self._failed)
        here[kept["sample_id"]] = kept
        there.pop(kept["sample_id"], None)

    def _write_line(self, line: bytes) -> None:
        if self._records is None:
            raise RuntimeError(f"{self.folder} is closed")
        if self._lease is not None and self._lease.compromise is not None:
            raise CellBusy("cell", self.folder, f"lost to another process ({self._lease.compromise.reason}).")
        size = os.fstat(self._records).st_size
        try:
            written = os.write(self._records, line)
            while written < len(line):  # a signal or a nearly full disk can shorten a write
                written += os.write(self._records, line[written:])
            os.fsync(self._records)
        except OSError:
            # Half a line would swallow the next one. If even cutting it off fails, nothing more may be appended.
            try:
                os.ftruncate(self._records, size)
            except OSError:
                self._close_records()
            raise

    def dump_prompt(self, sample_id: str, **what: Any) -> None:
        """Add a line to prompts.jsonl: what the model saw (text, ids, ...)."""
        with open(self.folder / "prompts.jsonl", "ab") as file:
            file.write(strict_json({"sample_id": sample_id, **plain(what)}) + b"\n")

    def _write_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        write_whole(self.folder / "records.jsonl", b"".join(strict_json(record) + b"\n" for record in records))

    # -- closing -------------------------------------------------------------------------------------------------

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, put the records into the task's order if a retry left them out of it, and close."""
        position = {name: index for index, name in enumerate(self.task.sample_ids)}
        everything = self._failed | self.done
        ordered = sorted(everything.values(), key=lambda record: position.get(record["sample_id"], len(position)))
        on_disk, _, _ = read_lines(self.folder / "records.jsonl", record_fault)
        if [record["sample_id"] for record in on_disk] != [record["sample_id"] for record in ordered]:
            self._close_records()
            self._write_records(ordered)
        write_json(self.folder / "summary.json", plain(summary))
        self.close()

    def fail(self, error: BaseException, summary: Mapping[str, Any] | None = None) -> None:
        """End a cell that an exception stopped: its traceback goes to run.log and, in short, to summary.json."""
        log.error("%s: the cell failed", self.folder, exc_info=error)
        self.finish({**plain(summary or read_json(self.folder / "summary.json") or {}), **failure(error)})

    def close(self) -> None:
        """Let go of the cell; what was appended stays. Safe to call twice."""
        self._close_records()
        if self._log_handler is not None:
            logging.getLogger().removeHandler(self._log_handler)
            self._log_handler.close()
            self._log_handler = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _close_records(self) -> None:
        if self._records is not None:
            os.close(self._records)
            self._records = None

    def __enter__(self) -> CellStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_cell(
    root: str | os.PathLike[str],
    run: Any,
    identity: Mapping[str, Any],
    env: Mapping[str, Any],
    task: TaskInfo,
    *,
    lease_seconds: float = LEASE_SECONDS,
) -> CellStore:
    """The cell's folder under ``root``, locked, with its earlier records recovered.

    ``run`` is the RunConfig (or its dict). Raises CellBusy when another process writes the cell, and InputError when
    the folder cannot be made. ``config.yaml`` is written before anything else.
    """
    config = plain(run)
    folder = cell_folder(root, config, identity)
    make_folder(folder, root)
    lease = take_cell(folder, lease_seconds)
    store = None
    try:
        check_identity(folder, plain(identity))
        write_whole(folder / "config.yaml", yaml_text(config))
        write_json(folder / "identity.json", plain(identity))
        store = CellStore(folder, task, lease)
        write_json(folder / "task.json", plain(task))
        remember_start(folder, plain(env))
        store.recover()
        if store.missing or (read_json(folder / "summary.json") or {}).get("status") != "done":
            write_json(folder / "summary.json", running_summary(config, task))
        shutil.rmtree(unopened_folder(root, config), ignore_errors=True)  # the failure of an earlier try is history
        return store
    except BaseException:
        store.close() if store is not None else lease.release()
        raise


def record_unopened(root: str | os.PathLike[str], run: Any, error: BaseException, env: Mapping[str, Any]) -> Path:
    """Leave a folder with status ``failed`` and the traceback for a cell that failed before its identity was known.

    (A model that does not load has no content hash.) The next successful opening of the same cell removes it.
    """
    config = plain(run)
    folder = unopened_folder(root, config)
    make_folder(folder, root)
    write_whole(folder / "config.yaml", yaml_text(config))
    remember_start(folder, plain(env))
    trace = "".join(traceback.format_exception(error))
    write_whole(folder / "run.log", trace.encode("utf-8", errors="backslashreplace"))
    task = TaskInfo(task_name(config), "", ())
    write_json(folder / "summary.json", {**running_summary(config, task), **failure(error)})
    return folder


def record_fault(record: Any) -> str | None:
    """What keeps a value from being a record, or None."""
    if not isinstance(record, dict):
        return "not an object"
    if not isinstance(record.get("sample_id"), str):
        return "sample_id is not a text"
    if record.get("status") not in STATUSES:
        return f"status is {record.get('status')!r}, not one of {', '.join(STATUSES)}"
    return None


def shorten(names: list[str], most: int = 5) -> str:
    """The first few of ``names``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
