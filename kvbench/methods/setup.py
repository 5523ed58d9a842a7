"""What the parts of a method may ask of the loaded model, once, before the first sample.

A scorer, allocator or codec that needs the model (a codebook fitted to its keys, head classes measured on it, the ids
of a prompt, its rotary embedding) has a method ``prepared(setup)`` that returns a copy of itself with what it needs,
and raises InputError where the model does not fit its settings. Parts without that method are used as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.engine.engine import Engine
from kvbench.engine.rotation import Rotation, discover

if TYPE_CHECKING:
    from kvbench.prompts import PromptEncoder

Part = TypeVar("Part")


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    sliding: bool  # a sliding-window layer: never compressed


@dataclass
class Setup:
    """The loaded model as the parts of a method see it."""

    engine: Engine
    encoder: PromptEncoder
    model_sha256: str  # the content hash of the model: what fitted files are kept under
    chat: bool = False  # are the task's prompts wrapped in the chat template?

    @cached_property
    def rotation(self) -> Rotation:
        """How stored keys are moved; InputError where this model's cannot be."""
        return discover(self.engine)

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shape of every layer's entries."""
        return tuple(
            LayerShape(
                layer.keys.shape[0],
                layer.keys.shape[2],
                layer.values.shape[2],
                layer.options.sliding_window is not None,
            )
            for layer in self.engine.prefill([0]).layers
        )

    def prepare(self, part: Part) -> Part:
        """``part``, or the copy that its ``prepared`` makes."""
        prepared: Any = getattr(part, "prepared", None)
        return part if prepared is None else prepared(self)
