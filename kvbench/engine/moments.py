"""Mean and covariance of a text's queries before rotary embedding, gathered while the text is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.engine.rotation import LayerRotation

TOKENS_AT_ONCE = 1024  # queries held in fp32 at once


@dataclass(frozen=True)
class Moments:
    """Of ``count`` queries of each query head: their mean and the sum of their outer products about it, fp32."""

    count: int
    mean: torch.Tensor  # [query_heads, dim]
    scatter: torch.Tensor  # [query_heads, dim, dim]

    def covariance(self) -> torch.Tensor:
        """[query_heads, dim, dim], divided by the number of queries."""
        return self.scatter / max(1, self.count)

    def joined(self, other: Moments) -> Moments:
        """Of both sets of queries, without the cancellation that raw second moments suffer from."""
        count = self.count + other.count
        if count == 0:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = apart[:, :, None] * apart[:, None, :] * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + between)


def none(queries: torch.Tensor) -> Moments:
    """Of no query at all; queries [query_heads, n, dim]."""
    heads, _, dim = queries.shape
    zero = torch.zeros(heads, dim, dim, dtype=torch.float32, device=queries.device)
    return Moments(0, zero[:, 0], zero)


def moments(queries: torch.Tensor, first: int, skip: int, rotation: LayerRotation | None) -> Moments:
    """Of queries [query_heads, n, dim], rotated for the positions from ``first`` on; positions below ``skip`` left out.

    ``rotation`` is how the layer rotates (None: not at all); the queries are turned back by it.
    """
    total = none(queries)
    for start in range(max(0, skip - first), queries.shape[1], TOKENS_AT_ONCE):
        block = queries[:, start : start + TOKENS_AT_ONCE].float()
        if rotation is not None:
            at = torch.arange(first + start, first + start + block.shape[1], device=block.device)
            block = rotation.turn(block, -at.expand(block.shape[0], -1))
        mean = block.mean(1)
        centred = block - mean[:, None]
        total = total.joined(Moments(block.shape[1], mean, centred.transpose(1, 2) @ centred))
    return total
