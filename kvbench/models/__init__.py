"""Loading models: hub id, local folder, GGUF file, or random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError
from .device import resolve_device, resolve_dtype
from .source import FolderSource, ModelSource, display_name
from .support import UnsupportedModel, refuse

if TYPE_CHECKING:
    from ..config import ModelConfig

__all__ = ["ModelSource", "UnsupportedModel", "display_name", "open_model", "refuse", "resolve_device", "resolve_dtype"]

SOURCES = ("hub", "folder", "gguf", "random")


def open_model(settings: ModelConfig) -> ModelSource:
    """The model that a config names, without its weights. Raises InputError naming the key that is wrong."""
    if settings.source not in SOURCES:
        raise InputError("model.source", settings.source, "is not a source.", f"Allowed: {', '.join(SOURCES)}.")
    if settings.source == "random":
        from .random_model import RandomSource

        return RandomSource(settings)
    if not settings.path:
        what = {"hub": "a hub id", "folder": "a model folder", "gguf": "a GGUF file"}[settings.source]
        raise InputError("model.path", "null", "is missing.", f"model={settings.name} needs model.path={what}.")
    if settings.source == "gguf":
        from .gguf import GgufSource

        return GgufSource(settings)
    if settings.source == "hub":
        from .hub import HubSource

        return HubSource(settings)
    return FolderSource(settings)
