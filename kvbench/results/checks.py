"""What the records themselves prove to be wrong with a run, and what a reader should be warned of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.results.files import plain
from kvbench.results.identity import applies_budget, budget_value
from kvbench.results.statistics import mean

Record = Mapping[str, Any]


def problems(run: Any, records: Sequence[Record]) -> list[str]:
    """Sentences about what makes the run's exit code 1; empty when all is well."""
    config = plain(run)
    return [
        *failed_samples(records),
        *nonfinite_samples(records),
        *seeing_caches(config, records),
        *silently_uncompressed(config, records),
    ]


def failed_samples(records: Sequence[Record]) -> list[str]:
    """One sentence for each failed sample, with the last line of its error."""
    return [
        f"sample {record['sample_id']} failed: {last_line(record.get('error'))}"
        for record in records
        if record["status"] == "failed"
    ]


def nonfinite_samples(records: Sequence[Record]) -> list[str]:
    """One sentence if any sample's logits were not finite: it has no answer and no score."""
    ids = [record["sample_id"] for record in records if record["status"] == "nonfinite"]
    if not ids:
        return []
    return [f"the logits of {len(ids)} samples were not finite, the first is {ids[0]}: try another dtype"]


def last_line(text: str | None) -> str:
    """The last line of a traceback: the exception's name and message."""
    lines = (text or "no error was recorded").strip().splitlines()
    return lines[-1] if lines else "no error was recorded"


def seeing_caches(config: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """A blind cache must not depend on the question: one context and budget, one fingerprint.

    The context is told by ``info.context_sha256`` (of the token ids after truncation, which a longer question can
    shorten) and the budget by ``info.context_budget`` (which ``budget_scope=prompt`` makes depend on the question).
    """
    if config["protocol"]["name"] != "blind":
        return []
    seen: dict[tuple[str, Any], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        info = record.get("info") or {}
        context, fingerprint = info.get("context_sha256"), record.get("fingerprint")
        if context and fingerprint:
            seen[context, info.get("context_budget")][fingerprint].append(record["sample_id"])
    return [
        f"blind caches of one context differ (samples {', '.join(ids[0] for ids in prints.values())}): "
        "they depend on the question or on an earlier sample"
        for prints in seen.values()
        if len(prints) > 1
    ]


def silently_uncompressed(config: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """A sample longer than an integer budget that nothing was evicted from, without a ``note`` that says why."""
    budget = budget_value(config)
    if not applies_budget(config.get("method")) or not isinstance(budget, int):
        return []
    scope = "prompt_tokens" if config.get("budget_scope") == "prompt" else "context_tokens"
    guilty = [
        record["sample_id"]
        for record in records
        if record.get("uncompressed") and not record.get("note") and (record.get(scope) or 0) > budget
    ]
    if not guilty:
        return []
    return [f"{len(guilty)} samples longer than budget={budget} were left uncompressed, the first is {guilty[0]}"]


def warnings(run: Any, records: Sequence[Record]) -> list[str]:
    """Sentences that a reader of the numbers should know; they do not make a run fail."""
    config = plain(run)
    return [*template_windows(config, records), *lost_answers(records)]


def template_windows(config: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """A scoring window that hardly holds the question makes "aware" mean template-aware, or not aware at all."""
    window = (config.get("method") or {}).get("window")
    known = mean(record.get("window_question_tokens") for record in records if record["status"] == "ok")
    if config["protocol"]["name"] != "aware" or not isinstance(window, int) or known is None or known >= window / 2:
        return []
    return [
        f"method.window={window} holds {known:.1f} tokens of the question on average; the others are the context's "
        "or the template's, and vote as well. Choose a method.window that covers the question and little else."
    ]


def lost_answers(records: Sequence[Record]) -> list[str]:
    """Samples whose answer truncation removed: no method can find it."""
    lost = sum(record.get("answer_survived") is False for record in records)
    return [f"truncation removed the answer of {lost} samples"] if lost else []
