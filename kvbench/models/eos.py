"""The ids that end an answer: what the tokenizer, the generation config, the config and the chat template say."""

from __future__ import annotations

from typing import Any

_QUESTION, _ANSWER = "kvbenchquestion", "kvbenchanswer"


def eos_ids(tokenizer: Any, config: Any, generation_config: Any, template_kwargs: dict[str, Any]) -> frozenset[int]:
    """Union of every end id that a source names; generation stops on any of them."""
    found: set[int] = set()
    texts = {id(part): part for part in (config, _text_config(config)) if part is not None}
    for owner in (tokenizer, generation_config, *texts.values()):
        value = getattr(owner, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    end_of_turn = template_end_of_turn(tokenizer, template_kwargs)
    return frozenset(found if end_of_turn is None else found | {end_of_turn})


def template_end_of_turn(tokenizer: Any, template_kwargs: dict[str, Any]) -> int | None:
    """The first special token that the chat template prints after an assistant's answer, or None.

    Some models end their turn with a token that no config calls EOS (Llama 3's ``<|eot_id|>``).
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
    except Exception:  # templates are programs and may refuse a conversation; then there is nothing to learn here
        return None
    head, _, rest = text.partition(_QUESTION)
    _, answered, tail = rest.rpartition(_ANSWER)
    if not answered:
        return None
    special = _special_ids(tokenizer)
    opening = {*_ids(tokenizer, head), tokenizer.bos_token_id}  # a marker that opens a turn does not end one
    return next((token for token in _ids(tokenizer, tail) if token in special and token not in opening), None)


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, content in added.items() if content.special)}


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:
        return None
