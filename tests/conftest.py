"""Fixtures that many tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(layers: int = 2, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Fixture T: vocabulary 128, hidden 64, 4 query and 2 KV heads of 16, initializer range 0.2, fp32.

    With the usual range of 0.02 a wrong position moves logits by 0.004 and hides.
    """
    torch.manual_seed(seed)
    settings: dict = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama()
