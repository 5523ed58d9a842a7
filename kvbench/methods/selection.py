"""Which entries are kept: protected ones by index, the others by score, ties by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Protect:
    """Entries kept whatever their score: the first ``sinks`` and the last ``recent`` of the evictable region.

    ``recent_share`` (H2O: half the budget) sets the recent window as a share of the entries kept, rounded up, where
    that is more than ``recent``.
    """

    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0

    def of(self, count: int) -> Protect:
        """The same with the recent window in entries, for ``count`` entries kept."""
        if not self.recent_share:
            return self
        share = count - int(count * (1 - self.recent_share) + 1e-9)  # 1e-9: 10 * (1 - 0.9) must not round down
        return Protect(self.sinks, max(self.recent, share))

    def within(self, count: int) -> Protect:
        """What can be protected when only ``count`` entries are kept: recency wins over sinks beyond the first few.

        A fraction of a short text can be smaller than the protected entries. Then the sinks are kept as far as at
        least one recent entry fits beside them, and the recent window shrinks to the rest.
        """
        if self.recent_share:
            return self.of(count).within(count)
        if self.sinks + self.recent <= count:
            return self
        recent = min(self.recent, max(1, count - self.sinks))
        return Protect(min(self.sinks, count - recent), recent)


def select(scores: torch.Tensor, count: int, protect: Protect) -> torch.Tensor:
    """Kept positions [heads, count], ascending, for scores [heads, n] with 1 <= count <= n.

    Of equal scores the earlier position is kept, on every device (a stable sort; ``topk`` breaks ties as it likes).
    """
    heads, n = scores.shape
    protect = protect.within(count)
    first, last = protect.sinks, n - protect.recent
    chosen = count - protect.sinks - protect.recent
    order = scores[:, first:last].sort(dim=-1, descending=True, stable=True).indices[:, :chosen] + first
    at = torch.arange(n, device=scores.device).expand(heads, -1)
    return torch.cat([at[:, :first], order.sort(dim=-1).values, at[:, last:]], dim=1)


def select_per_head(scores: torch.Tensor, counts: torch.Tensor, protect: Protect) -> list[torch.Tensor]:
    """As ``select``, with a count of its own for every head: counts int64 [heads] -> per head its kept positions.

    Heads of one count are selected together.
    """
    kept: list[torch.Tensor] = [scores.new_empty(0, dtype=torch.long)] * scores.shape[0]
    for count in counts.unique().tolist():
        heads = (counts == count).nonzero()[:, 0]
        chosen = select(scores[heads.to(scores.device)], count, protect)
        for head, at in zip(heads.tolist(), chosen, strict=True):
            kept[head] = at
    return kept
