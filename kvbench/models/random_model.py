"""Random weights of any transformers architecture, with a byte-level tokenizer: needs no files and no network."""

from __future__ import annotations

import difflib
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .byte_tokenizer import BOS, EOS, SIZE, build_byte_tokenizer
from .hashing import sha256_json
from .source import ModelSource
from .support import refuse

if TYPE_CHECKING:
    import torch

    from ..config import ModelConfig

log = logging.getLogger(__name__)
_OURS = ("architecture", "seed", "init_range")
_SCHEME = 1  # goes into the content hash: raise it when the way weights are drawn changes


class RandomSource(ModelSource):
    """``model.random``: {architecture, seed, init_range, then any value of that architecture's config}.

    The same settings give the same weights on every machine: they are drawn on the CPU in float32, then moved.
    """

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__(settings)
        values = dict(settings.random)
        self.architecture = str(values.pop("architecture", "llama"))
        self.seed = _number(values.pop("seed", 0), "model.random.seed", int)
        # 0.02, the usual default, gives such flat attention that wrong positions hardly move the logits
        self.init_range = _number(values.pop("init_range", 0.2), "model.random.init_range", float)
        self.values = values
        refuse(self.config, "model.random.architecture", self.architecture)
        log.warning("model %s has random weights: its scores mean nothing", self.name)

    @cached_property
    def config(self) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        if self.architecture not in CONFIG_MAPPING:
            near = difflib.get_close_matches(self.architecture, list(CONFIG_MAPPING.keys()), 1)
            hint = f"Did you mean {near[0]}?" if near else "Take a model_type of transformers, such as llama."
            raise InputError("model.random.architecture", self.architecture, "is not known to transformers.", hint)
        self._check_names(AutoConfig.for_model(self.architecture))
        tokenizer = self.tokenizer
        values = {
            "vocab_size": SIZE,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
            **self.values,
        }
        try:
            config = AutoConfig.for_model(self.architecture, **values)
        except Exception as error:  # each architecture checks its sizes in its own way, with its own exceptions
            raise InputError("model.random", self.values, f"{self.architecture} refuses this: {error}") from error
        if config.get_text_config().vocab_size < SIZE:
            raise InputError(
                "model.random.vocab_size", values["vocab_size"], "is less than the byte tokenizer needs.",
                f"Set it to {SIZE} or more, or leave it out.",
            )  # fmt: skip
        text = config.get_text_config()
        heads, shared = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
            raise InputError("model.random.num_key_value_heads", shared, f"does not divide {heads} attention heads.")
        return config

    def _check_names(self, default: Any) -> None:
        known = set(default.to_dict()) | set(default.attribute_map)
        for name in self.values:
            if name not in known and not hasattr(default, name):
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]}?" if near else ""
                raise InputError(
                    f"model.random.{name}", self.values[name], f"{self.architecture} has no such setting.", hint
                )

    @cached_property
    def content_sha256(self) -> str:
        return sha256_json(
            ["random", _SCHEME, self.architecture, self.seed, self.init_range, self.values, SIZE, [BOS, EOS]]
        )

    def read_tokenizer(self) -> Any:
        return build_byte_tokenizer()

    def read_model(self, device: str, dtype: torch.dtype, attn_implementation: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):  # what draw_weights leaves alone must not hang on the caller's seed
            torch.manual_seed(self.seed)
            try:
                model = AutoModelForCausalLM.from_config(
                    self.config, dtype=torch.float32, attn_implementation=attn_implementation
                )
            except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
                raise InputError("model.random", self.settings.random, f"makes no model: {error}.") from error
        draw_weights(model, self.seed, self.init_range)
        return model.to(dtype)


def draw_weights(model: Any, seed: int, init_range: float) -> None:
    """Draw every parameter but the norms' from N(0, init_range), in the order of their names.

    Several architectures ignore ``initializer_range`` or start biases and attention sinks at zero.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            done.update(id(parameter) for parameter in module.parameters(recurse=False))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if id(parameter) not in done:  # tied weights come once
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * init_range)
                done.add(id(parameter))


def _number(value: Any, key: str, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value or value < 0:
        raise InputError(key, value, f"is not a {'whole ' if kind is int else ''}number of at least 0.")
    return kind(value)
