"""Turning pieces of one prompt into token ids, piece by piece.

A prompt is tokenised in segments so that the ids of the context never depend on the question. Three things would
make the joined segments differ from a prompt that was written in one go, and are dealt with here: a beginning-of-text
token (exactly one), the blank that SentencePiece-like tokenizers put in front of every text, and words in the user's
text that spell a special token (they stay text).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

# Texts put before a segment and cut off again as ids. Which one stays a token of its own depends on the tokenizer
# and on the text that follows, so several are tried.
_ANCHORS = ("\n", "=", "x", ".", "~", "|", "1", "\x01")


@dataclass(frozen=True)
class Encoded:
    """Ids of one segment with the character span each came from (empty if offsets were not asked for)."""

    ids: list[int]
    starts: list[int]  # character offset of each id's first character; non-decreasing
    ends: list[int]


class SegmentTokenizer:
    """Encodes segments of a prompt with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefix = self._default_prefix()
        self._adds_blank = self._detect_blank()
        self._control = self._control_tokens()

    def markup(self, text: str, first: bool = False) -> list[int]:
        """Ids of template text: special tokens in it are special. ``first``: nothing stands before it."""
        if not text:
            return []
        if first or not self._adds_blank:
            return self._encode(text, special=True).ids
        return self._after_anchor(text, special=True, offsets=False).ids

    def text(self, text: str, first: bool = False, offsets: bool = False) -> Encoded:
        """Ids of a user's text: nothing in it is ever a special token. ``first``: nothing stands before it."""
        if not text:
            return Encoded([], [], [])
        if first or not self._adds_blank:
            encoded = self._encode(text, special=False, offsets=offsets)
        else:
            encoded = self._after_anchor(text, special=False, offsets=offsets)
        if self._control.keys().isdisjoint(encoded.ids):
            return encoded
        return self._broken_up(text, set(encoded.ids), first, offsets)

    def with_prefix(self, ids: list[int]) -> list[int]:
        """``ids`` behind the tokens that the tokenizer puts before every text, unless they are there already."""
        if not self.prefix or ids[: len(self.prefix)] == self.prefix or ids[:1] == self.prefix[:1]:
            return ids
        return [*self.prefix, *ids]

    def _encode(self, text: str, special: bool, offsets: bool = False) -> Encoded:
        if offsets and not self.tokenizer.is_fast:
            raise InputError(
                "model.path", type(self.tokenizer).__name__, "is a slow tokenizer without character offsets.",
                "Truncating a document needs a fast one: save tokenizer.json beside the model.",
            )  # fmt: skip
        output = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=not special,
            return_offsets_mapping=offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about texts longer than the window: cutting them is our job
        )
        spans = output["offset_mapping"] if offsets else []
        return Encoded(list(output["input_ids"]), [span[0] for span in spans], [span[1] for span in spans])

    def _after_anchor(self, text: str, special: bool, offsets: bool) -> Encoded:
        """Encode as if other text stood before it, so that no blank is put in front."""
        for anchor in _ANCHORS:
            alone = self._encode(anchor, special=False).ids
            joined = self._encode(anchor + text, special, offsets=self.tokenizer.is_fast)
            cut = len(alone)
            if joined.ids[:cut] != alone or (
                joined.starts and (max(joined.ends[:cut], default=0) > len(anchor) or _at(joined, cut) < len(anchor))
            ):
                continue
            shift = len(anchor)
            return Encoded(
                joined.ids[cut:],
                [start - shift for start in joined.starts[cut:]] if offsets else [],
                [end - shift for end in joined.ends[cut:]] if offsets else [],
            )
        return self._encode(text, special, offsets)  # no anchor stays apart from this text: a blank does no harm

    def _broken_up(self, text: str, ids: set[int], first: bool, offsets: bool) -> Encoded:
        """For tokenizers that parse special tokens whatever they are told: cut each one after its first character."""
        spelled = [re.escape(self._control[token]) for token in ids & self._control.keys()]
        cuts = [match.start() + 1 for match in re.finditer("|".join(sorted(spelled, key=len, reverse=True)), text)]
        parts, begin = Encoded([], [], []), 0
        for end in [*cuts, len(text)]:
            piece = text[begin:end]
            if (begin == 0 and first) or not self._adds_blank:
                encoded = self._encode(piece, special=False, offsets=offsets)
            else:
                encoded = self._after_anchor(piece, special=False, offsets=offsets)
            parts.ids.extend(encoded.ids)
            parts.starts.extend(start + begin for start in encoded.starts)
            parts.ends.extend(stop + begin for stop in encoded.ends)
            begin = end
        return parts

    def _default_prefix(self) -> list[int]:
        """What encoding puts before a text (usually BOS), seen in its output: some tokenizers ignore their flags."""
        bare = self.tokenizer.encode("a", add_special_tokens=False)
        full = self.tokenizer.encode("a")
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        empty = self.tokenizer.encode("")
        return empty if empty and empty[0] == self.tokenizer.bos_token_id else []

    def _detect_blank(self) -> bool:
        plain = self._encode("a", special=False).ids
        for anchor in _ANCHORS:
            alone = self._encode(anchor, special=False).ids
            joined = self._encode(anchor + "a", special=False).ids
            if joined[: len(alone)] == alone and len(joined) > len(alone):
                return joined[len(alone) :] != plain
        return False

    def _control_tokens(self) -> dict[int, str]:
        """Ids that steer the model, with their spelling. Unknown characters legitimately become the unknown token."""
        tokenizer = self.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token: content.content for token, content in added.items() if content.special}
        named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        return {token: str(name) for token, name in {**named, **special}.items() if token != tokenizer.unk_token_id}


def _at(encoded: Encoded, index: int) -> int:
    """Start of the id at ``index``; beyond the last one, the end of the text."""
    return encoded.starts[index] if index < len(encoded.starts) else encoded.ends[-1]
