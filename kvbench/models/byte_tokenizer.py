"""A tokenizer that needs no files: one token per byte, a few special tokens and a small chat template.

Models with random weights use it, so that every command works without a network.
"""

from __future__ import annotations

from typing import Any

BOS, EOS, TURN, TURN_END = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, TURN, TURN_END)
SIZE = 256 + len(SPECIALS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_byte_tokenizer(template: str | None = TEMPLATE, window: int | None = None) -> Any:
    """A fast transformers tokenizer: id b is byte b, ids 256.. are ``SPECIALS``; BOS is prepended by default."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[TURN, TURN_END],
        clean_up_tokenization_spaces=False,
        **({} if window is None else {"model_max_length": window}),
    )
    fast.chat_template = template
    return fast


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]
