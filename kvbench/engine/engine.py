"""The engine: prefill, extension, and greedy decoding of a list of caches, for any model that uses our attention."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.attention import NAME, AttentionOptions, ForwardPass, forward_pass, register
from kvbench.engine.cache import Cache
from kvbench.engine.capture import Capture, CapturePass, Needs, empty

NOTHING = Needs()
EOS_CHECK_STEPS = 8  # on an accelerator the host asks whether all rows are finished only every so many steps


@dataclass(frozen=True)
class StopRule:
    """When a row ends: at any of ``ids``, but not before ``min_new_tokens`` tokens, at the latest at the maximum."""

    ids: frozenset[int]
    max_new_tokens: int
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Generated:
    """One row's answer: its token ids, the stop token that ended it included, and whether all logits were finite."""

    ids: tuple[int, ...]
    finite: bool


class CachedPass:
    """A forward pass over new tokens, row r reading and filling ``caches[r]``."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self.caches = caches

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        rows = []
        for row, cache in enumerate(self.caches):
            held = cache.layers[layer]
            held.append(key[row], value[row])
            rows.append(held.attend(query[row], options))
            held.settle()
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)


class Engine:
    """Runs a model whose ``attn_implementation`` is ``kvbench``; holds no state between calls."""

    def __init__(self, model: Any) -> None:
        register()
        model.set_attn_implementation(NAME)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._one_logit = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], needs: Needs = NOTHING, context: int | None = None) -> Capture:
        """The uncompressed pass over a context; what scorers ``need`` beside keys and values is observed in it.

        ``context`` is how many of the tokens are the context's, if a question follows in the same pass.
        An empty context gives layers of no entries, so that every later step has the shapes it needs.
        """
        if not ids:
            return empty(self.prefill([0], needs))
        return self._capture(Capture((), 0, None), ids, needs, context_seed(ids[:context]))

    @torch.inference_mode()
    def extend(self, capture: Capture, ids: Sequence[int], needs: Needs = NOTHING) -> Capture:
        """A new capture of the tokens of ``capture`` followed by ``ids``; ``capture`` stays usable."""
        return self._capture(capture, ids, needs, capture.layers[0].seed)

    def _capture(self, before: Capture, ids: Sequence[int], needs: Needs, seed: int) -> Capture:
        if not ids:
            return before
        current = CapturePass({layer.index: layer for layer in before.layers}, needs, seed)
        tokens = torch.tensor([list(ids)], device=self.device)
        logits = self._forward(current, tokens, self._positions(before.tokens, len(ids)))[0]
        layers = tuple(current.after[index] for index in sorted(current.after))
        return Capture(layers, before.tokens + len(ids), logits, (*before.ids, *ids))

    @torch.inference_mode()
    def read(self, current: ForwardPass, ids: Sequence[int], first: int) -> None:
        """A pass over tokens that stand at positions from ``first`` on, for what ``current`` sees in it."""
        self._forward(current, torch.tensor([list(ids)], device=self.device), self._positions(first, len(ids)))

    def _forward(self, current: ForwardPass, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after the last of the new tokens; ids and positions [rows, q]."""
        keep = {"logits_to_keep": 1} if self._one_logit else {}
        with forward_pass(current):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=False, **keep)
        return out.logits[:, -1]

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [n, vocabulary] at every position of a text, through our attention (for checks; not kept small)."""
        with forward_pass(CapturePass({}, NOTHING, 0)):
            return self.plain_logits(ids)

    @torch.inference_mode()
    def plain_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [n, vocabulary] through whatever attention the model is set to."""
        tokens = torch.tensor([list(ids)], device=self.device)
        return self.model(input_ids=tokens, position_ids=self._positions(0, len(ids)), use_cache=False).logits[0]

    @torch.inference_mode()
    def lone_token_keys(self, position: int) -> list[torch.Tensor]:
        """Every layer's keys [kv_heads, 1, dim] of one token that stands alone at ``position``."""
        current = CapturePass({}, NOTHING, 0)
        self._forward(current, torch.ones(1, 1, dtype=torch.long, device=self.device), self._positions(position, 1))
        return [current.after[index].keys for index in sorted(current.after)]

    def _positions(self, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count, device=self.device)[None]

    @torch.inference_mode()
    def feed(self, cache: Cache, ids: Sequence[int]) -> torch.Tensor:
        """Feeds tokens through one cache, which grows by them; returns the logits [vocabulary] after the last."""
        tokens = torch.tensor([list(ids)], device=self.device)
        positions = self._positions(cache.next_position, len(ids))
        cache.next_position += len(ids)
        return self._forward(CachedPass([cache]), tokens, positions)[0]

    @torch.inference_mode()
    def decode(self, caches: Sequence[Cache], logits: torch.Tensor, stop: StopRule) -> list[Generated]:
        """Greedy decoding of all caches as rows of one batch.

        ``logits`` [rows, vocabulary] follow each row's last fed token. The device is never waited for inside the loop,
        except to ask every few steps whether all rows are finished; what a row produces after its end is cut off.
        """
        rows = len(caches)
        stop_ids = torch.tensor(sorted(stop.ids), dtype=torch.long, device=self.device)
        tokens = torch.zeros(rows, stop.max_new_tokens, dtype=torch.long, device=self.device)
        ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        finite = torch.ones(rows, dtype=torch.bool, device=self.device)
        positions = torch.tensor([[cache.next_position] for cache in caches], device=self.device)
        current, every = CachedPass(caches), 1 if self.device.type == "cpu" else EOS_CHECK_STEPS
        steps = 0
        for step in range(stop.max_new_tokens):
            # The largest logit is NaN if any is. Masked-out (-inf) logits are fine, ended rows count no more.
            finite &= torch.isfinite(logits.max(dim=-1).values) | ended
            if step < stop.min_new_tokens:
                logits = logits.index_fill(-1, stop_ids, float("-inf"))
            token = logits.argmax(dim=-1)
            tokens[:, step] = token
            ended |= torch.isin(token, stop_ids)
            steps = step + 1
            if steps == stop.max_new_tokens or (steps % every == 0 and bool(ended.all())):
                break
            logits = self._forward(current, token[:, None], positions)
            positions += 1
        for cache in caches:
            cache.next_position += steps - 1
        flags = finite.tolist()
        return [Generated(_until_stop(row, stop), flags[i]) for i, row in enumerate(tokens[:, :steps].tolist())]


def context_seed(ids: Sequence[int]) -> int:
    """A number drawn from token ids alone: what random scores may depend on."""
    return int.from_bytes(hashlib.sha256(repr(tuple(ids)).encode()).digest()[:7], "big")


def _until_stop(ids: list[int], stop: StopRule) -> tuple[int, ...]:
    for at, token in enumerate(ids):
        if token in stop.ids and at >= stop.min_new_tokens:
            return tuple(ids[: at + 1])
    return tuple(ids)
