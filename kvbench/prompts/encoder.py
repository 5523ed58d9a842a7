"""Samples to prompts: two segments of ids, cut to length without touching the question."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import SampleError
from .segments import Encoded, SegmentTokenizer
from .template import ChatParts, split_template, template_hash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..tasks.sample import Sample

_NO_CHAT = ChatParts("", "", False, False)


@dataclass(frozen=True)
class Prompt:
    """What the model reads: ``context_ids`` then ``question_ids``. Both protocols feed exactly these ids."""

    context_ids: tuple[int, ...]  # BOS, template head, instruction, document
    question_ids: tuple[int, ...]  # question, template tail, first words of the answer; never empty
    tail_tokens: int  # how many of the question ids at the end are template tail and answer prefix
    truncated_tokens: int  # ids taken out of the document
    answer_survived: bool | None  # is a gold answer still in the document? None: nothing cut, or it was never there
    text: str  # the ids, decoded with their special tokens


class PromptEncoder:
    """Encodes samples with one model's tokenizer and chat template.

    ``chat=False`` (or a tokenizer without a template) means that no prompt is ever wrapped.
    """

    def __init__(self, tokenizer: Any, chat: bool = True, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = chat and bool(getattr(tokenizer, "chat_template", None))
        self._template_kwargs = dict(template_kwargs or {})
        self._segments = SegmentTokenizer(tokenizer)

    def effective_chat(self, task_chat: bool) -> bool:
        """Is a prompt of a task that allows (or forbids) the template wrapped?"""
        return task_chat and self.chat

    def encode(
        self,
        sample: Sample,
        chat: bool,
        limit: int,
        truncation: str = "document",
        official_max_length: int | None = None,
        reserve_question_tokens: int = 0,
    ) -> Prompt:
        """The prompt of a sample in at most ``limit`` ids; SampleError if it cannot be made.

        ``truncation="document"`` cuts the document's middle. ``"official"`` is LongBench's own rule and knows
        ``official_max_length`` only: it takes no account of ``limit``. Questions that share a context pass the
        longest one's length as ``reserve_question_tokens``, so that all of them see the same context ids.
        """
        parts = self._parts(chat)
        instruction, context, question, prefix = (
            clean(text) for text in (sample.instruction, sample.context, sample.question, sample.answer_prefix)
        )
        if truncation == "official":
            text, question, removed = self._official(instruction + context, question, official_max_length)
            survived = _survived(sample.answers, context, [text]) if removed else None
            question_ids, tail = self._question(question, prefix, parts)
            context_ids = [*self._opening(parts), *self._document(text, parts, offsets=False).ids]
            return self._prompt(context_ids, question_ids, tail, removed, survived)
        question_ids, tail = self._question(question, prefix, parts)
        room = limit - max(len(question_ids), reserve_question_tokens)
        context_ids, removed, survived = self._cut_document(instruction, context, sample.answers, room, parts)
        return self._prompt(context_ids, question_ids, tail, removed, survived)

    def question_ids(self, question: str, answer_prefix: str, chat: bool) -> tuple[int, ...]:
        """Ids of a question segment; they do not depend on the context before it."""
        return tuple(self._question(clean(question), clean(answer_prefix), self._parts(chat))[0])

    def count(self, sample: Sample, chat: bool) -> int:
        """Length of the whole prompt in ids, untruncated."""
        parts = self._parts(chat)
        text = clean(sample.instruction) + clean(sample.context)
        context = [*self._opening(parts), *self._document(text, parts, offsets=False).ids]
        return len(context) + len(self.question_ids(sample.question, sample.answer_prefix, chat))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of an answer, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def newline_ids(self) -> frozenset[int]:
        """The id that ends an answer in tasks that stop at a newline, as LongBench finds it."""
        return frozenset(self.tokenizer.encode("\n", add_special_tokens=False)[-1:])

    def template_sha256(self, chat: bool) -> str:
        """Hash of the template in use; the hash of nothing where prompts are not wrapped."""
        if not self.effective_chat(chat):
            return hashlib.sha256(b"").hexdigest()
        return template_hash(self.tokenizer, self._template_kwargs)

    @cached_property
    def _chat_parts(self) -> ChatParts:
        return split_template(self.tokenizer, self._template_kwargs)

    def _parts(self, chat: bool) -> ChatParts:
        return self._chat_parts if self.effective_chat(chat) else _NO_CHAT

    def _opening(self, parts: ChatParts) -> list[int]:
        return self._segments.with_prefix(self._segments.markup(parts.head, first=True))

    def _document(self, text: str, parts: ChatParts, offsets: bool) -> Encoded:
        text = text.lstrip() if parts.strips_left else text
        return self._segments.text(text, first=not parts.head, offsets=offsets)

    def _question(self, question: str, answer_prefix: str, parts: ChatParts) -> tuple[list[int], int]:
        question = question.rstrip() if parts.strips_right else question
        tail = [*self._segments.markup(parts.tail), *self._segments.text(answer_prefix).ids]
        return [*self._segments.text(question).ids, *tail], len(tail)

    def _cut_document(
        self, instruction: str, context: str, answers: tuple[str, ...], room: int, parts: ChatParts
    ) -> tuple[list[int], int, bool | None]:
        """Context ids in at most ``room``, how many were removed, and whether an answer is still there."""
        opening = self._opening(parts)
        text = instruction + context
        plain = self._document(text, parts, offsets=False)
        excess = len(opening) + len(plain.ids) - room
        if excess <= 0:
            return [*opening, *plain.ids], 0, None
        encoded = self._document(text, parts, offsets=True)
        stripped = len(text) - len(text.lstrip()) if parts.strips_left else 0
        border = max(0, len(instruction) - stripped)  # in characters of what was encoded
        text = text[stripped:]
        # An id that covers the border's both sides belongs to the instruction: it is kept whole.
        first = next((index for index, start in enumerate(encoded.starts) if start >= border), len(encoded.ids))
        kept = len(encoded.ids) - first - excess
        if kept < 0:
            raise SampleError(
                f"the prompt does not fit: without its document it still has {len(opening) + first} ids before the "
                f"question, and there is room for {max(room, 0)}. Raise max_prompt_tokens or lower max_new_tokens."
            )
        left, right = first + (kept + 1) // 2, len(encoded.ids) - kept // 2
        halves = [text[border : encoded.ends[left - 1] if left > first else border]]
        halves.append(text[encoded.starts[right] :] if right < len(encoded.ids) else "")
        ids = [*opening, *encoded.ids[:left], *encoded.ids[right:]]
        return ids, excess, _survived(answers, context, halves)

    def _official(self, document: str, question: str, max_length: int | None) -> tuple[str, str, int]:
        """LongBench's rule: (text before the question, question, ids removed) of the bare, unwrapped prompt."""
        if max_length is None:
            raise SampleError(
                "truncation=official needs model.official_max_length, the length this model's prompts are cut to."
            )
        ids = self.tokenizer.encode(document + question, verbose=False)
        if len(ids) <= max_length:
            return document, question, 0
        half = max_length // 2
        text = self.decode(ids[:half]) + self.decode(ids[len(ids) - half :])
        at = text.rfind(question)
        if at < 0:
            raise SampleError(
                f"truncation=official (model.official_max_length={max_length}) cut or changed the question."
            )
        return text[:at], text[at:], len(ids) - 2 * half

    def _prompt(
        self, context: list[int], question: list[int], tail: int, removed: int, survived: bool | None
    ) -> Prompt:
        if not question:
            if not context:
                raise SampleError("the prompt is empty: no context, no question, no template.")
            context, question = context[:-1], context[-1:]  # something must be fed after the context
        text = self.tokenizer.decode([*context, *question], skip_special_tokens=False)
        return Prompt(tuple(context), tuple(question), tail, removed, survived, text)


def clean(text: str) -> str:
    """The text with lone surrogates (half a character) replaced, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _survived(answers: tuple[str, ...], document: str, kept: list[str]) -> bool | None:
    """Is a gold answer still in one of the kept pieces? None if it never was in the document."""
    present = [answer for answer in answers if answer and answer in document]
    return any(answer in piece for answer in present for piece in kept) if present else None
