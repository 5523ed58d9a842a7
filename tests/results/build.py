"""Runs, records and cells by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.config import ModelConfig, ProtocolConfig, RunConfig
from kvbench.results import CellStore, TaskInfo, cell_identity, open_cell, problems, summarise

HASHES = {"model_sha256": "a" * 64, "data_sha256": "b" * 64, "template_sha256": "c" * 64, "dtype": "float32"}


def make_run(runs: Path | str = "runs", **changes: Any) -> RunConfig:
    """A resolved run; ``method``, ``protocol``, ``task`` and ``model`` may be given by name."""
    method = changes.pop("method", "snapkv")
    task = changes.pop("task", "passkey")
    settings: dict[str, Any] = {
        "model": ModelConfig(name=changes.pop("model", "tiny"), source="random"),
        "method": {"name": method, "window": 8, "positions": "original"} if isinstance(method, str) else method,
        "protocol": ProtocolConfig(changes.pop("protocol", "blind")),
        "task": {"_target_": "kvbench.tasks.made.build", "name": task} if isinstance(task, str) else task,
        "positions": "original",
        "runs": str(runs),
    }
    return RunConfig(**(settings | changes))


def make_record(sample_id: str, score: float | None = 100.0, **changes: Any) -> dict[str, Any]:
    """An ok record: 40 context tokens, 16 kept, C10's bytes."""
    record: dict[str, Any] = {
        "sample_id": sample_id,
        "status": "ok",
        "prediction": "12345",
        "answers": ["12345"],
        "score": score,
        "scores": {},
        "prompt_tokens": 50,
        "context_tokens": 40,
        "question_tokens": 10,
        "kept_entries": 16.0,
        "entries_at_first_decode": 26.0,
        "kv_bytes_device": 8192,
        "kv_bytes_host": 0,
        "kv_bytes_full": 20480,
        "fingerprint": "f1",
        "uncompressed": False,
        "note": None,
        "window_question_tokens": 6,
        "prefill_s": 0.5,
        "compress_s": 0.25,
        "decode_s": 2.0,
        "new_tokens": 10,
        "peak_bytes": None,
        "peak_bytes_note": "not measured on cpu",
        "truncated_tokens": 0,
        "answer_survived": True,
        "error": None,
        "info": {},
    }
    return record | changes


def failed_record(sample_id: str, error: str = "Traceback\nRuntimeError: boom") -> dict[str, Any]:
    return {"sample_id": sample_id, "status": "failed", "prediction": None, "score": None, "error": error}


def sample_ids(count: int) -> tuple[str, ...]:
    return tuple(f"s{number:02d}" for number in range(count))


def task_info(run: RunConfig, count: int, **changes: Any) -> TaskInfo:
    settings = {"name": run.task["name"], "metric": "qa_f1", "sample_ids": sample_ids(count)}
    return TaskInfo(**(settings | changes))


def open_store(run: RunConfig, task: TaskInfo, *, lease_seconds: float = 60.0, **hashes: str) -> CellStore:
    identity = cell_identity(run, **(HASHES | hashes))
    return open_cell(run.runs, run, identity, {"time": "now"}, task, lease_seconds=lease_seconds)


def write_cell(run: RunConfig, records: list[dict[str, Any]], *, hashes: dict[str, str] | None = None, **task: Any):
    """A finished cell with these records, answering all samples that they name unless ``sample_ids`` is given."""
    ids = tuple(record["sample_id"] for record in records)
    info = task_info(run, 0, **({"sample_ids": ids} | task))
    with open_store(run, info, **(hashes or {})) as store:
        for record in records:
            store.append(record)
        store.finish(summarise(run, info, store.records()) | {"problems": problems(run, store.records())})
    return store.folder
