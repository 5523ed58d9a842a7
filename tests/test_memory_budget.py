"""``budget_bytes`` and ``match``: the largest budget within so many bytes, measured on real caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.budget import Budget
from kvbench.compose import cells, read
from kvbench.engine import Engine
from kvbench.engine.rotation import discover
from kvbench.errors import InputError, SampleError
from kvbench.memory_budget import largest
from kvbench.protocols import ContextRun, Plan, Start, Switches, plan, start
from kvbench.run import main
from tests.cells import PROTOCOLS, fitted, method, text
from tests.models.tiny_configs import build

CONTEXT, QUESTION, OTHER = text(150, 5), text(7, 6), text(11, 7)
CASES = [
    ("snapkv", ()), ("pyramidkv", ()), ("adakv", ()), ("h2o", ()), ("streamingllm", ()), ("kvzip", ()),
    ("snapkv", ("method/codec=kivi2", "method.codec.group=16")),
]  # fmt: skip


def begin_with(name: str, overrides: tuple[str, ...], protocol: str, tries: list[int]) -> tuple:
    engine = Engine(build("llama"))
    made = fitted(method(name, *overrides), engine)
    switches = Switches(protocol)
    everything = plan(switches, len(CONTEXT), QUESTION, OTHER, Budget("full"))
    run = ContextRun(engine, tuple(CONTEXT), made.needs, cells=2)
    rotation = discover(engine) if name == "streamingllm" else None

    def begin(planned: Plan) -> Start:
        tries.append(planned.budget)
        return start(run, made, planned, QUESTION, 16, rotation)

    return begin, everything


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_the_largest_budget_that_fits(name: str, overrides: tuple[str, ...], protocol: str) -> None:
    tries: list[int] = []
    begin, everything = begin_with(name, overrides, protocol, tries)
    by_budget = {b: begin(replace(everything, budget=b)).cache.nbytes("device") for b in range(1, 151)}
    for allowed in (by_budget[20], by_budget[20] + 1, by_budget[77] - 1, by_budget[149]):
        tries.clear()
        planned, started = largest(begin, everything, allowed)
        held = started.cache.nbytes("device")
        assert held == by_budget[planned.budget] <= allowed
        assert planned.budget == 150 or by_budget[planned.budget + 1] > allowed
        assert len(tries) < 20, "a search, not a scan"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_quantised_entries_take_fewer_bytes_where_a_block_is_full(protocol: str) -> None:
    """KIVI's bytes fall at every 128th entry: the largest budget may lie beyond several that do not fit."""
    engine, context = Engine(build("llama")), text(420, 5)
    made = method("snapkv", "method/codec=kivi2", "method.codec.group=16")
    everything = plan(Switches(protocol), len(context), QUESTION, OTHER, Budget("full"))
    run = ContextRun(engine, tuple(context), made.needs, cells=2)

    def begin(planned: Plan) -> Start:
        return start(run, made, planned, QUESTION, 16)

    held = {b: begin(replace(everything, budget=b)).cache.nbytes("device") for b in range(1, 421)}
    assert any(held[b + 1] < held[b] for b in range(1, 420)), "else there is nothing to test"
    for allowed in (held[60], held[119], held[121] - 1, held[200], held[376], held[377]):
        planned, started = largest(begin, everything, allowed, made.codec.block)  # type: ignore[attr-defined]
        assert planned.budget == max(b for b in held if held[b] <= allowed)
        assert started.cache.nbytes("device") == held[planned.budget]


def test_where_everything_fits_nothing_is_evicted() -> None:
    begin, everything = begin_with("snapkv", (), "blind", [])
    planned, started = largest(begin, everything, 10**9)
    assert planned.budget == len(CONTEXT)
    assert started.compressed.kept_mean == len(CONTEXT)


def test_where_nothing_fits_the_sample_fails() -> None:
    begin, everything = begin_with("snapkv", (), "blind", [])
    with pytest.raises(SampleError, match="100 are allowed"):
        largest(begin, everything, 100)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["budget_bytes=0"], "budget_bytes"),
        (["budget_bytes=1000", "budget=64"], "budget_bytes"),
        (["match=kivi2", "budget=64"], "match"),
        (["match=kivi2", "budget_bytes=1000"], "match"),
        (["match=kivi3"], "match"),
        (["match=tova"], "match"),
        (["match=full"], "match"),
        (["match=kivi2", "method=streamingllm", "method.prefill=streaming"], "match"),
    ],
)
def test_wrong_ways_to_give_bytes(overrides: list[str], key: str) -> None:
    with pytest.raises(InputError) as caught:
        cells(read(overrides))
    assert caught.value.key == key
    assert caught.value.fix


def test_bytes_from_a_file_and_a_match_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "paper" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nbudget_bytes: 4000\n")
    given = ["--config-dir", str(tmp_path), "+paper=mine", "match=kivi2"]
    with pytest.raises(InputError, match="budget_bytes=4000") as caught:
        cells(read(given))
    assert caught.value.key == "match"
    (run,) = cells(read([*given, "budget_bytes=null"])).values()
    assert run.match["name"] == "kivi2"


@pytest.mark.parametrize("more", [["hydra.verbose=false"], ["-m", "match=kivi2,kivi4", "hydra/launcher=basic"]])
def test_hydras_own_overrides_do_not_thaw_the_match(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a sweep writes its own config
    ran: list[str] = []
    monkeypatch.setattr("kvbench.experiment.run_cells", lambda runs: ran.extend(run.match["name"] for run in runs) or 0)
    assert main([*more, *([] if "-m" in more else ["match=kivi2"])]) == 0
    assert ran == (["kivi2", "kivi4"] if "-m" in more else ["kivi2"])


def test_the_matched_method_is_frozen_into_the_run() -> None:
    (run,) = cells(read(["method=snapkv", "match=kivi4"])).values()
    assert run.match["name"] == "kivi4"
    assert run.match["codec"]["_target_"].startswith("kvbench.")
