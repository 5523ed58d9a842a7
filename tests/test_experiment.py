"""Cells from the command line to their records, on a tiny random model with a byte-level tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvbench import experiment
from kvbench.compose import cells, read
from kvbench.engine import Engine, Needs
from kvbench.engine.engine import NOTHING
from kvbench.errors import InputError
from tests.cells import EVICTING, METHODS, PROTOCOLS

TINY = ["model=tiny", "task=jsonl", "task.max_new_tokens=6"]
REPOSITORY = Path(__file__).resolve().parent.parent


def words(count: int, seed: int) -> str:
    """ASCII text of exactly ``count`` characters, one token each."""
    letters = "abcdefghijklmnop qrstuv wxyz"
    return "".join(letters[(seed * 7 + i * i + 3 * i) % len(letters)] for i in range(count))


def write_jsonl(path: Path, samples: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path


def sample(name: str, context: str, question: str, **more: object) -> dict:
    return {"id": name, "context": context, "question": question, "answers": ["x"], **more}


def run(tmp_path: Path, data: Path, *overrides: str, expect: int = 0) -> list[dict]:
    """Runs the cells of one command line and returns all their records, cell by cell."""
    arguments = [*overrides, *TINY, f"task.path={data}", f"runs={tmp_path / 'runs'}"]
    code = experiment.run_cells(list(cells(read(arguments)).values()))
    assert code == expect
    return records(tmp_path / "runs")


def small(method: str) -> list[str]:
    """What a method needs to fit budgets of 64 and heads of 16 dimensions."""
    if method.startswith("kivi"):
        return ["method.codec.group=16"]
    if method == "hcattention":
        fit = [f"method.codec.fit.{setting}" for setting in ("texts=1", "tokens=256", "iterations=2")]
        return ["method.codec.groups=4", "method.codec.centroids=16", *fit]
    calibration = ["method.allocator.tokens=1024", "method.allocator.texts=1"]
    return ["method.sinks=4", "method.recent=20", *calibration] if method == "duoattention" else []


def records(root: Path) -> list[dict]:
    files = sorted(root.rglob("records.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def summary(root: Path) -> dict:
    (path,) = root.rglob("summary.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("method", EVICTING)
def test_only_the_sample_itself_decides_what_is_kept(method: str, tmp_path: Path) -> None:
    """300, 120 and again the first 300 tokens, budget 64, aware: 64 entries each time, third equal to first."""
    long, short = words(300, 1), words(120, 2)
    data = write_jsonl(
        tmp_path / "three.jsonl", [sample(n, t, "what is it?") for n, t in (("a", long), ("b", short), ("c", long))]
    )
    window = ["method.window=8"] if method == "snapkv" else small(method)
    options = [f"method={method}", "budget=64", "protocol=aware", *window]
    found = run(tmp_path, data, *options)
    assert [record["kept_entries"] for record in found] == [64.0, 64.0, 64.0]
    assert not any(record["uncompressed"] for record in found)
    alone = write_jsonl(tmp_path / "alone.jsonl", [sample("c", long, "what is it?")])
    (lonely,) = run(tmp_path / "alone", alone, *options)
    for other in (found[0], lonely):
        assert (other["prediction"], other["fingerprint"]) == (found[2]["prediction"], found[2]["fingerprint"])
    assert found[1]["fingerprint"] != found[2]["fingerprint"]


@pytest.mark.parametrize("method", METHODS)
def test_tiny_contexts_and_extreme_fractions(method: str, tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "tiny.jsonl", [sample(f"n{n}", words(n, n + 1), f"why {n}?") for n in (0, 1, 2, 5, 33)]
    )
    for fraction in (0.5, 0.1, 0.01):
        for protocol in PROTOCOLS:
            folder = tmp_path / f"{fraction}-{protocol}"
            options = [f"method={method}", f"budget={fraction}", f"protocol={protocol}", *small(method)]
            found = run(folder, data, "model.chat=false", "task.separator=", *options)
            assert [record["status"] for record in found] == ["ok"] * 5
            for record, n in zip(found[1:], (1, 2, 5, 33), strict=True):
                assert record["context_tokens"] == n + 1  # BOS
                assert 1 <= record["kept_entries"] <= n + 1
                if method == "snapkv":  # its window of 32 covers even 33 tokens but for one
                    assert record["uncompressed"] == (n < 33)
                    assert bool(record["note"])


def test_two_questions_about_one_context_share_a_blind_cache(tmp_path: Path) -> None:
    context = words(200, 3)
    first, second = sample("one", context, "aaaa bbbbb?", group="g"), sample("two", context, "zzzz yyyyy?", group="g")
    answers = {}
    for name, order in (("forward", [first, second]), ("backward", [second, first])):
        data = write_jsonl(tmp_path / f"{name}.jsonl", order)
        found = run(tmp_path / name, data, "method=snapkv", "method.window=8", "budget=32")
        assert len({record["fingerprint"] for record in found}) == 1
        answers[name] = {record["sample_id"]: record["prediction"] for record in found}
    assert answers["forward"] == answers["backward"]
    aware = run(tmp_path / "aware", data, "method=snapkv", "method.window=8", "budget=32", "protocol=aware")
    assert len({record["fingerprint"] for record in aware}) == 2
    # The first of the answers is that of a run without the other question
    alone = run(tmp_path / "alone", write_jsonl(tmp_path / "alone.jsonl", [second]), "method.window=8", "budget=32")
    assert alone[0]["prediction"] == answers["forward"]["two"]


def test_questions_of_unequal_length_see_the_same_truncated_context(tmp_path: Path) -> None:
    """Truncation must not let a blind context depend on how long its question is."""
    context = words(900, 4)
    asked = [sample("short", context, "why?", group="g"), sample("long", context, words(80, 1), group="g")]
    data = write_jsonl(tmp_path / "two.jsonl", asked)
    found = run(tmp_path, data, "method.window=8", "budget=32", "max_prompt_tokens=400")
    assert found[0]["context_tokens"] == found[1]["context_tokens"]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[1]["prompt_tokens"] == 400
    assert found[1]["truncated_tokens"] > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bytes_are_measured_at_the_first_decode_step(protocol: str, tmp_path: Path) -> None:
    """tiny: 2 layers, 2 KV heads, head_dim 16, fp32: 2 * 2 * 2 * 16 * 4 = 512 bytes an entry."""
    data = write_jsonl(
        tmp_path / "one.jsonl", [sample("a", words(200, 1), words(20, 2)), sample("b", words(200, 3), "b?")]
    )
    found = run(
        tmp_path, data, "model.chat=false", "task.separator=", "method.window=8", "budget=50", f"protocol={protocol}"
    )
    (record, _) = found
    entry = 512
    prompt = record["prompt_tokens"]
    assert record["question_tokens"] == 20
    assert record["kv_bytes_full"] == prompt * entry
    assert record["entries_at_first_decode"] == 50 + 20
    assert record["kv_bytes_device"] == 70 * entry
    assert record["kv_bytes_host"] == 0
    assert record["peak_bytes"] is None and record["peak_bytes_note"]
    assert summary(tmp_path / "runs")["kv"]["share"] == pytest.approx(
        (70 / prompt + (50 + found[1]["question_tokens"]) / found[1]["prompt_tokens"]) / 2
    )


def test_prompt_scope_gives_both_protocols_the_same_size(tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "one.jsonl", [sample("a", words(200, 1), words(20, 2)), sample("b", words(90, 1), "c?")]
    )
    found = run(
        tmp_path, data, "-m", "protocol=blind,aware,swapped", "budget_scope=prompt", "budget=100", "method.window=8"
    )
    assert [record["entries_at_first_decode"] for record in found] == [100.0] * 6
    evictable = run(
        tmp_path / "e", data, "protocol=aware", "budget_scope=prompt", "question_evictable=true", "budget=100"
    )
    assert [record["entries_at_first_decode"] for record in evictable] == [100.0] * 2


def test_a_budget_that_the_question_fills_costs_one_record(tmp_path: Path) -> None:
    samples = [sample("fits", words(200, 1), "a?"), sample("not", words(200, 2), words(90, 3))]
    data = write_jsonl(tmp_path / "two.jsonl", samples)
    found = run(tmp_path, data, "model.chat=false", "budget_scope=prompt", "method.window=8", "budget=64", expect=1)
    assert [record["status"] for record in found] == ["ok", "failed"]
    assert "budget=64 leaves nothing for the context" in found[1]["error"]
    assert found[1]["score"] is None
    counts = summary(tmp_path / "runs")["counts"]
    assert (counts["ok"], counts["failed"]) == (1, 1)


def test_a_bad_line_costs_one_record(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    good = json.dumps(sample("good", words(80, 1), "a?"))
    data.write_text(f"{good}\nnot json\n{json.dumps({'id': 'no context'})}\n", encoding="utf-8")
    found = run(tmp_path, data, "method=full", expect=1)
    assert sorted(record["status"] for record in found) == ["failed", "failed", "ok"]


def test_a_cache_left_uncompressed_makes_the_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere only the first sample of a data set was compressed, and nobody noticed."""
    from kvbench.methods import method as module

    calls: list[int] = []
    select = module.select_per_head

    def sometimes(scores: torch.Tensor, counts: torch.Tensor, protect: object) -> list[torch.Tensor]:
        calls.append(1)
        kept = select(scores, counts, protect)  # type: ignore[arg-type]
        return kept if len(calls) <= 2 else [torch.arange(scores.shape[1])] * len(kept)  # 2 layers of the first sample

    monkeypatch.setattr(module, "select_per_head", sometimes)
    data = write_jsonl(tmp_path / "two.jsonl", [sample("a", words(100, 1), "a?"), sample("b", words(100, 2), "b?")])
    found = run(tmp_path, data, "method=knorm", "budget=32", expect=1)
    assert [record["status"] for record in found] == ["ok", "failed"]
    assert "entries per KV head where 32 were promised" in found[1]["error"]


