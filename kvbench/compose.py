"""From a command line to the frozen configs of its cells, or to an InputError that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import diagnose, groups
from kvbench.config import ModelConfig, ProtocolConfig, RunConfig, TrackerConfig, conf_dir, freeze
from kvbench.errors import InputError
from kvbench.suggest import did_you_mean, one_of
from kvbench.validate import validate

FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-name", "--config-dir", "--experimental-rerun"),
)
VERSION_BASE = "1.3"
TYPED = {"": RunConfig, "model.": ModelConfig, "protocol.": ProtocolConfig, "tracker.": TrackerConfig}


@dataclass(frozen=True)
class Command:
    """A command line, read but not yet understood."""

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    config_name: str = "config"
    multirun: bool = False
    help: bool = False
    # --hydra-help, --info, --shell-completion, --experimental-rerun: Hydra answers, nothing is run as given
    hydra_only: bool = False


def read(argv: Sequence[str]) -> Command:
    """The command line ``argv`` (without the program's name). Raises InputError for flags that do not exist."""
    parser = get_args_parser()
    parser.error = _flag_error  # type: ignore[method-assign]  # argparse would print Hydra's whole usage
    args = parser.parse_intermixed_args(list(argv))  # overrides may stand before and after flags
    if args.config_path is not None:
        raise InputError("--config-path", args.config_path, "is not supported.", "Add your own folder: --config-dir.")
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise InputError("--config-dir", args.config_dir, "is not a folder.", "Give a folder with method/*.yaml.")
    if args.resolve and not args.cfg:
        raise InputError("--resolve", "", "does nothing alone.", "Write --cfg job --resolve.")
    hydra_only = bool(args.hydra_help or args.info or args.shell_completion or args.experimental_rerun)
    if sum(map(bool, (args.run, args.cfg, args.multirun, args.info, args.shell_completion))) > 1:
        raise InputError("flags", " ".join(argv), "ask for two things at once.", "Leave one out (-m, --cfg, --info).")
    return Command(
        overrides=tuple(args.overrides),
        config_dir=str(Path(args.config_dir).resolve()) if args.config_dir else None,
        config_name=args.config_name or "config",
        multirun=args.multirun,
        help=args.help,
        hydra_only=hydra_only,
    )


def _flag_error(message: str) -> NoReturn:
    """argparse's complaint as an InputError; ``--budget`` most often means ``budget=``."""
    word = next((w for w in message.replace(":", " ").split() if w.startswith("-")), "")
    flag = word.split("=")[0].rstrip(",")
    hint = did_you_mean(flag, FLAGS) or "Keys are written without dashes: budget=128 (see --help)."
    raise InputError(flag or "flags", "", message.strip() + ".", hint)


def cells(command: Command) -> dict[tuple[str, ...], RunConfig]:
    """job_key(overrides) -> the validated, frozen config of every cell of the command, in the order of the sweep.

    Raises InputError for the first that is wrong; nothing has been written or loaded by then.
    """
    overrides = [_parse(text) for text in command.overrides]
    search = _search_path(command, overrides)
    overrides = [o for o in overrides if not _is_search_path(o)]
    folders = [conf_dir(), *(item.removeprefix("file://") for item in search)]
    options = groups.options(folders)
    for override in overrides:
        wrong = None if override.is_sweep_override() else diagnose.wrong_option(override, options)
        if wrong is not None:
            raise wrong
    with initialize_config_dir(conf_dir(), job_name="run", version_base=VERSION_BASE):
        composer = _Composer(command.config_name, _as_override(search), folders)
        return {job_key(job): composer.cell(job) for job in _jobs(command, overrides, composer)}


def job_key(overrides: Sequence[str]) -> tuple[str, ...]:
    """What identifies a job among those of a command: its overrides, less those of Hydra itself.

    They change no cell, and Hydra leaves them out of what it says a job's overrides are.
    """
    return tuple(text for text in overrides if not text.lstrip("+~").startswith(("hydra.", "hydra/")))


def _parse(text: str) -> Override:
    """One ``key=value``. Raises InputError that shows how it is written."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise diagnose.syntax(text, error) from error


def _is_search_path(override: Override) -> bool:
    return override.key_or_group == "hydra.searchpath"


def _search_path(command: Command, overrides: Sequence[Override]) -> list[str]:
    """Where else YAML files are: ``--config-dir`` and the user's own hydra.searchpath."""
    given: list[str] = []
    for override in filter(_is_search_path, overrides):
        value = override.value()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError("hydra.searchpath", value, "is not a list.", "Write hydra.searchpath=[file:///folder].")
        given = [str(item) for item in value]
    return [*([f"file://{command.config_dir}"] if command.config_dir else []), *given]


def _as_override(search: Sequence[str]) -> list[str]:
    """``search`` as the compose API takes it."""
    quoted = ",".join("'" + item.replace("\\", "\\\\").replace("'", "\\'") + "'" for item in search)
    return [f"hydra.searchpath=[{quoted}]"] if search else []


def _jobs(command: Command, overrides: list[Override], composer: _Composer) -> list[list[str]]:
    """The overrides of every job: one list for a single run, all combinations for a sweep."""
    texts = [str(o.input_line) for o in overrides]
    swept = [o for o in overrides if o.is_sweep_override()]
    if not command.multirun and not any(o.key_or_group == "hydra.mode" for o in overrides):
        for override in swept:
            key, _, value = str(override.input_line).partition("=")
            raise InputError(key, value, "has several values.", "Add -m to run them all.")
        return [texts]
    master = composer.compose([str(o.input_line) for o in overrides if o not in swept], with_hydra=True)
    params = OmegaConf.select(master, "hydra.sweeper.params") or {}  # a sweep that a YAML file asks for
    try:
        asked = [*(_parse(f"{key}={value}") for key, value in params.items()), *overrides]
        return [list(job) for job in BasicSweeper.split_arguments(asked, None)[0]]
    except (HydraException, ValueError) as error:
        raise diagnose.general(texts, error) from error


@dataclass(frozen=True)
class _Composer:
    """Composes jobs with Hydra, which must be initialised, and says what is wrong with those that do not compose."""

    config_name: str
    search: Sequence[str]
    folders: Sequence[str]

    def cell(self, job: list[str]) -> RunConfig:
        composed = self.compose(job)
        try:
            _check_keys(composed, job)
            _check_budget_keys(job)
            run = freeze(composed)
            if isinstance(run.match, str):
                run.match = self._matched(run.match)
        except OmegaConfBaseException as error:  # a reference that leads nowhere
            raise self._problem(job, error) from error
        validate(run)
        return run

    def _matched(self, name: str) -> Any:
        """The configuration of the method that ``match`` names, frozen into the run."""
        known = sorted(groups.options(self.folders).get("method", ()))
        if name not in known:
            raise InputError("match", name, "is not a method.", one_of(name, known))
        return freeze(self.compose([f"method={name}"])).method

    def compose(self, job: list[str], with_hydra: bool = False) -> DictConfig:
        try:
            return compose(self.config_name, [*job, *self.search], return_hydra_config=with_hydra)
        except Exception as error:  # from a bare ValueError to YAML's own: whatever does not compose is wrong input
            raise self._problem(job, error) from error

    def _problem(self, job: list[str], error: Exception) -> InputError:
        return diagnose.Context(self.folders, self.search, self.config_name).explain(job, error)


def _check_budget_keys(job: list[str]) -> None:
    """A budget is given in one way: entries, bytes, or another method's bytes."""
    given = [key for key in ("budget", "budget_bytes", "match") if _value_of(job, key) not in ("", "null")]
    if len(given) > 1:
        reason = f"and {given[0]}={_value_of(job, given[0])} both say how much may be kept."
        raise InputError(given[1], _value_of(job, given[1]), reason, "Give one of them.")


def _check_keys(composed: DictConfig, job: list[str]) -> None:
    """Refuses what the schema lets through: keys added with +, missing values, a group that was taken away."""
    if OmegaConf.get_type(composed) is not RunConfig:
        raise InputError("--config-name", "", "is not a run.", "Its defaults must begin with config_schema.")
    content = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(content, dict)
    for prefix, schema in TYPED.items():
        node = content[prefix.rstrip(".")] if prefix else content
        known = [f"{prefix}{item.name}" for item in fields(schema)]
        for key in (f"{prefix}{name}" for name in node):
            if key not in known:
                raise diagnose.unknown_key(key, _value_of(job, key), known)
    for group in ("method", "task"):
        if content[group] is None:
            raise InputError(group, "null", "is needed.", f"Choose one of conf/{group}/: {group}=... (see --help).")
    for key in sorted(OmegaConf.missing_keys(composed)):
        raise InputError(key, "???", "has no default.", f"Set it: {key}=...")


def _value_of(job: list[str], key: str) -> str:
    """What ``job`` gives for ``key``; for a key from a file, nothing."""
    return next((v for k, _, v in (text.partition("=") for text in job) if k.lstrip("+") == key), "")
