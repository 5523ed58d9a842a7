"""Scorers: the capture of a layer -> importance per KV head and token, [kv_heads, n]; higher is kept.

A scorer is a frozen dataclass with ``needs`` (what prefill must observe for it beside keys and values) and
``__call__(layer)``. Scores are fp32. What must survive whatever the scores are (sinks, a recent window) is not a matter
of scores: it is protected by index, see ``kvbench.methods.selection``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from kvbench.engine.attention import attention_weights
from kvbench.engine.capture import Capture, LayerCapture, Needs
from kvbench.methods.decode import reduce_heads


class Scorer(Protocol):
    """What a method needs of its scorer."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, layer: LayerCapture) -> torch.Tensor: ...


@runtime_checkable
class CaptureScorer(Protocol):
    """A scorer that looks at all layers at once (one that runs the model again, say)."""

    @property
    def needs(self) -> Needs: ...

    def of_capture(self, capture: Capture) -> Mapping[int, torch.Tensor]:
        """Scores, fp32 [kv_heads, n], of every layer that is no sliding-window layer."""
        ...


def window_attention(layer: LayerCapture, window: int) -> torch.Tensor:
    """Attention weights of the last ``window`` queries over all keys: [kv_heads, group, w, n], fp32, w <= window."""
    queries = layer.window_queries[:, max(0, layer.window_queries.shape[1] - window) :]
    return attention_weights(queries, layer.keys, layer.options)


@dataclass(frozen=True)
class SnapKV:
    """Votes of the last ``window`` queries, pooled along the tokens (SnapKV, arXiv 2404.14469, section 4).

    The weights of the window's queries over the prefix are summed over the window, reduced over the query heads of
    each KV head, then pooled with stride 1. The window's own positions get score 0: the method protects them.

    Deviations from the published code: votes are summed in fp32 (the code casts the weights to the model's dtype first,
    which makes ties); selection is per KV head (the code repeats keys and selects per query head; equal without grouped
    queries); even kernels are refused (there they misalign scores by one).
    """

    window: int = 32
    kernel: int = 7
    pooling: str = "max"  # max | avg | none
    group: str = "mean"  # mean | max | sum

    @property
    def needs(self) -> Needs:
        return Needs(query_window=self.window)

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        weights = window_attention(layer, self.window)  # [kv_heads, group, w, n]
        prefix = layer.tokens - weights.shape[2]
        votes = reduce_heads(weights[..., :prefix].sum(2), self.group)  # [kv_heads, prefix]
        return F.pad(pool(votes, self.kernel, self.pooling), (0, layer.tokens - prefix))


def pool(scores: torch.Tensor, kernel: int, pooling: str) -> torch.Tensor:
    """Pooling [heads, n] -> [heads, n], odd kernel, stride 1; average pooling counts the zero padding at the edges."""
    if pooling == "none" or kernel == 1 or scores.shape[1] == 0:
        return scores
    apply = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return apply(scores[None], kernel, stride=1, padding=kernel // 2)[0]


@dataclass(frozen=True)
class Tova:
    """The last query's attention weights (TOVA, arXiv 2401.06104).

    ``heads='all'`` averages over all query heads, so that every KV head keeps the same tokens (the paper's choice per
    layer); ``heads='kv'`` averages within each KV head's group. The newest token is protected by the method.
    """

    heads: str = "all"  # all | kv

    @property
    def needs(self) -> Needs:
        return Needs(query_window=1)

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        weights = window_attention(layer, 1)[:, :, 0]  # [kv_heads, group, n]
        if self.heads == "kv":
            return weights.mean(1)
        return weights.mean((0, 1)).expand(layer.keys.shape[0], -1)


@dataclass(frozen=True)
class ColumnSums:
    """The attention that an entry got from all queries so far (H2O, arXiv 2306.14048, section 4), in fp32.

    Reduced over the query heads of each KV head (the original code has no grouped queries). ``normalise`` divides by
    the number of queries that could see the entry, which takes away the advantage of early tokens.
    """

    group: str = "mean"  # mean | max | sum
    normalise: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(query_window=1, column_sums=True)  # the last query: its votes are given again when it is fed again

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        assert layer.column_sums is not None
        kv_heads, n = layer.keys.shape[:2]
        sums = reduce_heads(layer.column_sums.view(kv_heads, -1, n), self.group)
        return sums / torch.arange(n, 0, -1, device=sums.device) if self.normalise else sums


@dataclass(frozen=True)
class KeyNorm:
    """Minus the L2 norm of the key: keys of small norm draw attention (Devoto et al., arXiv 2406.11430).

    Deviation from the code that its authors published: no layer is left uncompressed.
    """

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        return -layer.keys.float().norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff:
    """Minus the cosine between a key and the mean direction of all keys (KeyDiff, arXiv 2504.15364, section 3.2).

    The mean is over normalised keys, as in the paper; every key that is captured counts, a question's too. Deviation:
    one choice at the end of prefill, where the paper also evicts between blocks of a prompt read in blocks.
    """

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        directions = F.normalize(layer.keys.float(), dim=-1)
        return -F.cosine_similarity(directions, directions.mean(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class Recency:
    """The later, the higher: with protected sinks this is StreamingLLM's selection (arXiv 2309.17453)."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        at = torch.arange(layer.tokens, device=layer.keys.device, dtype=torch.float32)
        return at.expand(layer.keys.shape[0], -1)


@dataclass(frozen=True)
class Random:
    """Uniform scores, drawn on the CPU from (seed, layer, context token ids): the floor that any method must beat.

    Every KV head draws its own. The draw for a context token depends on nothing that follows the context, so that
    blind, aware and swapped keep the same context entries.
    """

    seed: int = 0

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + layer.index * 7919 + layer.seed) % 2**63)
        heads = layer.keys.shape[0]
        # drawn token by token, so that the first n rows do not depend on how many follow
        return torch.rand(layer.tokens, heads, generator=generator).T.contiguous().to(layer.keys.device)