def test_logits_that_are_not_finite_are_never_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Engine.decode

    def broken(self: Engine, caches: list, logits: torch.Tensor, stop: object) -> list:
        return decode(self, caches, logits * float("nan"), stop)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "decode", broken)
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(100, 1), "a?")])
    (record,) = run(tmp_path, data, "method=full", expect=1)
    assert (record["status"], record["score"]) == ("nonfinite", None)
    found = summary(tmp_path / "runs")
    assert (found["score"], found["counts"]["nonfinite"], found["n"]) == (None, 1, 0)


def test_a_metric_that_raises_is_an_error_not_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.tasks import scoring

    def broken(*_: object) -> float:
        raise RuntimeError("metric broke")

    monkeypatch.setattr(scoring, "score", broken)
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(100, 1), "a?")])
    (record,) = run(tmp_path, data, "method=full", expect=1)
    assert (record["status"], record["score"]) == ("failed", None)
    assert "metric broke" in record["error"]


def test_the_same_command_again_computes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_jsonl(tmp_path / "three.jsonl", [sample(n, words(60, i), f"{n}?") for i, n in enumerate("abc")])
    first = run(tmp_path, data, "method=knorm", "budget=16", "limit=2")
    calls: list[int] = []
    prefill = Engine.prefill

    def counted(self: Engine, ids: Sequence[int], needs: Needs = NOTHING) -> object:
        calls.append(len(ids))
        return prefill(self, ids, needs)

    monkeypatch.setattr(Engine, "prefill", counted)
    assert run(tmp_path, data, "method=knorm", "budget=16", "limit=2") == first
    assert calls == []
    more = run(tmp_path, data, "method=knorm", "budget=16")  # a larger limit goes on where the smaller one stopped
    assert more[:2] == first and len(more) == 3
    assert len([n for n in calls if n > 30]) == 1
    again = run(tmp_path, data, "method=knorm", "budget=16", "max_new_tokens=5")
    assert len(again) == 6, "another answer length is another cell: nothing is reused"


