"""What a chat template writes before and after a user's message."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

_SENTINEL = "kvbench5c1fsentinel"
_DATE = datetime.datetime(2024, 7, 26)  # some templates print today's date; a prompt must not change overnight
# Put before templates that ask for the clock: a macro of that name hides transformers' function, which cannot be
# replaced by an argument.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('%{code}', '{_DATE.strftime('%' + code)}')" for code in "dmybBYAaHMSj")
    + " }}{%- endmacro -%}"
)


@dataclass(frozen=True)
class ChatParts:
    """A rendered template cut at the user's message, which never passes through the template itself.

    Separators in the rendered text would be found in contexts that happen to contain them; a message of our own is
    rendered instead, alone.
    """

    head: str
    tail: str
    strips_left: bool  # the template strips white space at the message's start ...
    strips_right: bool  # ... and at its end


def split_template(tokenizer: Any, template_kwargs: dict[str, Any]) -> ChatParts:
    """Render one user message and cut the result around it. InputError if the template hides or repeats it."""
    head, tail = _render(tokenizer, template_kwargs, _SENTINEL)
    spaced_head, spaced_tail = _render(tokenizer, template_kwargs, f" \n{_SENTINEL}\n ")
    return ChatParts(
        head=head,
        tail=tail,
        strips_left=not spaced_head.endswith(" \n") or spaced_head == head,
        strips_right=not spaced_tail.startswith("\n ") or spaced_tail == tail,
    )


def template_hash(tokenizer: Any, template_kwargs: dict[str, Any]) -> str:
    """Hash of everything that decides how a prompt is wrapped."""
    value = json.dumps([tokenizer.chat_template, template_kwargs, _DATE.isoformat()], sort_keys=True, default=str)
    return hashlib.sha256(value.encode()).hexdigest()


def _render(tokenizer: Any, template_kwargs: dict[str, Any], content: str) -> tuple[str, str]:
    values = {"date_string": _DATE.strftime("%d %b %Y"), **template_kwargs}
    try:
        template = tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=_CLOCK + template if "strftime_now" in template else template,
            tokenize=False,
            add_generation_prompt=True,
            **values,
        )
    except Exception as error:  # a template is a program: it can raise anything
        raise InputError(
            "model.chat_template", _short(tokenizer.chat_template), f"cannot be rendered: {error}.",
            "Set model.chat_template to a working one, or model.chat=false.",
        ) from error  # fmt: skip
    if text.count(_SENTINEL) != 1:
        raise InputError(
            "model.chat_template", _short(tokenizer.chat_template),
            f"prints the user's message {text.count(_SENTINEL)} times instead of once.",
            "Set model.chat_template to another one, or model.chat=false.",
        )  # fmt: skip
    head, _, tail = text.partition(_SENTINEL)
    return head, tail


def _short(template: Any) -> str:
    text = " ".join(str(template).split())
    return text if len(text) <= 60 else text[:57] + "..."
