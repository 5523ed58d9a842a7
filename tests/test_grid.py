"""Cells that share model and task run together: the same records, whatever happens to one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvbench import experiment, sample_runner
from kvbench.cell import Preparation
from kvbench.compose import cells, read
from kvbench.engine import Engine
from kvbench.grid import distinct, grids
from tests.cells import METHODS
from tests.test_experiment import TINY, records, run, sample, small, words, write_jsonl

SAMPLES = [sample("a", words(90, 1), "a?"), sample("b", words(90, 1), "b, then?"), sample("c", words(120, 2), "c?")]
# What must not depend on which cells run beside one; times do.
ESSENTIAL = ("sample_id", "status", "prediction", "score", "fingerprint", "kept_entries", "kv_bytes_device",
             "kv_bytes_host", "kv_bytes_full", "note", "window_question_tokens", "error", "info")  # fmt: skip
SMALL = {"snapkv": 8, "pyramidkv": 8, "adakv": 8, "h2o_oneshot": 4, "snapkv_kvcf": 4, "snapkv_niah": 8}


def options(method: str) -> list[str]:
    """What a method needs to fit budgets of 24 and heads of 16 dimensions."""
    if method == "lagkv":
        return ["method.lag=8"]
    return [f"method.window={SMALL[method]}"] if method in SMALL else small(method)


def configs(root: Path, *lines: list[str]) -> list:
    """The cells of several command lines."""
    data = write_jsonl(root / "data.jsonl", SAMPLES)
    rest = [*TINY, f"task.path={data}", f"runs={root / 'runs'}"]
    return [config for line in lines for config in cells(read(["-m", *line, *rest])).values()]


def essential(root: Path) -> dict[str, list[dict]]:
    """Cell -> what must not depend on the others."""
    found = {}
    for path in (root / "runs").rglob("records.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [{key: record.get(key) for key in ESSENTIAL} for record in lines]
    return found


def test_cells_run_together_give_the_records_of_cells_run_alone(tmp_path: Path) -> None:
    """One prefill and one decode for the whole grid change no token, score, byte or fingerprint, for every method."""
    grid = ["protocol=blind,aware,swapped", "budget=24,40", "max_new_tokens=8"]
    lines = [[f"method={method}", *options(method), *grid] for method in METHODS]
    lines.append(["method=snapkv", "method.window=4", *grid])  # another window than its neighbour's
    together, alone = tmp_path / "together", tmp_path / "alone"
    for root in (together, alone):
        root.mkdir()
    assert len(grids(distinct([Preparation().cell(config) for config in configs(together, *lines[:2])]))) > 1, "tasks"
    preparation = Preparation()
    assert len(grids(distinct([preparation.cell(config) for config in configs(together, *lines)]))) == 1
    assert experiment.run_cells(configs(together, *lines)) == 0
    for config in configs(alone, *lines):
        assert experiment.run_cells([config]) == 0
    found = essential(together)
    assert len(found) == 6 * (len(METHODS) + 1 - 4) + 3 * 4, "full, kivi2, kivi4 and hcattention have no budgets"
    assert all([r["status"] for r in cell] == ["ok"] * 3 for cell in found.values())
    assert found == essential(alone)


def test_cells_that_read_other_prompts_or_must_end_alone_are_no_grid(tmp_path: Path) -> None:
    line = ["method=snapkv", "method.window=8", "budget=24,40"]
    preparation = Preparation()

    def sizes(*more: list[str]) -> list[int]:
        made = [preparation.cell(config) for config in configs(tmp_path, *([*line, *extra] for extra in more))]
        return [len(grid) for grid in grids(distinct(made))]

    assert sizes([], ["protocol=aware"], ["limit=1"]) == [4], "how many samples a cell has does not part it"
    assert sizes([], ["max_new_tokens=3"]) == [2, 2]
    assert sizes([], ["max_prompt_tokens=50"]) == [2, 2]
    assert sizes([], ["dtype=bfloat16"]) == [2, 2]
    assert sizes(["fail_fast=true"]) == [1, 1]


def test_answers_that_do_not_fit_together_are_decoded_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ["budget=24", "protocol=blind,aware"]
    lines = [[f"method={method}", *options(method), *grid] for method in ("snapkv", "h2o", "kivi2")]
    expected, broken = tmp_path / "expected", tmp_path / "broken"
    for root in (expected, broken):
        root.mkdir()
    assert experiment.run_cells(configs(expected, *lines)) == 0
    decode, rows = Engine.decode, []

    def small_memory(self: Engine, caches: list, logits: torch.Tensor, stop: object) -> list:
        rows.append(len(caches))
        if len(caches) > 1:
            decode(self, caches, logits, stop)  # type: ignore[arg-type]  # the caches have grown when it fails
            raise torch.OutOfMemoryError("not that many rows")
        return decode(self, caches, logits, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "decode", small_memory)
    assert experiment.run_cells(configs(broken, *lines)) == 0
    assert sorted(set(rows)) == [1, 6]
    assert essential(broken) == essential(expected)


def test_a_model_that_does_not_load_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def broken(engine: Engine) -> None:
        tries.append(engine)
        raise RuntimeError("the self-test fails")

    monkeypatch.setattr(experiment, "self_test", broken)
    assert experiment.run_cells(configs(tmp_path, ["method=snapkv", "method.window=8", "budget=24,40,50"])) == 1
    assert len(tries) == 1
    states = [json.loads(path.read_text())["status"] for path in (tmp_path / "runs").rglob("summary.json")]
    assert states == ["failed"] * 3


def test_a_scorer_that_writes_into_what_it_is_given_changes_no_other_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text(
        "from kvbench.methods.scorers import KeyNorm\n"
        "class Careless(KeyNorm):\n"
        "    def __call__(self, layer):\n"
        "        scores = super().__call__(layer)\n"
        "        for tensor in (layer.keys, layer.values, layer.window_queries, layer.column_sums):\n"
        "            tensor.mul_(0)\n"
        "        return scores\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    careless = ["method=knorm", "method.name=careless", "method.scorer._target_=careless.Careless"]
    others = [["method=snapkv", "method.window=8"], ["method=h2o"]]
    grid = ["budget=24", "protocol=blind,aware"]
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for root in (alone, beside):
        root.mkdir()
    assert experiment.run_cells(configs(alone, *([*line, *grid] for line in others))) == 0
    assert experiment.run_cells(configs(beside, *([*line, *grid] for line in (careless, *others)))) == 0
    expected, found = essential(alone), essential(beside)
    assert len(found) == len(expected) + 2
    assert {name: found[name] for name in expected} == expected


def test_shared_work_is_counted_for_every_cell_and_shared_decoding_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves whenever scores are computed: every record says what they cost, computed once a context."""
    line = ["method=knorm", "budget=24,40"]
    ticks, clock = [], [0.0]
    score = sample_runner.Method.scores

    def ticking(self: sample_runner.Method, *given: object) -> list:
        ticks.append(self)
        clock[0] += 1000.0
        return score(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(sample_runner.Method, "scores", ticking)
    monkeypatch.setattr(sample_runner.ContextRun, "now", lambda self: clock[0])
    assert experiment.run_cells(configs(tmp_path, line)) == 0
    assert len(ticks) == 2, "once a context, whatever the number of budgets"
    for path in (tmp_path / "runs").rglob("records.jsonl"):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        assert [record["compress_s"] for record in lines] == [1000.0] * 3, "b reads a's context: the same scores"
        assert [record["decode_rows"] for record in lines] == [2, 2, 2]
        time = json.loads((path.parent / "summary.json").read_text())["time"]
        assert time["decode_s"] is time["tokens_per_s"] is None
        assert time["compress_s"] == 1000.0


# --- budgets in bytes


def test_match_holds_no_more_bytes_than_the_method_that_it_matches(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [sample("a", words(300, 1), "a?"), sample("c", words(400, 2), "c?")])
    kivi = run(tmp_path / "kivi", data, "method=kivi2", "method.codec.group=16")
    options = ["method=snapkv", "method.window=8", "match=kivi2", *TINY, f"task.path={data}", f"runs={tmp_path}/snapkv"]
    (config,) = cells(read(options)).values()
    config.match["codec"]["group"] = 16
    assert experiment.run_cells([config]) == 0
    found = records(tmp_path / "snapkv")
    for matched, quantised in zip(found, kivi, strict=True):
        assert matched["info"]["allowed_bytes"] == quantised["kv_bytes_device"] >= matched["kv_bytes_device"]
        assert not matched["uncompressed"]


def test_budgets_that_are_tried_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions about one context share its prefill, not the caches of every budget that the search tried."""
    made: list[sample_runner.ContextRun] = []
    init = sample_runner.ContextRun.__init__

    def noted(self: sample_runner.ContextRun, *given: object, **named: object) -> None:
        made.append(self)
        init(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(sample_runner.ContextRun, "__init__", noted)
    asked = [sample("one", words(200, 3), "aaaa?", group="g"), sample("two", words(200, 3), "zzzz?", group="g")]
    data = write_jsonl(tmp_path / "two.jsonl", asked)
    found = run(tmp_path, data, "method=snapkv", "method.window=8", "budget_bytes=40000")
    assert [record["info"]["context_budget"] < 200 for record in found] == [True, True]
    assert [len(context._blind) for context in made] == [0]


def test_a_matched_method_that_does_not_fit_the_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KIVI's groups of 32 channels in heads of 16: the key to change is match, not the method's own codec."""
    assert experiment.run_cells(configs(tmp_path, ["method=snapkv", "method.window=8", "match=kivi2"])) == 2
    assert "match=kivi2: does not fit this model (method.codec.group=32" in capsys.readouterr().out
