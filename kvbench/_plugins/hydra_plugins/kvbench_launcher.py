"""Hydra's part in a sweep: every cell is composed, checked and frozen before the first runs, then all run in one call.

Hydra imports (and re-executes) this module at every start, so it imports nothing heavy and keeps no state. No
`from __future__ import annotations` here: Hydra executes the file before it is in sys.modules, where dataclasses looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from kvbench.config import RunConfig, freeze


@dataclass
class KvbenchLauncherConf:
    _target_: str = "hydra_plugins.kvbench_launcher.KvbenchLauncher"


@dataclass
class KvbenchSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.kvbench_launcher.KvbenchSweeper"


ConfigStore.instance().store(group="hydra/launcher", name="kvbench", node=KvbenchLauncherConf, provider="kvbench")
ConfigStore.instance().store(group="hydra/sweeper", name="kvbench", node=KvbenchSweeperConf, provider="kvbench")


class KvbenchSweeper(BasicSweeper):
    """The basic sweeper, which composes every job only to see whether it can: here that has been seen already."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing left to do: kvbench.compose.cells composed and checked this batch before Hydra started."""


class KvbenchLauncher(Launcher):
    """Hands the task function all cells of a sweep at once, frozen (kvbench.run.Submission)."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs. Editing conf/ meanwhile changes none of them: nothing is composed once the first has begun."""
        submission = self.task_function
        frozen = [
            submission.frozen(job) or self._composed(initial_job_idx + i, job) for i, job in enumerate(job_overrides)
        ]
        submission.run(frozen)
        # What failed is the business of the exit code: raising here would hide the cells that went well.
        return [_done(job) for job in job_overrides]

    def _composed(self, number: int, overrides: Sequence[str]) -> RunConfig:
        """A job that was not composed before Hydra started: another sweeper than ours made it up."""
        setup_globals()  # the ${hydra:...} and ${now:...} resolvers
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)  # what ${hydra:job.num} refers to
        try:
            cell = config.copy()
            with open_dict(cell):
                del cell["hydra"]
            return freeze(cell)
        finally:
            HydraConfig.instance().cfg = before


def _done(overrides: Sequence[str]) -> JobReturn:
    job = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    job.return_value = None
    return job
