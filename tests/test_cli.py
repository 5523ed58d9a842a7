"""The run command: wrong input is told in one paragraph before anything loads; sweeps are composed as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.compose import cells, read
from kvbench.config import RunConfig, conf_dir
from kvbench.errors import InputError
from kvbench.run import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """The lists of cells that the experiment was asked to run; set ``calls.answer`` to what it should do."""

    class Calls(list):
        answer = staticmethod(lambda runs: 0)

    made = Calls()

    def run_cells(runs: list[RunConfig]) -> int:
        made.append(runs)
        return made.answer(runs)

    module = types.ModuleType("kvbench.experiment")
    module.run_cells = run_cells  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvbench.experiment", module)
    return made


# (arguments, the key and the value that the message must name, more that it must say)
WRONG = [
    (["budget=0"], "budget=0", "full"),
    (["budget=-3"], "budget=-3", "whole number"),
    (["budget=1.5"], "budget=1.5", "above 1"),
    (["budget=1.0"], "budget=1.0", "budget=full"),
    (["budget=64.0"], "budget=64.0", "64?"),
    (["budget=-0.5"], "budget=-0.5", "between 0 and 1"),
    (["budget=nan"], "budget=nan", "finite"),
    (["budget=inf"], "budget=inf", "finite"),
    (["budget=true"], "budget=true", "not a number"),
    (["budget=lots"], "budget=lots", "full"),
    (["budget=null"], "budget=null", "full"),
    (["budget=[1,2]"], "budget=[1, 2]", "full"),
    (["budget="], "budget", "full"),
    (["budget=32"], "budget=32", "method.window"),
    (["method=streamingllm", "budget=4"], "budget=4", "method.sinks"),
    (["method=tova", "budget=1"], "budget=1", "method.protect"),
    (["bugdet=1"], "bugdet=1", "Did you mean budget?"),
    (["+bugdet=1"], "bugdet=1", "Did you mean budget?"),
    (["++bugdet=1"], "bugdet=1", "Did you mean budget?"),
    (["method=snapvk"], "method=snapvk", "Did you mean snapkv?"),
    (["method=SnapKV"], "method=SnapKV", "Did you mean snapkv?"),
    (["method=null"], "method=null", "streamingllm"),
    (["method=3"], "method=3", "snapkv"),
    (["~method"], "method=null", "method=..."),
    (["protocol=blnd"], "protocol=blnd", "Did you mean blind?"),
    (["protocol=[blind,aware]"], "protocol=[blind,aware]", "-m protocol=blind,aware"),
    (["protocol.name=other"], "protocol=other", "swapped"),
    (["protocol.foo=1"], "protocol.foo=1", "no such key"),
    (["+protocol.foo=1"], "protocol.foo=1", "no such key"),
    (["task=pasky"], "task=pasky", "Did you mean passkey?"),
    (["model=prob"], "model=prob", "Did you mean probe?"),
    (["tracker=wndb"], "tracker=wndb", "Did you mean wandb?"),
    (["tracker=wandb", "tracker.mode=of"], "tracker.mode=of", "offline"),
    (["hydra/launcher=kvbnch"], "hydra/launcher=kvbnch", "Did you mean kvbench?"),
    (["method.windw=3"], "method.windw=3", "method.window"),
    (["method.window=-1"], "method.window=-1", "1 or more"),
    (["method.window=1.5"], "method.window=1.5", "whole number"),
    (["method.kernel=4"], "method.kernel=4", "odd"),
    (["method.kernel=0"], "method.kernel=0", "1 or more"),
    (["method.pooling=min"], "method.pooling=min", "avg"),
    (["method.group=median"], "method.group=median", "mean"),
    (["method.protect.sinks=-1"], "method.protect.sinks=-1", "0 or more"),
    (["method.protect.recent=x"], "method.protect.recent=x", "whole number"),
    (["method=streamingllm", "method.sinks=-4"], "method.sinks=-4", "0 or more"),
    (["method=tova", "method.heads=some"], "method.heads=some", "all"),
    (["method.scorer._target_=nowhere.at.all"], "method.scorer._target_=nowhere.at.all", "package"),
    (["method.scorer._target_=SnapKV"], "method.scorer._target_=SnapKV", "dotted"),
    (["method.scorer=null"], "method.scorer=null", "allocator"),
    (["method.codec=null"], "method.codec=null", "Plain"),
    (["method.name=a/b"], "method.name=a/b", "safe"),
    (["budget_scope=question"], "budget_scope=question", "prompt"),
    (["question_evictable=maybe"], "question_evictable=maybe", "true or false"),
    (["question_evictable=true"], "question_evictable=true", "budget_scope=prompt"),
    (["first_token=ful"], "first_token=ful", "Did you mean full?"),
    (["truncation=none"], "truncation=none", "document"),
    (["positions=compct"], "positions=compct", "Did you mean compact?"),
    (["positions=${foo}"], "positions=${foo}", "foo"),
    (["limit=0"], "limit=0", "1 or more"),
    (["limit=-1"], "limit=-1", "1 or more"),
    (["limit=2.5"], "limit=2.5", "whole number"),
    (["limit=[1]"], "limit=[1]", "whole number"),
    (["seed=-1"], "seed=-1", "0 or more"),
    (["seed=abc"], "seed=abc", "whole number"),
    (["seed=null"], "seed=null", "null"),
    (["seed=99999999999"], "seed=99999999999", "4294967295"),
    (["device=gpu"], "device=gpu", "Did you mean cuda?"),
    (["device=cuda:x"], "device=cuda:x", "cuda:0"),
    (["device=cuda:-1"], "device=cuda:-1", "cuda:0"),
    (["dtype=fp16"], "dtype=fp16", "Did you mean float16?"),
    (["dtype=int8"], "dtype=int8", "bfloat16"),
    (["max_new_tokens=0"], "max_new_tokens=0", "1 or more"),
    (["max_prompt_tokens=0"], "max_prompt_tokens=0", "1 or more"),
    (["model.window=0"], "model.window=0", "1 or more"),
    (["model=folder"], "model.path", "folder"),
    (["model=folder", "model.path=/no/such/folder"], "model.path=/no/such/folder", "not a folder"),
    (["model=gguf", "model.path=/no/such.gguf"], "model.path=/no/such.gguf", "not a file"),
    (["model.sorce=hub"], "model.sorce=hub", "Did you mean model.source?"),
    (["experiment=../up"], "experiment=../up", "folder name"),
    (["experiment=a/b"], "experiment=a/b", "folder name"),
    (["experiment=.hidden"], "experiment=.hidden", "folder name"),
    (["experiment="], "experiment", "folder name"),
    (["runs="], "runs", "empty"),
    (["runs=null"], "runs=null", "null"),
    (["dump_prompts=perhaps"], "dump_prompts=perhaps", "true or false"),
    (["task.name=null"], "task.name=null", "name"),
    (["task.path=/no/such/data"], "task.path=/no/such/data", "does not exist"),
    (["task.length=0"], "task.length=0", "1 or more"),
    (["task.depth=1.5"], "task.depth=1.5", "from 0"),
    (["task.filler=gras"], "task.filler=gras", "Did you mean grass?"),
    (["task.chat=maybe"], "task.chat=maybe", "true, false"),
    (["task=niah", "task.length=[1024,x]"], "task.length=x", "whole number"),
    (["task=niah", "task.depths=[0.5,2]"], "task.depths=2", "from 0"),
    (["task=jsonl"], "task.path=null", "no data of its own"),
    (["task=jsonl", "task.path=.", "task.metric=qa_f1"], "task.metric=qa_f1", "Did you mean qa_f1_score?"),
    (["task=qasper"], "task=qasper", "Did you mean longbench/qasper or longbench_e/qasper?"),
    (["task=longbench/qaspr"], "task=longbench/qaspr", "Did you mean longbench/qasper?"),
    (["budget=64,128"], "budget=64,128", "-m"),
    (["budget"], "budget", "key=value"),
    (["budget={a"], "budget={a", "cannot be read"),
    (["--budget", "3"], "--budget", "without dashes"),
    (["--multirn", "budget=1"], "--multirn", "Did you mean --multirun?"),
    (["--resolve"], "--resolve", "--cfg job"),
    (["--config-dir", "nowhere"], "--config-dir=nowhere", "folder"),
    (["--config-path", "x"], "--config-path=x", "--config-dir"),
    (["-m", "--cfg", "job"], "--cfg", "Leave one out"),
    (["-m", "method=snapkv,snapvk"], "method=snapvk", "Did you mean snapkv?"),
    (["-m", "budget=64,0"], "budget=0", "full"),
    (["-m", "budget=interval(1,3)"], "budget=interval(1,3)", "sweep"),
    (["-m", "hydra/launcher=basic", "budget=64,0"], "budget=0", "full"),
]


@pytest.mark.parametrize(("arguments", "named", "says"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_wrong_input_is_told_in_one_paragraph(arguments, named, says, calls, capsys, tmp_path):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err
    assert says in err
    assert "Traceback" not in err
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_results_should_go(calls, capsys, tmp_path):
    Path("taken").write_text("")
    assert main(["runs=taken"]) == 2
    assert "taken" in capsys.readouterr().err


# --- fuzzing -----------------------------------------------------------------------------------------------------

KEYS = [
    *("budget", "method", "protocol", "task", "model", "tracker", "seed", "limit", "device", "dtype", "positions"),
    *("runs", "experiment", "method.window", "method.protect", "method.scorer", "task.path", "model.window"),
    *("hydra.run.dir", "hydra/launcher", "hydra.searchpath", "+x", "++method.y", "~budget", "~method", "fail_fast"),
]
VALUES = [
    *("1", "0", "-1", "0.5", "1e3", "nan", "true", "null", "full", "snapkv", "", "a,b", "[1,2]", "{a:1}", "'x'", "???"),
    *(
        "${seed}",
        "${nope}",
        "${oc.env:NOPE}",
        "choice(1,2)",
        "range(1,3)",
        "glob(*)",
        "interval(0,1)",
        "\\",
        "é",
        "[",
        "}",
    ),
]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map("=".join),
            st.tuples(st.sampled_from(KEYS), st.text(max_size=6)).map("=".join),
            st.text(max_size=10).filter(lambda text: not text.startswith("-")),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_no_command_line_ends_in_a_traceback(arguments, multirun):
    try:
        runs = cells(read([*(["-m"] if multirun else []), *arguments]))
    except InputError as error:
        assert error.key
        assert error.reason
    else:
        assert all(isinstance(run, RunConfig) for run in runs.values())


# --- what runs ---------------------------------------------------------------------------------------------------


def test_one_cell(calls, tmp_path):
    assert main(["method=snapkv", "protocol=blind", "budget=0.875"]) == 0
    ((run,),) = calls
    assert (run.method["name"], run.protocol.name, run.budget, run.positions) == ("snapkv", "blind", 0.875, "original")
    assert list(tmp_path.iterdir()) == []  # no outputs/, no .hydra/


def test_a_sweep_is_one_call_with_all_cells_in_order(calls, tmp_path):
    assert main(["-m", "method=snapkv,tova", "budget=64,0.25", "protocol=aware"]) == 0
    (runs,) = calls
    names = [(run.method["name"], run.budget, run.protocol.name) for run in runs]
    assert names == [("snapkv", 64, "aware"), ("snapkv", 0.25, "aware"), ("tova", 64, "aware"), ("tova", 0.25, "aware")]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_basic_launcher_and_sweeper_work_too(calls):
    assert main(["-m", "budget=64,128", "hydra/launcher=basic", "hydra/sweeper=basic"]) == 0
    assert [[run.budget for run in runs] for runs in calls] == [[64], [128]]


def test_a_sweep_asked_for_by_the_mode(calls):
    assert main(["hydra.mode=MULTIRUN", "budget=64,128"]) == 0
    assert [[run.budget for run in runs] for runs in calls] == [[64, 128]]


def test_a_sweep_composed_by_another_sweeper_is_frozen_before_it_runs(calls, monkeypatch):
    monkeypatch.setattr("kvbench.run.Submission.frozen", lambda self, overrides: None)
    assert main(["-m", "budget=64,128"]) == 0
    assert [[run.budget for run in runs] for runs in calls] == [[64, 128]]
    assert all(type(run) is RunConfig for run in calls[0])


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
@pytest.mark.parametrize("arguments", [[], ["-m", "budget=64,128"], ["-m", "budget=64,128", "hydra/launcher=basic"]])
def test_the_exit_code_is_that_of_the_cells(arguments, code, calls):
    calls.answer = lambda runs: code
    assert main(arguments) == code
    if code >= 130:
        assert len(calls) == 1  # a signal ends the sweep


def test_the_worst_code_of_a_sweep_counts(calls):
    calls.answer = lambda runs: int(runs[0].budget == 64)
    assert main(["-m", "budget=64,128", "hydra/launcher=basic"]) == 1
    assert len(calls) == 2


def test_signals_and_faults(calls, capsys):
    def interrupted(runs):
        raise KeyboardInterrupt

    def terminated(runs):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    def wrong(runs):
        raise InputError("model.path", "x", "is no model.", "Give one.")

    def broken(runs):
        raise ZeroDivisionError("a fault of ours")

    for answer, code in ((interrupted, 130), (terminated, 143), (wrong, 2), (broken, 1)):
        calls.answer = answer
        assert main([]) == code, answer
        assert main(["-m", "budget=64,128"]) == code, answer
    err = capsys.readouterr().err
    assert "kvbench: model.path=x: is no model. Give one." in err
    assert "a fault of ours" in err


def test_editing_a_default_while_a_sweep_runs_changes_nothing(calls, tmp_path):
    mine = own_method(tmp_path, window=5)

    def edit(runs):
        own_method(tmp_path, window=99)
        return 0

    calls.answer = edit
    assert main(["-m", "method=mine", "budget=64,128", "--config-dir", str(mine)]) == 0
    assert [run.method["window"] for run in calls[0]] == [5, 5]


# --- your own methods --------------------------------------------------------------------------------------------


def own_method(folder: Path, window: int = 5) -> Path:
    """A --config-dir with method=mine, whose scorer is in a package that is not kvbench's."""
    target = folder / "my configs, 'quoted'" / "method" / "mine.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        textwrap.dedent(f"""\
        name: mine
        window: {window}
        scorer: {{_target_: json.decoder.JSONDecoder}}
        allocator: {{_target_: kvbench.methods.allocators.Uniform}}
        protect: {{sinks: 0, recent: 0}}
        codec: {{_target_: kvbench.methods.codecs.Plain}}
        positions: original
        """)
    )
    return target.parents[1]


def test_own_configs(calls, tmp_path, capsys):
    mine = str(own_method(tmp_path))
    assert main(["method=mine", "--config-dir", mine]) == 0
    assert calls[0][0].method["scorer"] == {"_target_": "json.decoder.JSONDecoder"}
    assert main(["method=min", "--config-dir", mine]) == 2
    assert "Did you mean mine?" in capsys.readouterr().err
    assert main(["--help", "--config-dir", mine]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["-m", "method=mine,snapkv", f'hydra.searchpath=["file://{mine}"]']) == 0
    assert [run.method["name"] for run in calls[-1]] == ["mine", "snapkv"]


def test_a_broken_file_of_your_own_is_named(calls, tmp_path, capsys):
    mine = own_method(tmp_path)
    (mine / "method" / "mine.yaml").write_text("name: [")
    assert main(["method=mine", "--config-dir", str(mine)]) == 2
    err = capsys.readouterr().err
    assert "method=mine" in err
    assert "Traceback" not in err


# --- help, versions, speed ---------------------------------------------------------------------------------------


def test_help_shows_every_option(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("snapkv", "blind, swapped", "passkey", "exit codes", "examples", "budget (128)"):
        assert word in out
    for file in Path(conf_dir(), "method").glob("*.yaml"):
        assert file.stem in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvbench 0.")


def test_the_config_can_be_printed(calls, capsys):
    assert main(["--cfg", "job", "--resolve", "budget=64"]) == 0
    out = capsys.readouterr().out
    assert "budget: 64" in out
    assert "positions: original" in out
    assert calls == []


HEAVY = "import sys; from kvbench.run import main; code = main(sys.argv[1:]); " + (
    "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas', 'wandb'} & set(sys.modules); "
    "print('HEAVY', sorted(heavy)); sys.exit(code)"
)


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("method=snapvk", 2), ("budget=0", 2)])
def test_answers_come_fast_and_import_nothing_heavy(argument, code):
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", HEAVY, argument], capture_output=True, text=True, env=environment)
    assert done.returncode == code
    assert "HEAVY []" in done.stdout
    assert (
        time.perf_counter() - start < 10
    )  # 0.3 s on an idle machine; the promise is 2 s, the test machine may be busy