def test_a_sweep_shares_nothing_but_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    engine = experiment.Models.engine

    def counted(self: experiment.Models, cell: object) -> Engine:
        before = self._engine
        result = engine(self, cell)  # type: ignore[arg-type]
        if result is not before:
            loads.append("load")
        return result

    monkeypatch.setattr(experiment.Models, "engine", counted)
    data = write_jsonl(tmp_path / "two.jsonl", [sample(n, words(90, i), f"{n}?") for i, n in enumerate("ab")])
    found = run(tmp_path, data, "-m", "method=full,knorm,random", "protocol=blind,aware", "budget=16,24")
    assert loads == ["load"]
    assert len(found) == 2 * (2 + 4 + 4), "full is one cell a protocol, whatever the budget"
    alone = run(tmp_path / "alone", data, "method=random", "protocol=aware", "budget=24")
    assert [r["prediction"] for r in alone] == [
        r["prediction"]
        for r in found
        if r["kept_entries"] == 24.0 and r["fingerprint"] in {a["fingerprint"] for a in alone}
    ]


def test_swapped_needs_another_question(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "same.jsonl", [sample(n, words(60, i), "same?") for i, n in enumerate("ab")])
    with pytest.raises(InputError, match="all samples ask the same question"):
        run(tmp_path, data, "protocol=swapped")
    with pytest.raises(InputError, match="has no question to swap"):
        run(tmp_path, data, "protocol=swapped", "task.has_question=false")


