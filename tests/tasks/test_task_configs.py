"""Each YAML file of conf/task builds what its name says, with parameters that its builder knows."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_method

from kvbench.config import conf_dir
from kvbench.tasks import longbench, ruler
from kvbench.tasks.rules import scoring_rules

FOLDER = Path(conf_dir()) / "task"
FILES = {str(file.relative_to(FOLDER).with_suffix("")): file for file in sorted(FOLDER.rglob("*.yaml"))}


def test_every_task_has_a_config():
    wanted = {"passkey", "niah", "jsonl", *(f"ruler/{name}" for name in ruler.SUBSETS)}
    wanted |= {f"longbench/{name}" for name in longbench.tasks()}
    wanted |= {f"longbench_e/{name}" for name, task in longbench.tasks().items() if task.extended}
    assert wanted <= set(FILES)
    assert len([name for name in FILES if name.startswith("longbench_e/")]) == 13


@pytest.mark.parametrize("name", FILES)
def test_configs_name_their_task_and_all_parameters_of_its_builder(name):
    text = FILES[name].read_text(encoding="utf-8")
    assert text.startswith("# @package task\n")  # else longbench/qasper would land in task.longbench
    config = yaml.safe_load(text)
    builder = get_method(config.pop("_target_"))
    parameters = set(inspect.signature(builder).parameters) - {"encoder", "seed"}
    assert config["name"] == name and "path" in config
    assert set(config) <= parameters
    assert parameters - set(config) <= {"extended"}  # what can be set is in the file, with a comment
    for key, value in config.items():
        default = inspect.signature(builder).parameters[key].default
        assert default in (inspect.Parameter.empty, value) or key in ("name", "subset", "extended"), key
    assert scoring_rules(name, config).metric
