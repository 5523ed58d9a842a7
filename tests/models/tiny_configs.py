"""Tiny configs of many decoder architectures: hidden 64, 4 query heads, head_dim 16, vocabulary 128.

``SUPPORTED`` maps a name to the keyword arguments of its config; the name is the model_type, optionally followed by
``-variant`` (``mistral-sliding``). ``REFUSED`` holds architectures that kvbench must refuse by name. ``build(name)``
instantiates either kind in milliseconds.
"""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 128
WINDOW = 8  # sliding window of the layers that have one
INIT_RANGE = 0.2  # at the usual 0.02 a wrong position moves logits by 0.004 and hides

# No special ids: nothing stops early, and generate() infers no padding from the ids it is given.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_BASE: dict[str, Any] = dict(
    _COMMON,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=INIT_RANGE,
)
_HEAD = dict(_BASE, head_dim=16)
_MHA = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_MIXED = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PARTIAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}

SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": _HEAD,
    "mistral": dict(_HEAD, sliding_window=None),
    "mistral-sliding": dict(_HEAD, sliding_window=WINDOW),
    "qwen2": _BASE,
    "qwen2-sliding": dict(
        _BASE,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3": _HEAD,
    "gemma": _HEAD,
    "gemma2": dict(_HEAD, **_MIXED, query_pre_attn_scalar=16),
    "gemma3_text": dict(_HEAD, **_MIXED, query_pre_attn_scalar=16),
    "phi": dict(_BASE, **_PARTIAL_ROPE),
    "phi3": dict(_BASE, sliding_window=None, original_max_position_embeddings=512),
    "phi3-sliding": dict(_BASE, sliding_window=WINDOW, original_max_position_embeddings=512),
    "olmo2": _BASE,
    "olmo3": dict(_BASE, **_MIXED),
    "granite": dict(_BASE, attention_multiplier=0.25, embedding_multiplier=2.0, logits_scaling=2.0),
    "cohere": dict(_BASE, logit_scale=1.0),
    "cohere2": dict(_BASE, **_MIXED, logit_scale=1.0),
    "starcoder2": dict(_BASE, sliding_window=None),
    "starcoder2-sliding": dict(_BASE, sliding_window=WINDOW),
    "gpt_neox": dict(
        _MHA,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
    ),
    "gpt2": dict(
        _COMMON,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=INIT_RANGE,
    ),
    "opt": dict(
        _COMMON,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        init_std=INIT_RANGE,
    ),
    "stablelm": dict(_BASE, **_PARTIAL_ROPE),
    "mixtral": dict(_HEAD, **_MIXTRAL, sliding_window=None),
    "mixtral-sliding": dict(_HEAD, **_MIXTRAL, sliding_window=WINDOW),
    "qwen2_moe": dict(_BASE, **_QWEN_MOE, shared_expert_intermediate_size=32),
    "qwen3_moe": dict(_HEAD, **_QWEN_MOE),
    "gpt_oss": dict(
        _HEAD,
        **_MIXED,
        **_MIXTRAL,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "glm": dict(_HEAD, **_PARTIAL_ROPE),
    "glm4": dict(_HEAD, **_PARTIAL_ROPE),
    "smollm3": dict(_BASE, num_hidden_layers=4, no_rope_layer_interval=2),
    "ministral": dict(_HEAD, **_MIXED),
    "exaone4": dict(_BASE, **_MIXED),
    "helium": _HEAD,
    "nemotron": dict(_HEAD, **_PARTIAL_ROPE),
    "seed_oss": _HEAD,
    "arcee": _HEAD,
    "ernie4_5": _HEAD,
    "hunyuan_v1_dense": _HEAD,
}

_LATENT = dict(
    _BASE,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_ENCODER_DECODER = dict(
    _COMMON,
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
)

REFUSED: dict[str, dict[str, Any]] = {
    "bart": _ENCODER_DECODER,
    "t5": dict(_COMMON, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
    "bloom": dict(_COMMON, hidden_size=64, n_layer=2, n_head=4),
    "mpt": dict(_COMMON, d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=512),
    "falcon-alibi": dict(_MHA, alibi=True),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "mamba": dict(_COMMON, hidden_size=64, num_hidden_layers=2, state_size=8),
    "mamba2": dict(
        _COMMON,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=1,
    ),
    "rwkv": dict(_COMMON, hidden_size=64, num_hidden_layers=2, context_length=512),
    "qwen3_next": dict(
        _HEAD,
        **_QWEN_MOE,
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
    ),
    "jamba": dict(_BASE, num_experts=4, num_experts_per_tok=2, use_mamba_kernels=False),
    "bamba": dict(_BASE, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8),
    "falcon_h1": dict(_HEAD, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    "zamba2": dict(
        _MHA,
        layer_types=["linear_attention", "hybrid"],
        hybrid_layer_ids=[1],
        mamba_d_state=8,
        mamba_headdim=16,
        mamba_ngroups=1,
    ),
    "minimax": dict(_HEAD, **_MIXTRAL),
    "lfm2": dict(
        _BASE,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
    "granitemoehybrid": dict(
        _BASE,
        layer_types=["mamba", "attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "recurrent_gemma": dict(_HEAD, lru_width=64, num_hidden_layers=3),
    "nemotron_h": dict(_BASE),
    "xlstm": dict(_COMMON, hidden_size=64, num_blocks=2, num_heads=4),
    "gemma3n_text": dict(
        _HEAD,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}


def model_type(name: str) -> str:
    """``"mistral-sliding"`` -> ``"mistral"``."""
    return name.partition("-")[0]


def config(name: str) -> Any:
    """The transformers config of a name in ``SUPPORTED`` or ``REFUSED``."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type(name), **{**SUPPORTED, **REFUSED}[name])


def build(name: str, seed: int = 0, attn_implementation: str = "eager") -> Any:
    """A tiny model, eval mode, float32, whose weights depend on the name and the seed only."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)  # for what _randomise leaves alone
    model = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32, attn_implementation=attn_implementation)
    _randomise(model, seed)
    return model.eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    # Several architectures ignore initializer_range or start biases and sinks at zero, where a lost bias would not
    # show: everything except the norms is drawn anew.
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            drawn.update(id(parameter) for parameter in module.parameters(recurse=False))
    for _, parameter in sorted(model.named_parameters()):
        if id(parameter) not in drawn:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_RANGE)
            drawn.add(id(parameter))