def test_full_takes_no_budget_whatever_the_scope(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(100, 1), "what is this about?")])
    (record,) = run(tmp_path, data, "method=full", "budget=5", "budget_scope=prompt")
    assert record["status"] == "ok"
    assert record["entries_at_first_decode"] == record["prompt_tokens"]


@pytest.mark.parametrize("method", METHODS)
def test_a_blind_cache_does_not_depend_on_the_other_lines_of_the_file(method: str, tmp_path: Path) -> None:
    context = words(150, 5)
    samples = [sample("one", context, "aaaa bbbbb?"), sample("two", context, "zzzz?")]
    options = [f"method={method}", "budget=64", *small(method)]
    alone = [
        run(tmp_path / name, write_jsonl(tmp_path / f"{name}.jsonl", [one]), *options)[0]
        for name, one in zip(("first", "second"), samples, strict=True)
    ]
    together = run(tmp_path / "both", write_jsonl(tmp_path / "both.jsonl", samples), *options)
    assert len({record["fingerprint"] for record in [*alone, *together]}) == 1
    assert [r["prediction"] for r in alone] == [r["prediction"] for r in together]


def test_one_long_question_costs_only_itself(tmp_path: Path) -> None:
    context = words(900, 2)
    questions = {"a": "why?", "b": "and how?", "long": words(5000, 3)}
    data = write_jsonl(tmp_path / "three.jsonl", [sample(n, context, q) for n, q in questions.items()])
    found = {record["sample_id"]: record for record in run(tmp_path, data, "budget=64", expect=1)}
    assert {name: record["status"] for name, record in found.items()} == {"a": "ok", "b": "ok", "long": "failed"}
    assert "does not fit" in found["long"]["error"]
    assert found["a"]["fingerprint"] == found["b"]["fingerprint"]


def test_answers_of_unequal_length_do_not_change_the_context(tmp_path: Path) -> None:
    context = words(5000, 2)
    samples = [sample("a", context, "why?", max_new_tokens=4), sample("b", context, "how?", max_new_tokens=200)]
    found = run(tmp_path, write_jsonl(tmp_path / "two.jsonl", samples), "budget=64", "task.max_new_tokens=8")
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["context_tokens"] == found[1]["context_tokens"]
    too_many = write_jsonl(tmp_path / "many.jsonl", [samples[0], {**samples[1], "max_new_tokens": 5000}])
    found = run(tmp_path / "many", too_many, "budget=64", expect=1)
    assert sorted(record["status"] for record in found) == ["failed", "ok"]


def test_made_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for length in ("task.length=5000", "task.length=4085", "task.length=600 max_prompt_tokens=500"):
        arguments = ["model=tiny", "task=passkey", "task.samples=1", f"runs={tmp_path}", *length.split()]
        with pytest.raises(InputError, match=r"task\.length"):
            experiment.run_cells(list(cells(read(arguments)).values()))


@pytest.mark.parametrize(
    ("returns", "says"), [("s[:, :-1]", "gives scores of shape"), ("s * float('nan')", "gives NaN")]
)
def test_a_scorer_that_is_wrong_chooses_nothing(
    returns: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.methods.scorers import KeyNorm

    right = KeyNorm.__call__
    wrong = eval(f"lambda s: {returns}")  # the parameter says what is done to the right scores
    monkeypatch.setattr(KeyNorm, "__call__", lambda self, layer: wrong(right(self, layer)))
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(100, 1), "a?")])
    (record,) = run(tmp_path, data, "method=knorm", "budget=32", expect=1)
    assert record["status"] == "failed" and says in record["error"]


def test_prompts_are_dumped_as_the_model_saw_them(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(60, 1), "what?")])
    run(tmp_path, data, "dump_prompts=true", "method=full")
    (path,) = (tmp_path / "runs").rglob("prompts.jsonl")
    prompt = json.loads(path.read_text())
    assert words(60, 1) in prompt["text"] and prompt["text"].index("what?") > prompt["text"].index(words(60, 1))


def test_a_prompt_longer_than_the_window_is_refused_before_loading(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(60, 1), "what?")])
    with pytest.raises(InputError, match="max_prompt_tokens=5000"):
        run(tmp_path, data, "max_prompt_tokens=5000")
    with pytest.raises(InputError, match="official_max_length"):
        run(tmp_path, data, "truncation=official")
    with pytest.raises(InputError, match="max_new_tokens=4096"):
        run(tmp_path, data, "max_new_tokens=4096")


