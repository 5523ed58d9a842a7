"""Golden numbers, all computed by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbench.results import problems, summarise, warnings
from kvbench.results.statistics import bootstrap_ci95
from tests.results.build import failed_record, make_record, make_run, sample_ids, task_info


def summary_of(records, run=None, **task):
    run = run or make_run()
    ids = tuple(record["sample_id"] for record in records)
    return summarise(run, task_info(run, 0, **({"sample_ids": ids} | task)), records)


def test_golden_summary():
    records = [
        make_record("a", 100.0, prefill_s=1.0, decode_s=1.0, new_tokens=5, scores={"rougeL": 20.0}),
        make_record("b", 50.0, prefill_s=3.0, decode_s=3.0, new_tokens=15, prediction=" \n", scores={"rougeL": 30.0}),
        make_record("c", 0.0, kv_bytes_device=0, kv_bytes_host=10240, truncated_tokens=7, answer_survived=False),
        failed_record("d"),
        make_record("e", None, status="nonfinite", kv_bytes_device=1, uncompressed=True),
    ]
    summary = summary_of(records)
    assert summary.pop("ci95") == [0.0, 100.0]
    assert summary == {
        "status": "failed",
        "cell": {
            "model": "tiny",
            "task": "passkey",
            "method": "snapkv",
            "budget": 128,
            "protocol": "blind",
            "seed": 0,
        },
        "n": 3,
        "expected": 5,
        "score": 50.0,
        "metric": "qa_f1",
        "scores": {"rougeL": 25.0},
        "has_question": True,
        "budget": {
            "requested": "128",
            "applies": True,
            "scope": "context",
            "kept_entries": 16.0,
            "window_question_tokens": 6.0,
        },
        "kv": {
            "share": pytest.approx((0.4 + 0.4 + 0.5) / 3),
            "bytes_device": pytest.approx(16384 / 3),
            "bytes_host": pytest.approx(10240 / 3),
            "bytes_full": 20480.0,
            "entries_at_first_decode": 26.0,
        },
        "tokens": {
            "prompt": 50.0,
            "context": 40.0,
            "question": 10.0,
            "truncated": pytest.approx(7 / 3),
            "new": 10.0,
        },
        "time": {
            "prefill_s": 1.5,
            "compress_s": 0.25,
            "feed_s": None,
            "decode_s": 2.0,
            "tokens_per_s": 5.0,
            "peak_bytes": None,
            "peak_bytes_note": "not measured on cpu",
        },
        "counts": {
            "ok": 3,
            "failed": 1,
            "empty": 1,
            "nonfinite": 1,
            "truncated": 1,
            "uncompressed": 1,
            "answer_lost": 1,
        },
    }
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("records", [[], [failed_record("a")], [make_record("a", None, status="nonfinite")]])
def test_nothing_known_is_null_and_never_zero(records):
    summary = summary_of(records)
    assert summary["score"] is None and summary["ci95"] is None and summary["n"] == 0
    assert set(summary["kv"].values()) == {None}
    assert set(summary["time"].values()) == {None}


def test_a_method_that_only_simulates_has_no_bytes():
    summary = summary_of([make_record("a", kv_bytes_device=None), make_record("b", kv_bytes_device=None)])
    assert summary["kv"]["share"] is None and summary["kv"]["bytes_device"] is None


def test_peak_is_the_largest():
    summary = summary_of([make_record("a", peak_bytes=5, peak_bytes_note=None), make_record("b", peak_bytes=9)])
    assert (summary["time"]["peak_bytes"], summary["time"]["peak_bytes_note"]) == (9, None)


@pytest.mark.parametrize(
    "records, expected",
    [
        ([make_record("s00"), make_record("s01")], "done"),
        ([make_record("s00")], "incomplete"),
        ([failed_record("s00")], "failed"),
        ([make_record("s00"), make_record("s01", None, status="nonfinite")], "done"),
        ([make_record("s00"), make_record("s01"), failed_record("another")], "done"),
    ],
)
def test_status(records, expected):
    assert summary_of(records, sample_ids=sample_ids(2))["status"] == expected


def test_the_order_of_records_changes_nothing():
    records = [make_record(name, float(number * 7 % 100)) for number, name in enumerate(sample_ids(20))]
    task = dict(sample_ids=sample_ids(20))
    assert summary_of(records, **task) == summary_of(records[::-1], **task)


def test_full_budget_and_fraction_in_words():
    assert summary_of([], make_run(method="full"))["cell"]["budget"] == "full"
    assert summary_of([], make_run(budget="0.50"))["cell"]["budget"] == 0.5
    assert summary_of([], make_run(method="full"))["budget"]["applies"] is False


# -- intervals


def test_interval_of_constant_and_single_scores():
    assert bootstrap_ci95([40.0] * 10) == [40.0, 40.0]
    assert bootstrap_ci95([40.0]) is None and bootstrap_ci95([]) is None
    assert bootstrap_ci95([1.0, 2.0, 3.0], ["g", "g", "g"]) is None


def test_interval_agrees_with_the_normal_approximation():
    scores = np.random.default_rng(1).normal(50, 10, 400)
    low, high = bootstrap_ci95(list(scores))
    half = 1.96 * scores.std() / 20
    assert low == pytest.approx(scores.mean() - half, abs=0.15)
    assert high == pytest.approx(scores.mean() + half, abs=0.15)


def test_records_of_one_context_are_drawn_together():
    scores = [0.0] * 50 + [100.0] * 50
    groups = ["first"] * 50 + ["second"] * 50
    assert bootstrap_ci95(scores, groups) == [0.0, 100.0]  # two contexts, not a hundred samples
    low, high = bootstrap_ci95(scores)
    assert 39 < low < 42 and 58 < high < 61
    records = [make_record(name, float(100 * (n % 2)), info={"group": f"g{n % 2}"}) for n, name in enumerate("abcdef")]
    assert summary_of(records)["ci95"] == [0.0, 100.0]


def test_interval_of_many_records_fits_in_memory():
    assert bootstrap_ci95([1.0, 2.0] * 2500) == pytest.approx([1.49, 1.51], abs=0.01)


# -- LongBench-E


def test_buckets_by_length():
    lengths = [0, 3999, 4000, 7999, 8000, 50000]
    records = [make_record(f"r{n}", 10.0 * n, info={"length": length}) for n, length in enumerate(lengths)]
    records += [failed_record("f"), make_record("g", 99.0, info={})]
    buckets = summary_of(records, name="longbench_e/qasper")["buckets"]
    assert {name: (part["n"], part["score"]) for name, part in buckets.items()} == {
        "0-4k": (2, 5.0),
        "4-8k": (2, 25.0),
        "8k+": (2, 45.0),
    }
    assert "buckets" not in summary_of(records, name="longbench/qasper")


def test_an_empty_bucket_is_null():
    buckets = summary_of([make_record("a", info={"length": 1})], name="longbench_e/trec")["buckets"]
    assert buckets["8k+"] == {"n": 0, "score": None, "ci95": None}


# -- what makes a run fail, and what it warns of


def seen(name, context, fingerprint, **info):
    return make_record(name, fingerprint=fingerprint, info={"context_sha256": context, **info})


def test_blind_is_blind():
    same = [seen("a", "c1", "f1"), seen("b", "c1", "f1"), seen("c", "c2", "f2")]
    leak = [seen("a", "c1", "f1"), seen("b", "c1", "f2")]
    assert problems(make_run(), same) == []
    (problem,) = problems(make_run(), leak)
    assert "a, b" in problem and "depend on the question" in problem
    assert problems(make_run(protocol="aware"), leak) == []
    assert (
        problems(make_run(), [seen("a", "c1", "f1", context_budget=60), seen("b", "c1", "f2", context_budget=58)]) == []
    )


def test_failed_samples_are_problems():
    assert problems(make_run(), [failed_record("a")]) == ["sample a failed: RuntimeError: boom"]


def test_a_sample_that_stays_whole_without_a_reason_is_a_problem():
    whole = make_record("a", context_tokens=200, uncompressed=True)
    assert "budget=128" in problems(make_run(), [whole])[0]
    assert problems(make_run(), [whole | {"note": "sinks and window cover the context"}]) == []
    assert problems(make_run(), [whole | {"context_tokens": 100}]) == []
    assert problems(make_run(method="full"), [whole]) == []
    assert problems(make_run(budget=0.5), [whole]) == []
    assert problems(make_run(budget_scope="prompt"), [whole | {"context_tokens": 100, "prompt_tokens": 129}]) != []


def test_a_window_full_of_template_is_warned_of():
    few = [make_record("a", window_question_tokens=2), make_record("b", window_question_tokens=3)]
    (warning,) = warnings(make_run(protocol="aware"), few)
    assert "method.window=8" in warning and "2.5" in warning
    assert warnings(make_run(), few) == []
    assert warnings(make_run(protocol="aware"), [make_record("a", window_question_tokens=4)]) == []
    assert warnings(make_run(protocol="aware"), [make_record("a", window_question_tokens=None)]) == []


def test_lost_answers_are_warned_of():
    assert "answer of 1 samples" in warnings(make_run(), [make_record("a", answer_survived=False)])[0]
