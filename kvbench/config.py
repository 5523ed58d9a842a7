"""The typed schema of a run, where its YAML files are, and the step from a composed config to a frozen RunConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf


@dataclass
class ModelConfig:
    name: str = "???"  # shown in tables and folder names
    source: str = "hub"  # hub | folder | gguf | random
    path: str | None = None  # hub id, folder, or GGUF file
    revision: str | None = None  # hub revision (branch, tag or commit)
    window: int | None = None  # context window in tokens; null: what the model's config says
    chat: bool = True  # false: never wrap prompts in the chat template
    chat_template: str | None = None  # a Jinja template that replaces the tokenizer's own
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the template (enable_thinking=false)
    official_max_length: int | None = None  # truncation=official cuts the bare prompt to this many tokens
    trust_remote_code: bool = False
    allow_pickle: bool = False  # .bin weights can run code; refused unless allowed
    random: dict[str, Any] = field(
        default_factory=dict
    )  # source=random: {architecture, seed, init_range, config sizes}


@dataclass
class ProtocolConfig:
    name: str = "blind"  # blind | aware | swapped


@dataclass
class TrackerConfig:
    name: str = "none"  # none | wandb
    project: str = "kvbench"
    mode: str = "disabled"  # online | offline | disabled


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    method: Any = None  # composition: name, window, scorer, allocator, protect, codec, positions (conf/method/*.yaml)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    task: Any = None  # {_target_: builder, name, path, ...builder arguments} (conf/task/**.yaml)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    budget: Any = 128  # entries per KV head (integer) | share in (0, 1) | "full"
    budget_bytes: int | None = None  # instead of budget: device bytes of a sample's cache when its answer begins
    match: Any = None  # instead of budget: the bytes that this method holds on the same sample
    budget_scope: str = "context"  # context | prompt
    question_evictable: bool = False
    first_token: str = "compressed"  # compressed | full
    truncation: str = "document"  # document | official
    positions: str = "${method.positions}"  # original | compact
    limit: int | None = None
    seed: int = 0
    device: str = "auto"  # auto | cuda | cuda:N | mps | cpu
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    max_new_tokens: int | None = None  # null: the task's own
    max_prompt_tokens: int | None = None  # null: the model's window less the new tokens
    runs: str = "runs"
    experiment: str = "default"
    fail_fast: bool = False
    dump_prompts: bool = False


def conf_dir() -> str:
    """The folder with config.yaml: beside the package (checkout, editable install) or inside it (wheel)."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"no conf/config.yaml beside or inside {package}: kvbench is not completely installed")


def register_schema() -> None:
    """Let Hydra check every config against RunConfig (``config_schema``, the first of config.yaml's defaults)."""
    ConfigStore.instance().store(name="config_schema", node=RunConfig, provider="kvbench")


def freeze(config: DictConfig) -> RunConfig:
    """The composed config as plain data: references resolved, nothing left that editing a file could change.

    Raises OmegaConf's errors for missing values and for interpolations that lead nowhere.
    """
    return OmegaConf.to_object(config)  # type: ignore[return-value]  # the root is typed by config_schema


register_schema()
