"""The newcomer's exercise: a scorer and a YAML file, both outside the package, as the README shows them.

They are taken from the README word for word, so that what it promises is what is tested.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from kvbench import report, run, status
from tests.cells import PROTOCOLS

README = Path(__file__).resolve().parents[1] / "README.md"
BUDGET = 48
CELLS = ["model=tiny", "task=passkey", "task.length=400", "limit=2", "max_new_tokens=4", f"budget={BUDGET}"]


def block(language: str, word: str) -> str:
    """The README's code block in that language that contains the word."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S) if word in text]
    return found


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with mine.py, importable, and my_conf/method/valuenorm.yaml; the present one."""
    scorer, config = block("python", "class ValueNorm"), block("yaml", "mine.ValueNorm")
    assert len(scorer.splitlines()) < 25
    (tmp_path / "mine.py").write_text(scorer)
    (tmp_path / "my_conf" / "method").mkdir(parents=True)
    (tmp_path / "my_conf" / "method" / "valuenorm.yaml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*overrides: str) -> int:
    return run.main(["--config-dir", "my_conf", *overrides, *CELLS])


def summaries(root: Path) -> dict[tuple[str, str], dict]:
    """Method and protocol -> summary.json, with its folder."""
    found = {}
    for path in root.rglob("summary.json"):
        summary = json.loads(path.read_text())
        found[summary["cell"]["method"], summary["cell"]["protocol"]] = summary | {"folder": path.parent}
    return found


def fingerprints(summary: dict) -> list[str]:
    lines = (summary["folder"] / "records.jsonl").read_text().splitlines()
    return [json.loads(line)["fingerprint"] for line in lines]


def test_a_method_of_your_own_works_in_every_protocol_and_table(
    newcomer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the same protected entries in both, so that only their scores can make them keep other entries
    methods = ["method=valuenorm,knorm", "method.protect.recent=8"]
    assert start("-m", *methods, f"protocol={','.join(PROTOCOLS)}") == 0
    table = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    found = summaries(newcomer / "runs")
    assert len(found) == 2 * len(PROTOCOLS)
    for protocol in PROTOCOLS:
        assert ["valuenorm", str(BUDGET), protocol, "2"] in table, "the table at the end of the run"
        mine = found["valuenorm", protocol]
        assert (mine["status"], mine["n"], mine["counts"]["ok"]) == ("done", 2, 2)
        assert mine["counts"]["uncompressed"] == 0
        assert 0 < mine["kv"]["share"] < 0.5
        assert fingerprints(mine) != fingerprints(found["knorm", protocol]), "its own scores decided what is kept"
    # values alone decide: whatever is asked, the same entries of the context are kept
    assert fingerprints(found["valuenorm", "blind"]) == fingerprints(found["valuenorm", "swapped"])

    assert report.main(["runs=runs"]) == 0
    capsys.readouterr()
    with (newcomer / "runs" / "default" / "tables" / "passkey.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"valuenorm", "knorm"}
    assert [rows["valuenorm"][f"{protocol}_n"] for protocol in PROTOCOLS] == ["2"] * len(PROTOCOLS)
    markdown = (newcomer / "runs" / "default" / "tables" / "passkey.md").read_text()
    assert "| valuenorm " in markdown

    assert status.main(["runs=runs"]) == 0
    assert capsys.readouterr().out.count("valuenorm") == len(PROTOCOLS)


def test_it_composes_with_what_is_there(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets per head and packed codes come with the harness: the newcomer's files do not change."""
    others = ["method/allocator=global", "method/codec=kivi2", "method.codec.group=16", "method.codec.residual=16"]
    assert start("method=valuenorm", "experiment=plain") == 0
    assert start("method=valuenorm", "experiment=composed", *others) == 0
    plain, composed = (summaries(newcomer / "runs" / name)["valuenorm", "blind"] for name in ("plain", "composed"))
    assert composed["counts"]["ok"] == 2
    assert composed["kv"]["bytes_device"] < plain["kv"]["bytes_device"]
    assert composed["kv"]["entries_at_first_decode"] == plain["kv"]["entries_at_first_decode"]


def test_a_mistake_in_it_is_told_before_or_counted(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores of the wrong shape must fail the samples with the scorer's name, not be broadcast into some choice."""
    code = (newcomer / "mine.py").read_text()
    wrong = code.replace(".norm(dim=-1)", ".norm(dim=-1).mean(0)")
    assert wrong != code
    (newcomer / "mine.py").write_text(wrong)
    assert start("method=valuenorm") == 1
    out, err = capsys.readouterr()
    assert "ValueNorm" in out + err
    (summary,) = summaries(newcomer / "runs").values()
    assert (summary["counts"]["ok"], summary["counts"]["failed"]) == (0, 2)
    assert summary["score"] is None
