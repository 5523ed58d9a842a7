"""From a cell's records to its summary: scores, bytes, times, and how many samples went wrong in which way.

Every mean is over the records with status ``ok``. What is not known is null, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.results.files import plain
from kvbench.results.folder import TaskInfo, cell_words
from kvbench.results.identity import applies_budget, budget_text
from kvbench.results.statistics import bootstrap_ci95, mean

Record = Mapping[str, Any]
# What a sample's time is made of; feeding is what passes tokens through the compressed cache before the first answer's.
SECONDS = ("prefill_s", "compress_s", "feed_s", "decode_s")
LENGTH_BUCKETS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, float("inf")))  # LongBench-E's, in words


def summarise(run: Any, task: TaskInfo, records: Sequence[Record]) -> dict[str, Any]:
    """The content of summary.json for the records of the samples in ``task`` (others are ignored).

    ``status`` is ``done`` if every sample has a record and none failed, ``failed`` if one failed, else ``incomplete``.
    """
    config = plain(run)
    by_id = {record["sample_id"]: record for record in records}
    # In the task's order, so that the interval does not depend on the order in which a resumed run wrote its lines.
    asked = [by_id[name] for name in task.sample_ids if name in by_id]
    ok = [record for record in asked if record["status"] == "ok"]
    summary: dict[str, Any] = {
        "status": status(task, asked),
        "cell": cell_words(config, task.name),
        **score_summary(ok),
        "expected": len(task.sample_ids),
        "metric": task.metric,
        "scores": extra_scores(ok),
        "has_question": task.has_question,
        "budget": budget_summary(config, ok),
        "kv": kv_summary(ok),
        "tokens": token_summary(ok),
        "time": time_summary(ok),
        "counts": counts(asked),
    }
    if task.name.startswith("longbench_e/"):
        summary["buckets"] = length_buckets(ok)
    return summary


def status(task: TaskInfo, records: Sequence[Record]) -> str:
    """``done``, ``failed`` or ``incomplete``."""
    if any(record["status"] == "failed" for record in records):
        return "failed"
    return "done" if len(records) == len(task.sample_ids) else "incomplete"


def score_summary(ok: Sequence[Record]) -> dict[str, Any]:
    """``n`` scored records, their mean ``score`` (0..100) and its ``ci95``, rounded to two digits as LongBench does."""
    scored = [record for record in ok if record.get("score") is not None]
    scores = [float(record["score"]) for record in scored]
    average = mean(scores)
    return {
        "n": len(scores),
        "score": None if average is None else round(average, 2),
        "ci95": bootstrap_ci95(scores, [record_group(record) for record in scored]),
    }


def record_group(record: Record) -> str:
    """The name of the context that a record shares with others, or an empty text."""
    return str(record.get("group") or (record.get("info") or {}).get("group") or "")


def extra_scores(ok: Sequence[Record]) -> dict[str, float | None]:
    """Means of the further metrics that records name in ``scores``."""
    names = sorted({name for record in ok for name in record.get("scores") or {}})
    means = {name: mean((record.get("scores") or {}).get(name) for record in ok) for name in names}
    return {name: None if value is None else round(value, 2) for name, value in means.items()}


def budget_summary(config: Mapping[str, Any], ok: Sequence[Record]) -> dict[str, Any]:
    """What was asked for, and what was kept: entries per KV head, averaged over the compressed layers."""
    return {
        "requested": budget_text(config),
        "applies": applies_budget(config.get("method")),
        "scope": config.get("budget_scope"),
        "kept_entries": mean(record.get("kept_entries") for record in ok),
        "window_question_tokens": mean(record.get("window_question_tokens") for record in ok),
    }


def kv_summary(ok: Sequence[Record]) -> dict[str, float | None]:
    """Bytes and entries at the first decode step; ``share`` is the mean of each record's (device + host) / full."""
    return {
        "share": mean(share(record) for record in ok),
        "bytes_device": mean(record.get("kv_bytes_device") for record in ok),
        "bytes_host": mean(record.get("kv_bytes_host") for record in ok),
        "bytes_full": mean(record.get("kv_bytes_full") for record in ok),
        "entries_at_first_decode": mean(record.get("entries_at_first_decode") for record in ok),
    }


def share(record: Record) -> float | None:
    """The measured share of the full cache's bytes, or None where the method only simulates its saving."""
    device, host, full = (record.get(f"kv_bytes_{where}") for where in ("device", "host", "full"))
    if device is None or host is None or not full:
        return None
    return (device + host) / full


def token_summary(ok: Sequence[Record]) -> dict[str, float | None]:
    """Mean lengths in tokens: of the prompt, its segments, what truncation removed, and the answer."""
    names = ("prompt_tokens", "context_tokens", "question_tokens", "truncated_tokens", "new_tokens")
    return {name.removesuffix("_tokens"): mean(record.get(name) for record in ok) for name in names}


def time_summary(ok: Sequence[Record]) -> dict[str, Any]:
    """Mean seconds a sample; ``tokens_per_s`` is all new tokens over all decode seconds; ``peak_bytes`` the largest.

    Where the peak is unknown, ``peak_bytes_note`` says why. Answers that were decoded as rows of one batch with those
    of other cells say nothing about the speed of this one: they count neither in ``decode_s`` nor in ``tokens_per_s``.
    """
    alone = [record for record in ok if record.get("decode_rows", 1) == 1]
    timed = [record for record in alone if record.get("decode_s") is not None and record.get("new_tokens") is not None]
    seconds = sum(record["decode_s"] for record in timed)
    peaks = [record["peak_bytes"] for record in ok if record.get("peak_bytes") is not None]
    notes = sorted({record["peak_bytes_note"] for record in ok if record.get("peak_bytes_note")})
    return {
        **{name: mean(record.get(name) for record in (alone if name == "decode_s" else ok)) for name in SECONDS},
        "tokens_per_s": sum(record["new_tokens"] for record in timed) / seconds if seconds > 0 else None,
        "peak_bytes": max(peaks) if peaks else None,
        "peak_bytes_note": None if peaks else "; ".join(notes) or None,
    }


def counts(records: Sequence[Record]) -> dict[str, int]:
    """How many records are ok, and how many went wrong in each way. One record can count in several.

    ``empty``, ``truncated`` and ``uncompressed`` count among the records that ran, ``answer_lost`` those whose gold
    answer stood only in the part that truncation removed.
    """
    ran = [record for record in records if record["status"] != "failed"]
    return {
        "ok": sum(record["status"] == "ok" for record in records),
        "failed": sum(record["status"] == "failed" for record in records),
        "empty": sum(record["status"] == "ok" and not (record.get("prediction") or "").strip() for record in records),
        "nonfinite": sum(record["status"] == "nonfinite" for record in records),
        "truncated": sum((record.get("truncated_tokens") or 0) > 0 for record in ran),
        "uncompressed": sum(bool(record.get("uncompressed")) for record in ran),
        "answer_lost": sum(record.get("answer_survived") is False for record in ran),
    }


def length_buckets(ok: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """LongBench-E's scores by the sample's length in words (``info.length``), each with its n and interval."""
    lengths = [(record, (record.get("info") or {}).get("length")) for record in ok]
    return {
        name: score_summary([record for record, length in lengths if length is not None and low <= length < high])
        for name, low, high in LENGTH_BUCKETS
    }
