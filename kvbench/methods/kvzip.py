"""KVzip (arXiv 2505.23416): entries that the model looks at when it repeats its context are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvbench.checks import check_whole
from kvbench.engine.attention import AttentionOptions, causal_attention
from kvbench.engine.capture import Capture, LayerCapture, Needs, weight_blocks
from kvbench.errors import InputError

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup

KEY = "method.scorer"
LAST_TOKENS = 8  # of the chunk before, by which a later chunk is asked for (as in the published code)


@dataclass(frozen=True)
class KVzip:
    """The largest attention weight that an entry gets while the context is repeated behind itself (section 3).

    The text after the first ``sinks`` tokens is cut into chunks of ``chunk`` tokens. For each, the model reads an
    instruction to repeat (``ask`` for the first, ``go_on``, which quotes the last words before the chunk, for the
    others), as a question is put to it, and then the chunk's own tokens, with the whole uncompressed cache before
    them. An entry of the chunk gets the maximum, over these queries and over the query heads of its KV head, of a
    softmax over sinks, chunk and the tokens read (fp32). One more pass over the text is what that costs.

    Sinks get 1, and are protected by the method. Deviations: chunks start behind the sinks (the published code: behind
    the template's head, whose tokens that are no sinks score 0). ``ask`` is worded as in the paper (table 2), ``go_on``
    in our own words; the code has "Repeat the previous context exactly." and "Repeat the part of the previous context
    exactly, starting with", and a newline after them where there is no chat template. The softmax is in fp32 (the
    code: model dtype). In the aware and swapped protocols the question is part of what is repeated.
    """

    chunk: int = 2048
    sinks: int = 4
    ask: str = "\n\nRepeat the previous context:"
    go_on: str = "\n\nRepeat the previous context starting with {last}:"
    setup: Setup | None = field(default=None, repr=False, compare=False)  # set by ``prepared``

    def __post_init__(self) -> None:
        check_whole(f"{KEY}.chunk", self.chunk, 1)
        check_whole(f"{KEY}.sinks", self.sinks, 0)
        for name in ("ask", "go_on"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{KEY}.{name}", getattr(self, name), "is not a text.", 'Nothing is "".')

    @property
    def needs(self) -> Needs:
        return Needs()

    def prepared(self, setup: Setup) -> KVzip:
        """With the model that repeats."""
        return replace(self, setup=setup)

    def of_capture(self, capture: Capture) -> dict[int, torch.Tensor]:
        """Scores, fp32 [kv_heads, n], of every layer that is no sliding-window layer."""
        assert self.setup is not None
        whole = [layer for layer in capture.layers if layer.options.sliding_window is None]
        scores = {la.index: torch.ones(la.keys.shape[:2], device=la.keys.device) for la in whole}
        for start in range(self.sinks, capture.tokens, self.chunk):
            stop = min(start + self.chunk, capture.tokens)
            repeated = Repetition(capture, self.sinks, start, stop)
            asked = self.instruction(capture.ids, start)
            self.setup.engine.read(repeated, (*asked, *capture.ids[start:stop]), capture.tokens)
            for index, found in repeated.scores.items():
                scores[index][:, start:stop] = found
        return scores

    def instruction(self, ids: Sequence[int], start: int) -> tuple[int, ...]:
        """Ids of the instruction to repeat the chunk that begins at ``start``."""
        assert self.setup is not None
        text = self.ask
        if start > self.sinks:
            text = self.go_on.replace("{last}", self.setup.encoder.decode(ids[max(0, start - LAST_TOKENS) : start]))
        return self.setup.encoder.question_ids(text, "", self.setup.chat)


class Repetition:
    """A pass over an instruction and a chunk behind an uncompressed capture, which scores the chunk's entries."""

    def __init__(self, capture: Capture, sinks: int, start: int, stop: int) -> None:
        self.before = {layer.index: layer for layer in capture.layers}
        self.sinks, self.start, self.stop = sinks, start, stop
        self.scores: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        before = self.before[layer]
        if options.sliding_window is None:
            self.scores[layer] = chunk_scores(before, query[0], key[0], self.sinks, self.start, self.stop)
        keys = torch.cat([before.keys, key[0]], dim=1)[None]
        values = torch.cat([before.values, value[0]], dim=1)[None]
        return causal_attention(query, keys, values, options)


def chunk_scores(
    layer: LayerCapture, query: torch.Tensor, key: torch.Tensor, sinks: int, start: int, stop: int
) -> torch.Tensor:
    """fp32 [kv_heads, stop - start]: the largest weight that each entry from ``start`` to ``stop`` gets.

    query [query_heads, q, dim] and key [kv_heads, q, dim] are those of the tokens that repeat the chunk.
    """
    keys = torch.cat([layer.keys[:, :sinks], layer.keys[:, start:stop], key], dim=1)
    best = torch.zeros(keys.shape[0], stop - start, device=keys.device)
    for weights in weight_blocks(query, keys, layer.options):
        best = torch.maximum(best, weights[..., sinks : sinks + stop - start].amax((1, 2)))
    return best
