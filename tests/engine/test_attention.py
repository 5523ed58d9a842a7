"""The attention primitive against attention written out position by position."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine import attention
from kvbench.engine.attention import AttentionOptions, causal_attention


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Query i of q stands at key s - q + i and sees what is at or before it, at most a window back."""
    out = torch.zeros_like(query)
    rows, heads, q, _ = query.shape
    s, group = keys.shape[2], heads // keys.shape[1]
    for row in range(rows):
        for head in range(heads):
            for i in range(q):
                at = s - q + i
                first = 0 if options.sliding_window is None else max(0, at + 1 - options.sliding_window)
                k, v = keys[row, head // group, first : at + 1], values[row, head // group, first : at + 1]
                scores = k @ query[row, head, i] * options.scaling
                if options.softcap:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                if options.sinks is not None:
                    weights = torch.cat([scores, options.sinks[head : head + 1]]).softmax(0)[:-1]
                else:
                    weights = scores.softmax(0)
                out[row, head, i] = weights @ v
    return out


OPTIONS = {
    "plain": AttentionOptions(0.3),
    "sliding": AttentionOptions(0.3, sliding_window=5),
    "softcap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": AttentionOptions(0.3, sliding_window=4, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("q", "s"), [(1, 1), (1, 9), (9, 9), (3, 12), (12, 12), (11, 12)])
@pytest.mark.parametrize("name", OPTIONS)
def test_bottom_right_causality(
    name: str, q: int, s: int, kv_heads: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attention_path", lambda device: path)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)  # so that several blocks are needed
    generator = torch.Generator().manual_seed(q * 100 + s)
    query, keys, values = (
        torch.randn(2, heads, length, 8, generator=generator)
        for heads, length in ((4, q), (kv_heads, s), (kv_heads, s))
    )
    found = causal_attention(query, keys, values, OPTIONS[name])
    assert torch.allclose(found, reference(query, keys, values, OPTIONS[name]), atol=1e-5)


@pytest.mark.parametrize("s", [4, 9])
def test_where_no_kernel_takes_groups_keys_are_repeated_for_the_call(s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_fused_groups", lambda query: False)
    generator = torch.Generator().manual_seed(s)
    query, keys, values = (torch.randn(1, heads, s, 8, generator=generator) for heads in (4, 2, 2))
    found = causal_attention(query, keys, values, OPTIONS["plain"])
    assert torch.allclose(found, reference(query, keys, values, OPTIONS["plain"]), atol=1e-5)


def test_a_model_outside_the_engine_says_so() -> None:
    with pytest.raises(RuntimeError, match="only runs inside kvbench's engine"):
        attention.kvbench_attention(torch.nn.Module(), *(torch.zeros(1, 1, 1, 4) for _ in range(3)), None)
    with pytest.raises(RuntimeError, match="passed an attention mask"), attention.forward_pass(object()):  # type: ignore[arg-type]
        attention.kvbench_attention(torch.nn.Module(), *(torch.zeros(1, 1, 1, 4) for _ in range(3)), torch.ones(1))


def test_a_device_that_computes_wrong_attention_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some releases of torch are wrong on MPS for some numbers of keys. There is no MPS here: it is played."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    assert attention.attention_path.__wrapped__("mps") == "fused"
    exact = torch.nn.functional.scaled_dot_product_attention
    calls: list[int] = []

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(k.shape[2])
        second_call = calls.count(k.shape[2]) == 2  # the first is the CPU's
        return exact(q, k, v) + (1.0 if second_call and k.shape[2] == 33 else 0.0)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", wrong)
    assert attention.attention_path.__wrapped__("mps") == "explicit"
    assert "attention over [33] keys is wrong on MPS" in caplog.text
