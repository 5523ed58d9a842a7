"""Progress lines and trackers: they report, and never disturb."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from kvbench.config import TrackerConfig
from kvbench.errors import InputError
from kvbench.results.progress import Progress, duration, speed
from kvbench.results.tracker import NoTracker, open_tracker, wandb_mode
from tests.results.build import make_record, make_run


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_line_every_thirty_seconds(caplog):
    caplog.set_level("INFO")
    clock = Clock()
    with Progress(12, "qasper", done=2, clock=clock) as progress:
        for _ in range(10):
            clock.now += 20
            progress.update()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "qasper: 4/12 samples (33 %), 3.0 samples/min, 2m40s left"
    assert len(lines) == 5 and lines[-1] == "qasper: 12/12 samples in 3m20s"


@pytest.mark.parametrize("seconds, text", [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (11100, "3h05m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_speeds():
    assert speed(3.2, "sample") == "3.2 samples/s" and speed(0.5, "sample") == "30.0 samples/min"


def test_no_bar_and_no_carriage_return_in_a_file():
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from kvbench.results.progress import Progress\n"
        "with Progress(3, 'x', every=0) as p:\n    [p.update() for _ in range(3)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"\r" not in done.stdout + done.stderr and done.stderr.count(b"\n") == 3


class FakeRun:
    def __init__(self, broken=()):
        self.broken, self.logged, self.summary, self.ended = broken, [], {}, None

    def log(self, values):
        if "log" in self.broken:
            raise ConnectionError("no network")
        self.logged.append(values)

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.run = FakeRun()
    module.init = lambda **settings: module.__dict__.update(settings=settings) or module.run
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_none_does_nothing(tmp_path):
    tracker = open_tracker(TrackerConfig(), make_run(), tmp_path)
    assert isinstance(tracker, NoTracker)
    tracker.log(make_record("a"))
    tracker.finish({})


def test_wandb_gets_numbers_config_and_summary(wandb, tmp_path):
    tracker = open_tracker(TrackerConfig("wandb", "p", "offline"), make_run(), tmp_path / "new")
    tracker.log(make_record("a", 40.0))
    tracker.finish({"score": 40.0}, exit_code=1)
    assert (tmp_path / "new").is_dir()
    assert wandb.settings["mode"] == "offline" and wandb.settings["config"]["budget"] == 128
    assert wandb.run.logged[0]["score"] == 40.0 and "prediction" not in wandb.run.logged[0]
    assert wandb.run.summary == {"score": 40.0} and wandb.run.ended == 1


def test_a_failing_tracker_warns_once(wandb, tmp_path, caplog):
    wandb.run.broken = ("log",)
    tracker = open_tracker(TrackerConfig("wandb", "p", "offline"), make_run(), tmp_path)
    for _ in range(3):
        tracker.log(make_record("a"))
    tracker.finish({})
    assert len(caplog.records) == 1 and "no network" in caplog.text


def test_a_missing_wandb_warns(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = open_tracker(TrackerConfig("wandb", "p", "offline"), make_run(), tmp_path)
    tracker.log(make_record("a"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "configured, environment, mode",
    [("online", "offline", "offline"), ("offline", "online", "offline"), ("online", "", "online")],
)
def test_the_environment_can_only_forbid(monkeypatch, configured, environment, mode):
    monkeypatch.setenv("WANDB_MODE", environment)
    assert wandb_mode(configured) == mode


@pytest.mark.parametrize("config", [TrackerConfig("wandbb"), TrackerConfig("wandb", mode="ofline")])
def test_unknown_names(config, tmp_path):
    with pytest.raises(InputError):
        open_tracker(config, make_run(), tmp_path)
