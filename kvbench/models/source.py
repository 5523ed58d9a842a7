"""A model that is known but not loaded: its config, tokenizer, identity and window; weights come with ``load``."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .eos import eos_ids
from .files import check_folder, identity_files, weight_files
from .hashing import sha256_files
from .support import refuse

if TYPE_CHECKING:
    import torch

    from ..config import ModelConfig

log = logging.getLogger(__name__)


def display_name(settings: ModelConfig) -> str:
    """What tables call the model: the configured name; for model=hub, folder and gguf the last part of the path."""
    if settings.path and settings.name == settings.source:
        name = Path(settings.path).expanduser().name
        return name.removesuffix(".gguf") if settings.source == "gguf" else name
    return settings.name


class ModelSource(ABC):
    """What every source offers. Creating one reads no weights; it raises InputError for a model that cannot work."""

    def __init__(self, settings: ModelConfig) -> None:
        self.settings = settings
        self.name = display_name(settings)
        self.template_kwargs = dict(settings.template_kwargs)

    @property
    @abstractmethod
    def content_sha256(self) -> str:
        """Hash of everything that can change the model's answers, wherever it lies."""

    @cached_property
    @abstractmethod
    def config(self) -> Any:
        """The transformers config."""

    @abstractmethod
    def read_tokenizer(self) -> Any:
        """The tokenizer as it is stored, without the settings' template."""

    @abstractmethod
    def read_model(self, device: str, dtype: torch.dtype, attn_implementation: str) -> Any:
        """The weights, anywhere."""

    @cached_property
    def generation_config(self) -> Any:
        """The stored GenerationConfig, or None."""
        return None

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = self.read_tokenizer()
        if self.settings.chat_template is not None:
            tokenizer.chat_template = self.settings.chat_template
        return tokenizer

    @property
    def text_config(self) -> Any:
        """The decoder's own config (multimodal models nest it)."""
        return self.config.get_text_config()

    @property
    def window(self) -> int:
        """Context window in tokens: the setting, else what the model's config says."""
        if self.settings.window is not None:
            if self.settings.window < 1:
                raise InputError("model.window", self.settings.window, "is not a number of tokens above 0.")
            return self.settings.window
        length = getattr(self.text_config, "max_position_embeddings", None)
        if not isinstance(length, int) or length < 1:
            raise InputError(
                "model.window", "null", f"{self.name}: the model's config does not say how long its window is.",
                "Set model.window to a number of tokens.",
            )  # fmt: skip
        return length

    @property
    def checkpoint_dtype(self) -> torch.dtype | None:
        """The dtype the weights are stored in, as far as the config says."""
        import torch

        for config in (self.config, self.text_config):
            dtype = getattr(config, "dtype", None)
            dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if isinstance(dtype, torch.dtype):
                return dtype
        return None

    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return eos_ids(self.tokenizer, self.config, self.generation_config, self.template_kwargs)

    def load(self, device: str, dtype: torch.dtype, attn_implementation: str = "sdpa") -> Any:
        """The model in eval mode on ``device``, without gradients."""
        model = self.read_model(device, dtype, attn_implementation)
        return model.to(device).eval().requires_grad_(False)


class FolderSource(ModelSource):
    """A folder as ``save_pretrained`` writes it."""

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__(settings)
        self.folder = self._find_folder()
        check_folder(self.folder)
        self._check_code()
        refuse(self.config, value=settings.path)

    def _find_folder(self) -> Path:
        folder = Path(str(self.settings.path)).expanduser()
        if folder.is_dir() and (folder / "config.json").is_file():
            weight_files(folder, self.settings.allow_pickle)  # a half-downloaded folder is told at once
        return folder

    def _check_code(self) -> None:
        from transformers import CONFIG_MAPPING

        file = self.folder / "config.json"
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            kind = stored.get("model_type")
        except (ValueError, AttributeError) as error:
            raise InputError("model.path", file, "is not JSON that describes a model.", "Download it again.") from error
        if kind in CONFIG_MAPPING or self.settings.trust_remote_code:
            return
        if "auto_map" in stored:
            raise InputError(
                "model.trust_remote_code", "false", f"{self.name} (model_type {kind!r}) runs code from its own folder.",
                "Read that code, then set model.trust_remote_code=true.",
            )  # fmt: skip
        raise InputError(
            "model.path", self.folder, f"has model_type {kind!r}, which this transformers does not know.",
            "Install a newer transformers.",
        )  # fmt: skip

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, **self._local)
        except Exception as error:  # each architecture checks its values in its own way, with its own exceptions
            raise InputError(
                "model.path", self.folder / "config.json", f"is refused by transformers: {_first_line(error)}"
            ) from error

    @cached_property
    def generation_config(self) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig.from_pretrained(self.folder) if self._has("generation_config.json") else None

    @cached_property
    def content_sha256(self) -> str:
        folder = self.weights_folder()
        names = weight_files(folder, self.settings.allow_pickle)
        return sha256_files(folder, identity_files(folder, names, code=self.settings.trust_remote_code))

    def weights_folder(self) -> Path:
        """The folder with the weights in it (a hub model downloads them here)."""
        return self.folder

    def read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, **self._local)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InputError(
                "model.path", self.folder, f"the tokenizer cannot be read: {_first_line(error)}",
                "Save a fast tokenizer (tokenizer.json) there.",
            ) from error  # fmt: skip

    def read_model(self, device: str, dtype: torch.dtype, attn_implementation: str) -> Any:
        folder = self.weights_folder()
        names = weight_files(folder, self.settings.allow_pickle)
        safe = names[-1].endswith(".safetensors")
        return read_weights(
            folder, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=safe, **self._local
        )

    def _has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    @property
    def _local(self) -> dict[str, Any]:
        # trust_remote_code is always explicit: with None transformers would ask on the terminal
        return {"local_files_only": True, "trust_remote_code": self.settings.trust_remote_code}


def read_weights(folder: Path, **arguments: Any) -> Any:
    """The causal model in a folder. InputError if its weights cannot be read, or are not all there.

    transformers fills what a checkpoint lacks with random numbers, which would pass for a model.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # safetensors, torch and transformers each raise their own kinds
        raise InputError(
            "model.path", folder, f"the weights cannot be read: {_first_line(error)}.", "Download or convert it again."
        ) from error
    model, told = loaded
    missing = sorted(told["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            "model.path", folder, f"the checkpoint lacks weights: {', '.join(missing[:3])}{more}.",
            "Download or convert it again.",
        )  # fmt: skip
    return model


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:2])}"
