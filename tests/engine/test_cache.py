"""What a cache says about what it stores."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.cache import ROOM, Cache, PlainLayer, SlidingLayer, content_hash


def entries(heads: int, length: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(heads, length, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(length: int = 10, room: int = 4, seed: int = 0) -> PlainLayer:
    return PlainLayer(entries(2, length, seed), entries(2, length, seed + 1), room)


def test_room_is_not_counted_and_grows() -> None:
    layer = plain(10, room=4)
    assert Cache([layer], 10).nbytes() == 2 * 2 * 10 * 8 * 4
    more = entries(2, ROOM + 50, 9)
    layer.append(more, more)
    assert layer.entries == 10 + ROOM + 50
    assert torch.equal(layer.keys[:, 10:], more) and torch.equal(layer.keys[:, :10], entries(2, 10, 0))


def test_a_copy_is_independent() -> None:
    cache = Cache([plain()], 10)
    copy = cache.copy()
    before = cache.fingerprint()
    copy.layers[0].append(entries(2, 1, 5), entries(2, 1, 6))
    copy.layers[0].tensors()["keys"][:] = 0
    copy.next_position += 1
    assert cache.fingerprint() == before != copy.fingerprint()


@pytest.mark.parametrize("window", [2, 4, 8, 100])
def test_a_sliding_layer_keeps_what_the_next_token_can_see(window: int) -> None:
    keys = entries(2, 12, 3)
    layer = SlidingLayer(keys, keys, window)
    kept = min(12, window - 1)
    assert torch.equal(layer.keys, keys[:, 12 - kept :])
    new = entries(2, 3, 4)
    layer.append(new, new)
    assert layer.keys.shape[1] == kept + 3, "before it settles, the new tokens still see the old ones"
    layer.settle()
    assert torch.equal(layer.keys, torch.cat([keys, new], 1)[:, 15 - min(15, window - 1) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("change", ["one value", "two swapped", "one moved", "shorter"])
def test_any_change_changes_the_hash(dtype: torch.dtype, change: str) -> None:
    """Both ways of hashing: on the host, and on the device where the tensors lie."""
    keys = (entries(2, 9, 1) * 20).to(dtype)
    changed = keys.clone()
    if change == "one value":
        changed[1, 8, 7] += 1
    elif change == "two swapped":
        changed[0, [2, 5]] = changed[0, [5, 2]]
    elif change == "one moved":
        changed = changed.roll(1, dims=1)
    else:
        changed = changed[:, :8]
    assert not torch.equal(content_hash([keys, keys]), content_hash([keys, changed]))
    assert torch.equal(content_hash([keys, changed]), content_hash([keys.clone(), changed.clone()]))
    prints = {Cache([PlainLayer(k, k, room)], 9).fingerprint() for k in (keys, changed) for room in (0, 7)}
    assert len(prints) == 2, "content counts, room does not"
    assert Cache([PlainLayer(keys, keys)], 9).fingerprint() != Cache([PlainLayer(keys, keys)], 10).fingerprint()