def command(tmp_path: Path, data: Path, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "kvbench.run", *overrides, *TINY, f"task.path={data}", f"runs={tmp_path / 'runs'}"
    ]  # fmt: skip


def test_kill_and_resume(tmp_path: Path) -> None:
    """kill -9 after at least nine records, half of the last line cut off: the same command computes the rest."""
    samples = [sample(f"s{i:02d}", words(700, i), f"question {i}?") for i in range(20)]
    data = write_jsonl(tmp_path / "twenty.jsonl", samples)
    options = ["method=snapkv", "method.window=8", "budget=32", "max_new_tokens=48"]
    expected = run(tmp_path / "whole", data, *options)
    process = subprocess.Popen(command(tmp_path, data, *options), cwd=REPOSITORY, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    path = None
    while time.monotonic() < deadline:
        path = next((tmp_path / "runs").rglob("records.jsonl"), None) if (tmp_path / "runs").exists() else None
        if path is not None and path.read_bytes().count(b"\n") >= 9:
            break
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert path is not None
    lines = path.read_bytes().splitlines(keepends=True)
    kept = len(lines) - 1
    assert kept >= 8
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    # another process, whose lock died with it: the same command takes over
    done = subprocess.run(command(tmp_path, data, *options), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{20 - kept} of 20 samples to run" in done.stderr
    found = records(tmp_path / "runs")
    assert [record["sample_id"] for record in found] == [s["id"] for s in samples]
    essential = ("sample_id", "prediction", "score", "fingerprint", "kept_entries")
    assert [[r[key] for key in essential] for r in found] == [[r[key] for key in essential] for r in expected]


def test_a_failing_cell_does_not_hide_and_configs_are_frozen(tmp_path: Path) -> None:
    """Four cells, of which two raise; a default is edited while the first one runs."""
    (tmp_path / "faulty.py").write_text(
        "import os, pathlib\n"
        "from kvbench.methods.scorers import KeyNorm\n"
        "class Faulty(KeyNorm):\n"
        "    def __init__(self, fails, conf):\n"
        "        object.__setattr__(self, 'fails', fails)\n"
        "        object.__setattr__(self, 'conf', conf)\n"
        "    def __call__(self, layer):\n"
        "        path = pathlib.Path(self.conf)\n"
        "        path.write_text(path.read_text().replace('recent: 3', 'recent: 5'))\n"
        "        if self.fails:\n"
        "            raise RuntimeError('this scorer is broken')\n"
        "        return super().__call__(layer)\n"
    )
    conf = tmp_path / "conf" / "method" / "faulty.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text(
        "name: faulty\nfails: false\n"
        f'scorer: {{_target_: faulty.Faulty, fails: "${{method.fails}}", conf: {json.dumps(str(conf))}}}\n'
        "allocator: {_target_: kvbench.methods.allocators.Uniform}\n"
        "protect: {sinks: 0, recent: 3}\ncodec: {_target_: kvbench.methods.codecs.Plain}\npositions: original\n"
    )
    data = write_jsonl(tmp_path / "one.jsonl", [sample("a", words(90, 1), "a?")])
    sweep = ["--config-dir", str(tmp_path / "conf"), "-m", "method=faulty", "budget=16,24", "method.fails=false,true"]
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def launch(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command(tmp_path, data, *sweep, *more), cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    done = launch("experiment=whole")
    assert done.returncode == 1, done.stderr
    states = {p.parent: json.loads(p.read_text())["status"] for p in (tmp_path / "runs/whole").rglob("summary.json")}
    assert sorted(states.values()) == ["done", "done", "failed", "failed"]
    failed = [folder for folder, state in states.items() if state == "failed"]
    for folder in failed:
        assert "this scorer is broken" in (folder / "run.log").read_text()
        assert "Traceback" in (folder / "run.log").read_text()
        assert folder.name in "\n".join(done.stdout.splitlines()[-6:]), "the last lines name what failed"
    assert all("recent: 3" in (folder / "config.yaml").read_text() for folder in states), "frozen at submission"
    assert "recent: 5" in conf.read_text()
    conf.write_text(conf.read_text().replace("recent: 5", "recent: 3"))
    stopped = launch("experiment=fast", "fail_fast=true")
    assert stopped.returncode == 1
    assert len(list((tmp_path / "runs/fast").rglob("summary.json"))) == 2, "the cells after the failure never start"
