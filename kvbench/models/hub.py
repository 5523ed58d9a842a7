"""Models of the Hugging Face hub: small files first, weights when they are needed, errors in the user's words."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .files import PICKLE_INDEX, SAFETENSORS, SAFETENSORS_INDEX, weight_files
from .source import FolderSource

if TYPE_CHECKING:
    from ..config import ModelConfig

_SMALL = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "additional_chat_templates/*"]
_SAFE_WEIGHTS = [SAFETENSORS, SAFETENSORS_INDEX, "model-*.safetensors"]
_PICKLE_WEIGHTS = ["pytorch_model*.bin", PICKLE_INDEX]


class HubSource(FolderSource):
    """``model.path`` is a hub id, ``model.revision`` a branch, tag or commit. Works offline from the hub's cache."""

    def __init__(self, settings: ModelConfig) -> None:
        path = Path(str(settings.path)).expanduser()
        if path.exists():
            kind = "gguf" if path.is_file() else "folder"
            raise InputError("model.path", settings.path, f"is a {kind} on this machine.", f"Use model={kind}.")
        super().__init__(settings)

    def _find_folder(self) -> Path:
        return self._download([*_SMALL, *(["*.py"] if self.settings.trust_remote_code else [])])

    def weights_folder(self) -> Path:
        return self._weights

    @cached_property
    def _weights(self) -> Path:
        folder = self._download(_SAFE_WEIGHTS)
        if not any(folder.glob("model*.safetensors")) and self.settings.allow_pickle:
            folder = self._download(_PICKLE_WEIGHTS)
        elif not any(folder.glob("model*.safetensors")) and (folder / PICKLE_INDEX).is_file():
            weight_files(folder, allow_pickle=False)  # says that only pickles are there, and how to allow them
        return folder

    def _download(self, patterns: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(str(self.settings.path), revision=self.settings.revision, allow_patterns=patterns)
            )
        except Exception as error:  # the client's own errors, its HTTP library's and the system's: all are about input
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> InputError:
        path, revision = self.settings.path, self.settings.revision
        kind = type(error).__name__
        local = "or download it elsewhere and use model=folder model.path=/path/to/folder."
        table: dict[str, tuple[str, Any, str, str]] = {
            "GatedRepoError": (
                "model.path", path, "is gated: its owner has to grant access.",
                f"Accept its terms on the hub and log in (hf auth login), {local}",
            ),
            "RepositoryNotFoundError": (
                "model.path", path, "is not on the hub, or is private.", "Check the spelling (owner/name), or log in.",
            ),
            "RevisionNotFoundError": (
                "model.revision", revision, f"is not a branch, tag or commit of {path}.", "Leave it out.",
            ),
            "HFValidationError": (
                "model.path", path, "is not a hub id (owner/name).", "Local models: model=folder or model=gguf.",
            ),
        }  # fmt: skip
        if kind in table:
            return InputError(*table[kind])
        return InputError(
            "model.path", path, f"is not in the local hub cache and the hub cannot be reached ({kind}).",
            f"Connect (and unset HF_HUB_OFFLINE), {local}",
        )  # fmt: skip
