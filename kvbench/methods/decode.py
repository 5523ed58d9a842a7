"""Decode rules: what a method evicts after every decode step, once its cache is full."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.engine.attention import attention_weights
from kvbench.engine.capture import LayerCapture
from kvbench.errors import InputError
from kvbench.methods.selection import Protect

WHEN = ("evicted", "always")
# evicted: the rule runs where prefill had to evict; always: also where the prompt fitted the budget, once the answer
# makes the cache exceed it (as the papers' code; a budget of the whole prompt is then no longer the full cache)


@dataclass(frozen=True)
class HeavyHitters:
    """H2O (arXiv 2306.14048, algorithm 1): scores are the attention received so far, accumulated in fp32.

    Half of the limit is for heavy hitters, half for the most recent entries, of which the newest is never evicted.
    ``group`` reduces a step's weights over the query heads of a KV head (the original code has no grouped queries).
    """

    group: str = "mean"  # mean | max | sum
    when: str = "evicted"
    observes = True

    def __post_init__(self) -> None:
        check_when(self.when)

    def start(self, layer: LayerCapture, scores: torch.Tensor, fed_again: int) -> torch.Tensor:
        """Scores [kv_heads, n] at the end of prefill; the last ``fed_again`` tokens' own votes will come again."""
        if not fed_again:
            return scores
        last = attention_weights(layer.window_queries[:, -fed_again:], layer.keys, layer.options)
        return scores - reduce_heads(last.sum(2), self.group)

    def update(self, carried: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return carried + reduce_heads(weights.sum(2), self.group)

    def protect(self, protect: Protect, count: int, limit: int) -> Protect:
        """The recent window grows by what is kept on top of the budget; the heavy hitters stay as many as they are."""
        heavy = count - protect.of(count).recent
        return Protect(protect.sinks, max(1, limit - heavy))


@dataclass(frozen=True)
class LastQuery:
    """TOVA (arXiv 2401.06104): at every step the entry that the newest query attends to least goes.

    ``heads``: ``all`` averages over all query heads (one set per layer, as in the paper), ``kv`` within each KV head's
    group. Deviation: the newest entry itself is never evicted.
    """

    heads: str = "all"  # all | kv
    when: str = "evicted"
    observes = True

    def __post_init__(self) -> None:
        check_when(self.when)

    def start(self, layer: LayerCapture, scores: torch.Tensor, fed_again: int) -> torch.Tensor:
        return scores

    def update(self, carried: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        last = weights[:, :, -1]  # [kv_heads, group, n]
        return last.mean((0, 1)).expand_as(carried).contiguous() if self.heads == "all" else last.mean(1)

    def protect(self, protect: Protect, count: int, limit: int) -> Protect:
        return Protect(protect.sinks, max(1, protect.recent))


@dataclass(frozen=True)
class Rolling:
    """StreamingLLM (arXiv 2309.17453): the sinks stay, the oldest of the others goes.

    ``schedule``: ``each_step`` evicts after every token (attention sees limit + 1 entries; the authors' perplexity
    script); ``room`` takes the room that the answer will need off the budget beforehand and evicts no more (their chat
    script, ``evict_for_space``).
    """

    schedule: str = "each_step"  # each_step | room
    when: str = "evicted"
    observes = False

    def __post_init__(self) -> None:
        check_when(self.when)
        if self.schedule not in ("each_step", "room"):
            raise InputError("method.schedule", self.schedule, "is no schedule.", "Allowed: each_step, room.")

    def start(self, layer: LayerCapture, scores: torch.Tensor, fed_again: int) -> torch.Tensor:
        return scores

    def update(self, carried: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return carried

    def protect(self, protect: Protect, count: int, limit: int) -> Protect:
        return Protect(min(protect.sinks, limit - 1), max(1, limit - protect.sinks))


DecodeRule = HeavyHitters | LastQuery | Rolling


def check_when(when: str) -> None:
    if when not in WHEN:
        raise InputError("method.decode.when", when, "is not a time.", f"Allowed: {', '.join(WHEN)}.")


def reduce_heads(scores: torch.Tensor, how: str) -> torch.Tensor:
    """[kv_heads, group, n] -> [kv_heads, n]: mean, max or sum over the query heads that share a KV head."""
    return {"mean": lambda: scores.mean(1), "max": lambda: scores.amax(1), "sum": lambda: scores.sum(1)}[how]()
