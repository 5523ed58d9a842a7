"""What a wheel holds, and that the commands work from one in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvbench
from kvbench.config import conf_dir

ROOT = Path(__file__).resolve().parents[1]


def test_the_plugin_folder_is_on_the_path_once_and_last_of_all():
    plugins = str(Path(kvbench.__file__).resolve().parent / "_plugins")
    assert sys.path.count(plugins) == 1
    assert not Path(plugins, "hydra_plugins", "__init__.py").exists()  # a namespace that others share


def test_conf_is_found_beside_the_package():
    assert conf_dir() == str(ROOT / "conf")


def test_conf_is_found_inside_the_package(monkeypatch, tmp_path):
    package = tmp_path / "kvbench"
    (package / "conf").mkdir(parents=True)
    monkeypatch.setattr("kvbench.config.__file__", str(package / "config.py"))
    with pytest.raises(FileNotFoundError, match="not completely installed"):
        conf_dir()
    (package / "conf" / "config.yaml").write_text("")
    assert conf_dir() == str(package / "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (it is in the dev extra)")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("kvbench-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel, unpacked by pip without its dependencies, which this interpreter has."""
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return target


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvbench.run", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_every_config_and_the_plugin(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"kvbench/conf/{file.relative_to(ROOT / 'conf')}" for file in (ROOT / "conf").rglob("*.yaml")}
    assert configs <= names
    assert "kvbench/_plugins/hydra_plugins/kvbench_launcher.py" in names
    assert not any(name.startswith(("tests/", "conf/", "runs/")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_help_config_and_wrong_input_from_a_wheel(installed, tmp_path):
    done = run(installed, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "snapkv" in done.stdout
    done = run(installed, tmp_path, "--cfg", "job", "budget=64")
    assert (done.returncode, done.stderr) == (0, "")
    assert "budget: 64" in done.stdout
    done = run(installed, tmp_path, "method=snapvk")
    assert done.returncode == 2
    assert "Did you mean snapkv?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cell_and_a_sweep_from_a_wheel(installed, tmp_path):
    done = run(installed, tmp_path, "method=snapkv", "protocol=blind", "budget=128")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/default/*/*/summary.json"))
    done = run(installed, tmp_path, "-m", "method=full,snapkv", "budget=64", "limit=1", "experiment=sweep")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/sweep/*/*/summary.json"))) == 2
