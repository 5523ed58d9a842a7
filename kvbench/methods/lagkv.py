"""LagKV (arXiv 2504.04704): what differs from the tokens that follow it is worth keeping; queries are not looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.checks import check_choice, check_whole
from kvbench.engine.capture import LayerCapture, Needs

KEY = "method.scorer"


@dataclass(frozen=True)
class LagKV:
    """Windows of ``lag`` tokens, each scored by the window after it (section 3, equations 1 to 5).

    Every channel of a window's keys and values is scaled by the smallest and largest number that the next window has
    there; a token's score is the softmax, over its window, of the standard deviation of its scaled channels, averaged
    over keys and values. ``compare``: ``windows`` (the paper: a token's rank in its own window counts, so that every
    window keeps an equal share) or ``all`` (the softmax itself counts).

    The first ``sinks`` tokens, the last whole window and the rest behind it have nothing to be scored by. They come
    first, and among them the later the higher, where the paper always keeps them all: a smaller budget still holds.
    Deviation: one choice at the end of prefill; the paper also compresses what is generated, a window at a time.
    """

    sinks: int = 4
    lag: int = 128
    compare: str = "windows"  # windows | all

    def __post_init__(self) -> None:
        check_whole(f"{KEY}.sinks", self.sinks, 0)
        check_whole(f"{KEY}.lag", self.lag, 2)
        check_choice(f"{KEY}.compare", self.compare, ("windows", "all"))

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        """fp32 [kv_heads, n]: below 1 for the scored tokens, 1 and more for the others."""
        heads, n, _ = layer.keys.shape
        scores = 1 + torch.arange(n, device=layer.keys.device, dtype=torch.float32) / max(1, n)
        scores = scores.repeat(heads, 1)
        windows = max(0, n - self.sinks) // self.lag
        if windows < 2:
            return scores
        last = self.sinks + windows * self.lag
        both = [self._difference(part[:, self.sinks : last]) for part in (layer.keys, layer.values)]
        found = (both[0] + both[1]) / 2  # [kv_heads, windows - 1, lag]
        if self.compare == "windows":
            found = found.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores[:, self.sinks : last - self.lag] = found.flatten(1)
        return scores

    def _difference(self, part: torch.Tensor) -> torch.Tensor:
        """[kv_heads, windows * lag, dim] -> [kv_heads, windows - 1, lag]."""
        windows = part.float().unflatten(1, (-1, self.lag))
        own, following = windows[:, :-1], windows[:, 1:]
        low, high = following.amin(2, keepdim=True), following.amax(2, keepdim=True)
        # A channel that is the same in the whole next window says nothing; the quotient would be infinite.
        width = high - low
        scaled = torch.where(width > 0, (own - low) / width.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        return scaled.std(-1).softmax(-1)
