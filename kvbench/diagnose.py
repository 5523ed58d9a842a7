"""Hydra's errors, translated: which key, which value, what is allowed, what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError

from kvbench import groups
from kvbench.errors import InputError
from kvbench.suggest import did_you_mean, one_of

# What OmegaConf's messages say a value could not become -> what to write
EXPECTED = {
    "Integer": "Allowed: a whole number.",
    "bool": "Allowed: true or false.",
    "string": "Allowed: text.",
    "Float": "Allowed: a number.",
    "Optional": "Allowed: anything but null.",
}


@dataclass(frozen=True)
class Context:
    """What an explanation may need to look up: the folders with options, extra overrides, the primary config."""

    folders: Sequence[str]
    extra: Sequence[str]
    config_name: str

    def explain(self, job: Sequence[str], error: Exception) -> InputError:
        """The InputError for what composing ``job`` (its overrides) raised. Hydra must still be initialised."""
        overrides = OverridesParser.create().parse_overrides(list(job))
        options = groups.options(self.folders)
        for override in overrides:
            wrong = wrong_option(override, options)
            if wrong is not None:
                return wrong
        known = self._known_keys([o for o in overrides if o.key_or_group in options])
        for override in overrides:
            key = override.key_or_group
            if known and "/" not in key and key not in {*known, *options} and override.type.name == "CHANGE":
                return unknown_key(key, _written(override), [*known, *options])
        return missing_option(overrides, error) or wrong_value(job, error) or general(job, error)

    def _known_keys(self, choices: Sequence[Override]) -> list[str]:
        """All dotted keys that exist with these group choices; none if they do not compose either."""
        try:
            config = compose(self.config_name, [*(str(o.input_line) for o in choices), *self.extra], True)
            return list(_dotted(OmegaConf.to_container(config, resolve=False)))
        except Exception:  # then there is nothing to compare with; the caller has the error that matters
            return []


def syntax(text: str, error: Exception) -> InputError:
    """For an argument that is not a readable key=value."""
    key, equals, value = text.partition("=")
    if not equals:
        return InputError(
            text.strip() or "argument", "", "is not of the form key=value.", "Example: budget=128. Keys: see --help."
        )
    said = _one_line(str(error).split("\n")[0])
    return InputError(
        key.strip() or "argument", value, f"cannot be read: {said}.", f"Quotes may help: '{key}=\"...\"'."
    )


def wrong_option(override: Override, options: Mapping[str, Sequence[str]]) -> InputError | None:
    """What is wrong with a group override (method=snapvk), or None."""
    group = override.key_or_group
    if group not in options or override.is_delete():
        return None
    value = override.value()
    if isinstance(value, dict):  # values of the group, given at once: method={window: 8}
        return None
    if isinstance(value, list):
        several = ",".join(map(str, value))
        return InputError(group, _written(override), "is a list.", f"To run several: -m {group}={several}")
    name = _written(override)
    if name in options[group] or name.removesuffix(".yaml") in options[group]:
        return None
    return InputError(group, name, f"is not one of the {group} options.", one_of(name, options[group]))


def missing_option(overrides: Sequence[Override], error: Exception) -> InputError | None:
    """For an option of one of Hydra's own groups (hydra/launcher=foo), or of a group that a YAML names; or None."""
    if not isinstance(error, MissingConfigException) or not error.options:
        return None
    missing = str(error.missing_cfg_file)
    asked = next((o for o in overrides if missing == f"{o.key_or_group}/{_written(o)}"), None)
    group, _, name = missing.rpartition("/")
    key, value = (asked.key_or_group, _written(asked)) if asked else (group, name)
    return InputError(key, value, "is not one of the options.", one_of(value, error.options))


def unknown_key(key: str, value: Any, known: Sequence[str]) -> InputError:
    """For a key that no config has; ``known`` are those that exist."""
    key = key or "@"  # Hydra reads @=1 as a package without a group
    parent, dot, _ = key.rpartition(".")
    prefix = parent + dot
    siblings = [k.removeprefix(prefix) for k in known if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    where = f"Keys of {parent}" if parent else "Keys"
    listed = f"{where}: {', '.join(dict.fromkeys(s for s in siblings if s != 'hydra'))}." if siblings else "See --help."
    # hydra.* only to those who ask for it: `dir` should not suggest hydra.run.dir
    near = did_you_mean(key, [k for k in known if key.startswith("hydra") or not k.startswith("hydra")])
    return InputError(key, value, "there is no such key.", f"{near} {listed}".strip())


def wrong_value(job: Sequence[str], error: Exception) -> InputError | None:
    """For a value of the wrong type, a missing one or a reference that leads nowhere; None if it is none of these."""
    for cause in _causes(error):
        key = getattr(cause, "full_key", None)
        if not isinstance(cause, OmegaConfBaseException) or not key:
            continue
        said = _one_line(str(cause.msg or cause).split("\n")[0])
        allowed = ""
        if isinstance(cause, ValidationError):
            allowed = next((text for word, text in EXPECTED.items() if re.search(rf"\b{word}\b", said)), "")
        elif isinstance(cause, InterpolationResolutionError):
            allowed = "References are written ${key}, with a key that exists."
        value = next((v for k, _, v in (text.partition("=") for text in job) if k.lstrip("+") == key), "")
        return InputError(key, value, said.rstrip(".") + ".", allowed)
    return None


def general(job: Sequence[str], error: Exception) -> InputError:
    """When nothing more is known: what Hydra said, in one paragraph."""
    key, _, value = (job[0] if len(job) == 1 else "config=" + " ".join(job)).partition("=")
    return InputError(key, value, _one_line(str(error)).rstrip(".") + ".", "See --help.")


def _written(override: Override) -> str:
    """The value as it stands on the command line."""
    return str(override.input_line).partition("=")[2].strip("'\"")


def _dotted(config: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        yield f"{prefix}{key}"
        yield from _dotted(value, f"{prefix}{key}.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _one_line(text: str) -> str:
    return " ".join(text.split())
