"""Which architectures are let through and which are refused, by name and with the reason."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from kvbench.errors import InputError
from kvbench.models import UnsupportedModel, refuse

from . import tiny_configs

REASONS = {
    "bart": "encoder-decoder",
    "t5": "encoder-decoder",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon-alibi": "ALiBi",
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "gemma3n_text": "reuse another layer's keys",
}


@pytest.mark.parametrize("name", tiny_configs.SUPPORTED)
def test_supported_architectures_pass(name):
    refuse(tiny_configs.config(name))


def test_the_matrix_is_broad():
    assert len({tiny_configs.model_type(name) for name in tiny_configs.SUPPORTED}) >= 34


@pytest.mark.parametrize("name", tiny_configs.REFUSED)
def test_refused_by_name_and_reason(name):
    kind = tiny_configs.model_type(name)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {kind}")
    with pytest.raises(UnsupportedModel, match=rf"model\.path.*'{kind}' .*{REASONS.get(name, 'recurrent')}") as caught:
        refuse(tiny_configs.config(name), value="/some/where")
    assert isinstance(caught.value, InputError) and "/some/where" in str(caught.value)


def test_properties_are_found_whatever_the_name():
    for values, reason in (
        ({"kv_lora_rank": 16}, "latent"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "recurrent"),
        ({"layer_types": ["full_attention", "surprise_attention"]}, "surprise_attention"),
        ({"num_kv_shared_layers": 1}, "reuse"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"attention_chunk_size": 8}, "chunks"),
    ):
        config = tiny_configs.config("llama")
        for key, value in values.items():
            setattr(config, key, value)
        with pytest.raises(UnsupportedModel, match=reason):
            refuse(config)


@pytest.mark.parametrize(("name", "reason"), [("bert", "encoder"), ("vit", "not registered")])
def test_models_that_are_no_causal_decoders(name, reason):
    from transformers import AutoConfig

    with pytest.raises(UnsupportedModel, match=reason):
        refuse(AutoConfig.for_model(name))


def test_tiny_models_are_deterministic_and_wide():
    import torch

    ids = torch.arange(12)[None]
    first, again, other = (tiny_configs.build("qwen2", seed)(ids).logits for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and first.std() > 0.5
