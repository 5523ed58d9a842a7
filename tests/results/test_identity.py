"""C14: what makes a cell its own, and what its folder is called."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.config import ModelConfig, ProtocolConfig, TrackerConfig
from kvbench.results import cell_hash, cell_identity, cell_label, env
from kvbench.results.folder import cell_folder
from tests.results.build import HASHES, make_run


def identity_hash(run, **hashes):
    return cell_hash(cell_identity(run, **(HASHES | hashes)))


# The first text that hypothesis draws takes seconds on a busy machine: no reason to fail.
QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

RUN = make_run(task={"_target_": "x", "name": "passkey", "length": 1000, "keys": 1, "path": None, "samples": 20})

RELEVANT = {
    "budget": st.one_of(st.integers(1, 10**6).filter(lambda b: b != 128), st.floats(0.001, 0.999)),
    "budget_bytes": st.integers(1, 10**9),
    "match": st.just({"name": "kivi2", "codec": {"_target_": "kvbench.methods.kivi.Kivi"}}),
    "budget_scope": st.just("prompt"),
    "question_evictable": st.just(True),
    "first_token": st.just("full"),
    "truncation": st.just("official"),
    "positions": st.just("compact"),
    "seed": st.integers(1, 10**6),
    "max_new_tokens": st.integers(1, 10**6),
    "max_prompt_tokens": st.integers(1, 10**6),
    "protocol": st.sampled_from(["aware", "swapped"]).map(ProtocolConfig),
    "method": st.sampled_from(
        [{"name": "tova", "window": 8, "positions": "original"}, {"name": "snapkv", "window": 9}, {"name": "snapkv"}]
    ),
    "task": st.sampled_from([{**RUN.task, "length": 1001}, {**RUN.task, "name": "niah"}, {**RUN.task, "keys": 2}]),
    "model": st.sampled_from(
        [replace(RUN.model, window=99), replace(RUN.model, chat=False), replace(RUN.model, template_kwargs={"a": 1})]
    ),
}
IRRELEVANT = {
    "device": st.sampled_from(["cpu", "cuda", "cuda:3", "mps"]),
    "dtype": st.sampled_from(["float32", "float16"]),  # the resolved one counts
    "runs": st.sampled_from(["elsewhere", "ü b"]),
    "experiment": st.sampled_from(["other", "ü b"]),
    "limit": st.integers(1, 100),
    "fail_fast": st.just(True),
    "dump_prompts": st.just(True),
    "tracker": st.just(TrackerConfig("wandb", "other", "offline")),
    "task": st.sampled_from([{**RUN.task, "path": "/elsewhere"}, {**RUN.task, "samples": 500}]),
    "model": st.sampled_from(
        [
            replace(RUN.model, name="other"),
            replace(RUN.model, path="/elsewhere", source="folder"),
            replace(RUN.model, allow_pickle=True),
        ]
    ),
}


@QUICK
@given(st.data())
def test_every_relevant_field_changes_the_hash(data):
    field = data.draw(st.sampled_from(sorted(RELEVANT)))
    changed = replace(RUN, **{field: data.draw(RELEVANT[field])})
    assert identity_hash(changed) != identity_hash(RUN)


@QUICK
@given(st.data())
def test_no_irrelevant_field_changes_the_hash(data):
    changes = {name: data.draw(IRRELEVANT[name]) for name in data.draw(st.sets(st.sampled_from(sorted(IRRELEVANT))))}
    assert identity_hash(replace(copy.deepcopy(RUN), **changes)) == identity_hash(RUN)


@pytest.mark.parametrize("name", ["model_sha256", "data_sha256", "template_sha256", "dtype"])
def test_content_and_dtype_count(name):
    assert identity_hash(RUN, **{name: "other"}) != identity_hash(RUN)


def test_every_run_field_is_placed():
    """A new key must be sorted into one of the tables above."""
    assert set(RUN.__dataclass_fields__) == set(RELEVANT) | set(IRRELEVANT)


@pytest.mark.parametrize("one, other", [("0.5", 0.5), ("0.50", 0.5), (128, "128"), (128.0, 128), ("1e2", 100)])
def test_spellings_of_one_budget(one, other):
    assert identity_hash(make_run(budget=one)) == identity_hash(make_run(budget=other))
    assert cell_label(make_run(budget=one)) == cell_label(make_run(budget=other))


@pytest.mark.parametrize("one, other", [(0.875, 0.88), (0.1, 0.10000001), (1, 0.999), ("full", 128)])
def test_different_budgets(one, other):
    assert identity_hash(make_run(budget=one)) != identity_hash(make_run(budget=other))
    assert cell_label(make_run(budget=one)) != cell_label(make_run(budget=other))


@pytest.mark.parametrize(
    "method", ["full", {"name": "kivi", "bits": 2, "evicts": False}, {"name": "codec", "scorer": None}]
)
def test_a_method_that_drops_nothing_is_one_cell_for_all_budgets(method):
    runs = [make_run(method=method, budget=budget) for budget in (64, 0.5, "full")]
    assert len({identity_hash(run) for run in runs}) == 1
    assert {cell_label(run) for run in runs} == {f"tiny-{runs[0].method['name']}-blind"}


LABELS = [
    (dict(), "tiny-snapkv-blind-b128"),
    (dict(budget=0.875, protocol="aware"), "tiny-snapkv-aware-b0.875"),
    (dict(model="meta-llama/Llama-3.1-8B"), "meta-llama_Llama-3.1-8B-snapkv-blind-b128"),
    (dict(model="..\\evil: <name>?"), "_evil_name_-snapkv-blind-b128"),
    (dict(model="モデル b"), "_b-snapkv-blind-b128"),
    (dict(model="m" * 300), "m" * 40 + "-snapkv-blind-b128"),
    (dict(model="..."), "_-snapkv-blind-b128"),
]


@pytest.mark.parametrize("changes, label", LABELS)
def test_labels(changes, label):
    assert cell_label(make_run(**changes)) == label


@QUICK
@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_any_name_makes_a_safe_folder(model, task):
    run = make_run(model=model, task=task)
    folder = cell_folder("root", run, {})
    assert folder.parts[:2] == ("root", "default")
    assert all(part.isascii() and part not in (".", "..") and len(part) < 200 for part in folder.parts)
    assert not set('/\\:*?"<>| \n\0') & set("".join(folder.parts[1:]))


def test_environment_is_strict_json_and_needs_no_torch():
    found = env("cpu")
    json.dumps(found, allow_nan=False)
    assert found["kvbench"] and found["python"] and found["time"] and isinstance(found["argv"], list)
    assert {"torch", "transformers", "datasets", "numpy", "git_commit", "git_dirty"} <= found.keys()


def test_environment_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert env()["git_commit"] is None


def test_model_config_default_fields_are_placed():
    """Same for the model's keys: a new one is part of the identity unless somebody says otherwise."""
    kept = cell_identity(make_run(), **HASHES)["model"]
    hidden = {"name", "source", "path", "revision", "allow_pickle", "chat_template"}
    null = {name for name in ModelConfig.__dataclass_fields__ if getattr(ModelConfig(), name) is None}
    assert kept.keys() == (ModelConfig.__dataclass_fields__.keys() - hidden - null) | {"sha256"}


def test_budgets_in_bytes_name_their_cells():
    by_bytes, matched = make_run(budget_bytes=4096), make_run(match={"name": "kivi2"})
    assert cell_label(by_bytes).endswith("-bytes_4096")
    assert cell_label(matched).endswith("-match_kivi2")
    hashes = {identity_hash(run) for run in (RUN, by_bytes, matched, make_run(match={"name": "kivi4"}))}
    assert len(hashes) == 4
