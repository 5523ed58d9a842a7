"""Eviction at decode steps against the plainest bookkeeping, written apart from the layer."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.attention import AttentionOptions
from kvbench.methods.decode import HeavyHitters, LastQuery, Rolling
from kvbench.methods.evicting import EvictingLayer
from kvbench.methods.selection import Protect

KV, GROUP, DIM, LIMIT = 2, 3, 8, 10
CHUNKS = (7, 4, 1, 1, 1, 5, 1, 1, 1, 1)


def plain(rule: object, protect: Protect, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[list, list]:
    """(outputs per chunk, kept positions per chunk and head), token by token and head by head."""
    held = [[] for _ in range(KV)]  # type: ignore[var-annotated]
    score = [{} for _ in range(KV)]  # type: ignore[var-annotated]
    outs, kepts, start = [], [], 0
    for chunk in CHUNKS:
        out = torch.zeros(KV * GROUP, chunk, DIM)
        last = [{} for _ in range(KV)]  # type: ignore[var-annotated]
        for head in range(KV):
            held[head] = held[head] + list(range(start, start + chunk))
            for i in range(chunk):
                seen = [at for at in held[head] if at <= start + i]
                for g in range(GROUP):
                    weights = (k[head, seen] @ q[head * GROUP + g, start + i] * DIM**-0.5).softmax(0)
                    out[head * GROUP + g, i] = weights @ v[head, seen]
                    for at, weight in zip(seen, weights.tolist(), strict=True):
                        if isinstance(rule, HeavyHitters):
                            score[head][at] = score[head].get(at, 0.0) + weight / GROUP
                        if i == chunk - 1:
                            last[head][at] = last[head].get(at, 0.0) + weight / GROUP
        if isinstance(rule, LastQuery):
            score = last if rule.heads == "kv" else [pooled(last, held)] * KV
        for head in range(KV):
            if len(held[head]) > LIMIT:
                fixed = held[head][: protect.sinks] + held[head][len(held[head]) - protect.recent :]
                free = [at for at in held[head] if at not in fixed]
                free.sort(key=lambda at, head=head: -score[head].get(at, 0.0))  # type: ignore[misc]
                held[head] = sorted(fixed + free[: LIMIT - len(fixed)])
        outs.append(out)
        kepts.append([list(h) for h in held])
        start += chunk
    return outs, kepts


def pooled(last: list, held: list) -> dict:
    """The mean over KV heads of what each gives the same entry (all heads hold the same entries)."""
    assert held[0] == held[1]
    return {at: (last[0][at] + last[1][at]) / 2 for at in last[0]}


@pytest.mark.parametrize(
    ("rule", "protect"),
    [
        (HeavyHitters(), Protect(0, 5)),
        (LastQuery("all"), Protect(0, 1)),
        (LastQuery("kv"), Protect(0, 1)),
        (Rolling(), Protect(3, LIMIT - 3)),
    ],
    ids=str,
)
def test_each_pass_attends_then_evicts(rule: object, protect: Protect) -> None:
    generator = torch.Generator().manual_seed(3)
    total = sum(CHUNKS)
    q = torch.randn(KV * GROUP, total, DIM, generator=generator) * 2
    k, v = (torch.randn(KV, total, DIM, generator=generator) for _ in range(2))
    outs, kepts = plain(rule, protect, q, k, v)
    layer = EvictingLayer(k[:, :0], v[:, :0], rule, LIMIT, protect, torch.zeros(KV, 0))  # type: ignore[arg-type]
    start = 0
    for out, kept, chunk in zip(outs, kepts, CHUNKS, strict=True):
        stop = start + chunk
        layer.append(k[:, start:stop], v[:, start:stop])
        seen = layer.attend(q[:, start:stop], AttentionOptions(DIM**-0.5))
        layer.settle()
        assert torch.allclose(seen, out, atol=1e-5)
        assert layer.entries == min(stop, LIMIT)
        for head in range(KV):
            assert torch.equal(layer.keys[head], k[head, kept[head]])
            assert torch.equal(layer.values[head], v[head, kept[head]])
        start = stop


def test_a_copy_goes_its_own_way() -> None:
    keys = torch.randn(KV, LIMIT, DIM)
    layer = EvictingLayer(keys, keys, HeavyHitters(), LIMIT, Protect(0, 5), torch.rand(KV, LIMIT))
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    other = layer.copy()
    other.append(keys[:, :3], keys[:, :3])
    other.attend(torch.randn(KV * GROUP, 3, DIM), AttentionOptions(1.0))
    other.settle()
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.tensors().items())
