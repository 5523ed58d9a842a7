"""Which architectures kvbench can measure, and why the others are refused before any weights load.

A compression method here chooses among stored keys and values of past tokens. That needs a decoder whose layers
keep one key and one value per token and KV head and reach them through transformers' attention interface. What a
config cannot tell (an attention class that never calls the interface) is left to the engine's start-up self-test.
"""

from __future__ import annotations

from typing import Any

from ..errors import InputError

ATTENTION_KINDS = {"full_attention", "sliding_attention"}

_ALIBI = "adds ALiBi biases inside its own attention, so evicted entries cannot be left out"
_LATENT = "caches a latent vector per token (multi-head latent attention), not a key and a value per KV head"
_RECURRENT = "keeps recurrent or convolutional state, which has no entries that could be evicted"
_ENCODER = "is an encoder that reads its text in both directions; it has no KV cache to compress"
_SHARED = "has layers that reuse another layer's keys and values, so evicting in one changes several"

_LATENT_NAMES = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm_moe_dsa",
    "hy_v4", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "sarvam_mla", "youtu", "dots3_note",
    "dots3_note_text",
)  # fmt: skip
_RECURRENT_NAMES = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
_ENCODER_NAMES = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod",
)  # fmt: skip

_BY_NAME: dict[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(_LATENT_NAMES, _LATENT),
    **dict.fromkeys(_RECURRENT_NAMES, _RECURRENT),
    **dict.fromkeys(_ENCODER_NAMES, _ENCODER),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _SHARED),
}
_STATE_ATTRIBUTES = (
    "mamba_d_state", "ssm_state_size", "state_size", "conv_L_cache", "lru_width", "linear_conv_kernel_dim"
)  # fmt: skip
_STATE_KINDS = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}


class UnsupportedModel(InputError):
    """A model whose cache is not keys and values of past tokens; names the model_type and the reason."""


def refuse(config: Any, key: str = "model.path", value: Any = None) -> None:
    """Return if the engine may try this transformers config; raise UnsupportedModel by name if it cannot work."""
    reason = why_unsupported(config)
    if reason is not None:
        name = config.model_type
        raise UnsupportedModel(
            key,
            name if value is None else value,
            f"model_type {name!r} {reason}.",
            "Use a decoder-only model with ordinary attention (llama, mistral, qwen2, qwen3, gemma, phi ...).",
        )


def why_unsupported(config: Any) -> str | None:
    """The reason as the rest of a sentence that begins with the model's name; None if nothing speaks against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder; kvbench measures decoder-only models"
    for name in (config.model_type, _text(config).model_type):
        if name in _BY_NAME:
            return _BY_NAME[name]
    text = _text(config)
    if config.model_type == "falcon" and text.alibi:
        return _ALIBI
    if _attribute(text, "kv_lora_rank"):
        return _LATENT
    kinds = set(_attribute(text, "layer_types") or ())
    if kinds & _STATE_KINDS or any(_attribute(text, name) for name in _STATE_ATTRIBUTES):
        return _RECURRENT
    if _attribute(text, "num_kv_shared_layers"):
        return _SHARED
    if kinds - ATTENTION_KINDS:
        return f"has layers of a kind the engine does not know: {', '.join(sorted(kinds - ATTENTION_KINDS))}"
    if _attribute(text, "attention_chunk_size"):
        return "attends within chunks, which the engine's causal mask does not express"
    if _attribute(text, "use_bidirectional_attention"):
        return "attends in both directions over some tokens, which a causal cache does not express"
    if not _is_causal_lm(config):
        return "is not registered in transformers as a causal language model"
    return None


def _text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # several text parts: none is *the* decoder
        return config


def _attribute(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own error for attributes that differ between layers: then it is set
        return True


def _is_causal_lm(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return remote or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
