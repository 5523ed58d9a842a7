"""The cache of a layer whose keys are coded and whose values are on the host: what HCAttention decodes from."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvbench.engine.attention import AttentionOptions, visible
from kvbench.methods.codebook import LayerCodebook

NUMBERS_AT_ONCE = 1 << 26  # table entries or attention weights held at once (fp32: 256 MiB)
VALUES_AT_ONCE = 1 << 24  # value channels that the host turns into fp32 at once (64 MiB)


@dataclass(frozen=True)
class Choice:
    """Which tokens a query reads the values of, and what becomes of the others."""

    tau: float  # the share of the attention that the smallest set of tokens must reach
    renormalise: bool  # are their weights rescaled to what all tokens had?
    permanent: bool  # is what no query of a pass selected dropped?


class HCLayer:
    """Codes on the device and values on the host, a row per entry and KV head.

    Rows lie token after token, the heads of one token side by side. Where entries were dropped, the survivors come
    first, head after head, ``lengths`` (int64 [kv_heads]) of each; the tokens appended since follow as above.
    """

    compressed = True

    def __init__(
        self, book: LayerCodebook, choice: Choice, keys: torch.Tensor, values: torch.Tensor, room: int = 0
    ) -> None:
        self.book, self.choice, self.kv_heads = book, choice, keys.shape[0]
        capacity = (keys.shape[1] + room) * self.kv_heads
        self._codes = Rows(book.groups, torch.int16, keys.device, capacity)
        pinned = values.device.type == "cuda"
        self._values = Rows(values.shape[2], values.dtype, torch.device("cpu"), capacity, pinned)
        self._lengths = torch.zeros(self.kv_heads, dtype=torch.int64, device=keys.device)
        self._survivors = self._longest = 0  # rows in the first part; entries of the head that has most there
        self._fresh = 0  # tokens appended since the last pass ended
        self._selected: torch.Tensor | None = None  # bool [kv_heads, columns]: what this pass's queries selected
        self._finite = torch.ones((), dtype=torch.bool, device=keys.device)
        self.append(keys, values)
        self._fresh = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._codes.append(self.book.nearest(keys).flatten(0, 1))
        self._values.append(values.transpose(0, 1).flatten(0, 1))
        self._fresh += keys.shape[1]
        # No code says NaN, and a value that is not selected is not read: what plain attention would show is kept here.
        self._finite = self._finite & torch.isfinite(keys).all() & torch.isfinite(values).all()

    @property
    def _tail(self) -> int:
        """Tokens whose rows lie side by side."""
        return (self._codes.count - self._survivors) // self.kv_heads

    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each head's entries lie, int64 rows [kv_heads, columns], by position, and which columns exist.

        Columns that do not exist, of heads with fewer survivors than another, stand between survivors and later tokens.
        """
        device = self._lengths.device
        head = torch.arange(self.kv_heads, device=device)[:, None]
        tail = self._survivors + torch.arange(self._tail, device=device) * self.kv_heads + head
        column = torch.arange(self._longest, device=device)
        exists = column < self._lengths[:, None]
        first = (self._lengths.cumsum(0) - self._lengths)[:, None]
        rows = torch.cat([torch.where(exists, first + column, 0), tail], dim=1)
        return rows, torch.cat([exists, torch.ones_like(tail, dtype=torch.bool)], dim=1)

    def _owners(self) -> torch.Tensor:
        """The KV head of every row, int64 [rows]."""
        head = torch.arange(self.kv_heads, device=self._lengths.device)
        return torch.cat([head.repeat_interleave(self._lengths, output_size=self._survivors), head.repeat(self._tail)])

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        heads, q, _ = query.shape
        rows, exists = self._columns()
        columns = rows.shape[1]
        if self.choice.permanent:
            self._selected = torch.zeros_like(exists)
        step = max(1, NUMBERS_AT_ONCE // (heads * max(columns, self.book.centroids[0, :, :, 0].numel())))
        outs = []
        for start in range(0, q, step):
            stop = min(start + step, q)
            last = columns - q + stop  # what the block's last query sees
            seen = exists[:, None, :last] & visible(stop - start, last, None, query.device)  # [kv_heads, block, last]
            outs.append(self._attend(query[:, start:stop], rows[:, :last], seen, options))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out.masked_fill(~self._finite, float("nan"))

    def _attend(
        self, query: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [query_heads, q, dim]; rows [kv_heads, columns]; seen [kv_heads, q, columns]."""
        heads, q, _ = query.shape
        group = heads // self.kv_heads
        folded = query.reshape(self.kv_heads, group * q, -1)
        scores = self.book.scores(folded, self._codes.filled, self._owners())[rows]  # [kv_heads, columns, group * q]
        scores = scores.transpose(1, 2).unflatten(1, (group, q)) * options.scaling
        weights = softmax(scores, seen[:, None], options).flatten(1, 2)  # [kv_heads, group * q, columns]
        selected = None
        if self.choice.tau < 1:
            kept = smallest_sets(weights, self.choice.tau)
            weights = selected_weights(weights, kept, self.choice.renormalise)
            selected = kept.any(1)
        if self._selected is not None:
            self._selected[:, : rows.shape[1]] |= True if selected is None else selected
        out = self._weighted_values(weights, rows, selected)
        return out.to(query.device, query.dtype).reshape(heads, q, -1)

    def _weighted_values(
        self, weights: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor | None
    ) -> torch.Tensor:
        """fp32 [kv_heads, m, value_dim] on the host: weights [kv_heads, m, columns] times the values of their rows.

        Only columns that a query of the head selected are sent and read; heads with fewer get others of weight 0.
        """
        if selected is not None:
            most = int(selected.sum(1).max())
            columns = selected.to(torch.int32).sort(dim=1, descending=True, stable=True).indices[:, :most]
            weights = weights.gather(2, columns[:, None].expand(-1, weights.shape[1], -1))
            rows = rows.gather(1, columns)
        weights, rows, values = weights.cpu(), rows.cpu(), self._values.filled
        out = torch.zeros(*weights.shape[:2], values.shape[1])
        step = max(1, VALUES_AT_ONCE // (self.kv_heads * values.shape[1]))
        for start in range(0, rows.shape[1], step):
            piece = slice(start, start + step)
            out.baddbmm_(weights[:, :, piece], values[rows[:, piece]].float())
        return out

    def settle(self) -> None:
        """Where choices are permanent: drops what this pass did not select; its own new entries stay."""
        selected, fresh = self._selected, self._fresh
        self._selected, self._fresh = None, 0
        if selected is None:
            return
        rows, exists = self._columns()
        selected[:, selected.shape[1] - fresh :] = True
        selected &= exists
        kept = rows[selected]  # head after head, by position
        if kept.numel() == self._codes.count:
            return
        self._codes.keep(kept)
        self._values.keep(kept.cpu())
        self._lengths = selected.sum(1)
        self._survivors, self._longest = kept.numel(), int(self._lengths.max())

    def copy(self) -> HCLayer:
        twin = copy.copy(self)
        twin._codes, twin._values = self._codes.copy(), self._values.copy()
        return twin

    def tensors(self) -> dict[str, torch.Tensor]:
        """``codes`` int16 [kv_heads, n, groups] and ``host_values`` [kv_heads, n, value_dim]; the codebooks are shared.

        Once entries were dropped: all rows [rows, ...] of both, and how many of the first ones each head has.
        """
        codes, values = self._codes.filled, self._values.filled
        if self._survivors:
            return {"codes": codes, "host_values": values, "lengths": self._lengths}
        shape = (self._tail, self.kv_heads)
        return {
            "codes": codes.unflatten(0, shape).transpose(0, 1),
            "host_values": values.unflatten(0, shape).transpose(0, 1),
        }

    @property
    def entries(self) -> float:
        return self._codes.count / self.kv_heads


class Rows:
    """A matrix [count, width] that grows and shrinks in a buffer, on one device.

    ``pinned``: in host memory that a CUDA device writes to while the host goes on; reading waits for it.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, capacity: int, pinned: bool = False
    ) -> None:
        self.count, self._pinned = 0, pinned
        self._buffer = torch.empty(capacity, width, dtype=dtype, device=device, pin_memory=pinned)
        self._written: torch.cuda.Event | None = None  # when the last copy from the device is complete

    @property
    def filled(self) -> torch.Tensor:
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        return self._buffer[: self.count]

    def append(self, rows: torch.Tensor) -> None:
        new = self.count + rows.shape[0]
        if new > self._buffer.shape[0]:
            self._move(max(new, self.count * 3 // 2))
        self._buffer[self.count : new].copy_(rows, non_blocking=self._pinned)
        if self._pinned and rows.is_cuda:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(rows.device))
        self.count = new

    def keep(self, index: torch.Tensor) -> None:
        """Only the rows ``index``, int64 on the rows' device, in that order."""
        kept, room = self.filled[index], self._buffer.shape[0] - self.count
        self.count = 0
        if 2 * (len(kept) + room) < self._buffer.shape[0]:  # what was dropped is given back, not only left unused
            self._move(len(kept) + room)
        self.append(kept)

    def _move(self, capacity: int) -> None:
        """The same rows in another buffer."""
        old = self.filled
        self._buffer = self._like(capacity)
        self._buffer[: self.count] = old

    def _like(self, capacity: int) -> torch.Tensor:
        shape = (capacity, self._buffer.shape[1])
        return torch.empty(shape, dtype=self._buffer.dtype, device=self._buffer.device, pin_memory=self._pinned)

    def copy(self) -> Rows:
        twin = copy.copy(self)
        twin._move(self._buffer.shape[0])
        return twin


def softmax(scores: torch.Tensor, seen: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Weights fp32 [kv_heads, group, q, columns] of scaled scores, softcap and sink logits included.

    ``seen`` is bool and broadcasts over the query heads of a KV head.
    """
    kv_heads, group, q, columns = scores.shape
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, q, -1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :columns]


def smallest_sets(weights: torch.Tensor, tau: float) -> torch.Tensor:
    """Bool, like ``weights`` [..., columns]: the fewest columns that hold ``tau`` of their sum (eq. 4).

    Never none; of equal weights the first. Where weights are not finite all are kept: the output is not finite either.
    """
    ordered = weights.sort(dim=-1, descending=True, stable=True)
    reached = ordered.values.cumsum(-1)
    before = F.pad(reached[..., :-1], (1, 0))  # what the larger ones hold
    kept = ~(before >= tau * reached[..., -1:])
    return torch.zeros_like(kept).scatter_(-1, ordered.indices, kept)


def selected_weights(weights: torch.Tensor, kept: torch.Tensor, renormalise: bool) -> torch.Tensor:
    """The weights of the kept columns, others 0; ``renormalise``: with the sum that all of them had (eq. 5)."""
    selected = weights.masked_fill(~kept, 0.0)
    if not renormalise:
        return selected
    return selected * (weights.sum(-1, keepdim=True) / selected.sum(-1, keepdim=True))
