"""Hydra's launcher for sweeps: all cells are composed and frozen first, then run in one call, in this process.

Hydra imports (and re-executes) this module at every start, so it imports nothing heavy and keeps no state. No
`from __future__ import annotations` here: Hydra executes the file before it is in sys.modules, where dataclasses looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass
class KvbenchLauncherConf:
    _target_: str = "hydra_plugins.kvbench_launcher.KvbenchLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="kvbench", node=KvbenchLauncherConf, provider="kvbench")


class KvbenchLauncher(Launcher):
    """Hands the task function all cells of a sweep at once (its ``run_cells``), instead of one after the other."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job before the first runs, so that editing conf/ meanwhile changes none of them (C8)."""
        setup_globals()  # the ${hydra:...} and ${now:...} resolvers
        before = HydraConfig.instance().cfg
        try:
            composed = [self._compose(initial_job_idx + i, list(job)) for i, job in enumerate(job_overrides)]
        finally:
            HydraConfig.instance().cfg = before
        self.task_function.run_cells([job.cfg for job in composed])  # type: ignore[union-attr]
        # What failed is the business of the exit code: raising here would hide the cells that went well.
        return composed

    def _compose(self, number: int, overrides: list[str]) -> JobReturn:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)  # type: ignore[union-attr]
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(config)  # what ${hydra:job.num} refers to
        cell = config.copy()
        with open_dict(cell):
            del cell["hydra"]
        OmegaConf.resolve(cell)
        job = JobReturn(overrides=overrides, cfg=cell, hydra_cfg=config, status=JobStatus.COMPLETED)
        job.return_value = None
        return job
