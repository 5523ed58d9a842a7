"""Budgets, the schema, and what is said about wrong values."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench import groups, usage
from kvbench.budget import Budget
from kvbench.compose import cells, read
from kvbench.config import RunConfig, conf_dir
from kvbench.errors import InputError
from kvbench.suggest import did_you_mean, nearest
from kvbench.validate import validate


def run_of(*overrides: str) -> RunConfig:
    (run,) = cells(read(overrides)).values()
    return run


# --- budgets -----------------------------------------------------------------------------------------------------


def half_up(share: Fraction, tokens: int) -> int:
    whole, rest = divmod(share * tokens, 1)
    return int(whole) + (rest >= Fraction(1, 2))


@pytest.mark.parametrize("share", [0.1, 0.9, 0.5, 0.25, 0.875, 0.88, 0.015625, 1 / 3, 0.999999, 1e-9])
def test_a_share_is_rounded_half_up_in_exact_arithmetic_at_every_length(share):
    budget = Budget.parse(share)
    for tokens in range(1, 8001):
        assert budget.entries(tokens) == min(max(half_up(Fraction(repr(share)), tokens), 1), tokens)


@given(st.decimals(min_value="0.0001", max_value="0.9999", places=4), st.integers(1, 8000))
def test_any_share_at_any_length(decimal, tokens):
    expected = min(max(half_up(Fraction(decimal), tokens), 1), tokens)
    assert Budget.parse(float(decimal)).entries(tokens) == expected


def test_the_ratio_that_float_arithmetic_gets_wrong():
    wrong = sum(int(n * (1 - 0.9)) != n // 10 for n in range(10, 8001, 10))
    assert wrong > 0  # what others do
    assert all(Budget.parse(0.1).entries(n) == n // 10 for n in range(10, 8001, 10))


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_entries_never_exceed_the_tokens(count, tokens):
    assert Budget.parse(count).entries(tokens) == min(count, tokens)


def test_full_keeps_everything():
    assert [Budget.parse("full").entries(n) for n in (0, 1, 4096)] == [0, 1, 4096]


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        -0.5,
        0.0,
        1.0,
        1.5,
        64.0,
        float("nan"),
        float("inf"),
        True,
        False,
        "half",
        "0.5",
        "",
        None,
        [],
        {},
        10**30,
    ],
)
def test_what_is_no_budget(value):
    with pytest.raises(InputError) as caught:
        Budget.parse(value)
    assert caught.value.key == "budget"
    assert caught.value.value is value


@given(st.floats(1e-12, 1, exclude_max=True), st.floats(1e-12, 1, exclude_max=True))
def test_different_shares_have_different_labels(a, b):
    assert (str(Budget.parse(a)) == str(Budget.parse(b))) == (a == b)


def test_labels():
    labels = {value: str(Budget.parse(value)) for value in (0.875, 0.88, 128, "full", 1e-05, 0.1, 1e-300)}
    expected = {
        0.875: "0.875",
        0.88: "0.88",
        128: "128",
        "full": "full",
        1e-05: "0.00001",
        0.1: "0.1",
        1e-300: "1e-300",
    }
    assert labels == expected
    assert str(Budget.parse(64)) != str(Budget.parse(0.64))


# --- schema ------------------------------------------------------------------------------------------------------


def test_every_key_is_in_config_yaml_and_in_the_help():
    plain = [
        item.name for item in fields(RunConfig) if item.name not in ("model", "method", "protocol", "task", "tracker")
    ]
    defaults = usage.shipped_defaults(str(Path(conf_dir(), "config.yaml")))
    assert sorted(usage.KEY_HELP) == sorted(plain)
    assert set(plain) <= set(defaults)
    text = usage.text([conf_dir()])
    for key in plain:
        line = next(line for line in text.splitlines() if line.startswith(f"  {key} ("))
        assert len(line) <= 130


def test_config_yaml_and_schema_agree_on_the_defaults():
    run, schema = run_of(), RunConfig()
    for item in fields(RunConfig):
        if item.name not in ("model", "method", "protocol", "task", "tracker", "positions"):
            assert getattr(run, item.name) == getattr(schema, item.name), item.name


@pytest.mark.parametrize("method", groups.options([conf_dir()])["method"])
def test_every_method_composes(method):
    run = run_of(f"method={method}", "budget=0.5", "seed=3")
    assert run.method["name"] == method
    assert run.positions == run.method["positions"]
    assert set(run.method) >= {"scorer", "allocator", "protect", "codec"}


# what some options need beside their name
NEEDED = {"folder": ["model.path=."], "gguf": ["model.path=config.yaml"], "hub": ["model.path=org/name"]}


@pytest.mark.parametrize("group", ["model", "protocol", "task", "tracker"])
def test_every_option_that_is_shipped_composes_and_is_valid(group, monkeypatch):
    monkeypatch.chdir(conf_dir())
    for option in groups.options([conf_dir()])[group]:
        needed = NEEDED.get(option, ["task.path=."] if option == "jsonl" or option.startswith("ruler/") else [])
        run = run_of(f"{group}={option}", *needed)
        assert getattr(run, group), option


def test_method_values_reach_the_components():
    run = run_of("method.window=8", "method.kernel=5", "method.pooling=avg", "method.group=sum", "budget=9")
    assert run.method["scorer"] == {
        "_target_": "kvbench.methods.scorers.SnapKV",
        "window": 8,
        "kernel": 5,
        "pooling": "avg",
        "group": "sum",
    }
    assert run.method["protect"] == {"sinks": 0, "recent": 8}
    assert run_of("method=streamingllm", "method.sinks=2").method["protect"] == {"sinks": 2, "recent": 0}
    assert run_of("method=random", "seed=7").method["scorer"]["seed"] == 7


def test_positions_follow_the_method_unless_they_are_given():
    assert run_of("method=streamingllm").positions == "compact"
    assert run_of("method=streamingllm", "positions=original").positions == "original"
    assert run_of("method=streamingllm", "method.positions=original").positions == "original"


def test_a_frozen_run_is_plain_data():
    run = run_of()
    assert type(run) is RunConfig
    assert type(run.method) is dict
    assert type(run.method["scorer"]) is dict
    assert type(run.task) is dict
    validate(run)


# --- suggestions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("bugdet", ["budget", "limit"], ["budget"]),
        ("SnapKV", ["snapkv", "tova"], ["snapkv"]),
        ("max-new-tokens", ["max_new_tokens"], ["max_new_tokens"]),
        ("qasper", ["longbench/qasper", "longbench_e/qasper", "passkey"], ["longbench/qasper", "longbench_e/qasper"]),
        ("qaspr", ["longbench/qasper", "passkey"], ["longbench/qasper"]),
        ("fp16", ["float32", "float16"], ["float16"]),
        ("zzz", ["budget"], []),
    ],
)
def test_near_misses(word, known, expected):
    assert nearest(word, known) == expected


def test_nothing_is_suggested_for_what_is_right():
    assert did_you_mean("budget", ["budget"]) == ""


@settings(max_examples=50)
@given(st.text(max_size=30), st.lists(st.text(max_size=10), max_size=5))
def test_suggestions_never_raise(word, known):
    assert set(nearest(word, known)) <= set(known)
