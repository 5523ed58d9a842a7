"""What decoding reads: per layer the stored entries, with ``append``, ``attend``, ``settle``, ``nbytes``.

A layer's storage is per KV head and holds one sequence. ``PlainLayer`` stores keys and values as they are;
``SlidingLayer`` is the untouched cache of a sliding-window layer. Other codecs are further classes with these methods.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvbench.engine.attention import AttentionOptions, causal_attention

ROOM = 64  # entries by which a full buffer grows


class LayerCache(Protocol):
    """The entries of one layer."""

    compressed: bool  # False: passed through (sliding window); left out of budgets and of entry counts

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the entries of new tokens, [kv_heads, q, dim] each."""
        ...

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """query [query_heads, q, dim] of the q tokens appended last; returns the same shape."""
        ...

    def settle(self) -> None:
        """Called once after every pass over new tokens: where a layer evicts or re-quantises what it holds."""
        ...

    def copy(self) -> LayerCache: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that hold the stored entries: the source of ``nbytes`` and of the fingerprint."""
        ...

    @property
    def entries(self) -> float:
        """Stored entries per KV head (the mean over heads)."""
        ...


class PlainLayer:
    """Keys and values as they are, in a buffer with room for the tokens to come.

    ``keys`` and ``values`` are [kv_heads, capacity, dim]; the first ``length`` entries are filled. Room that is not
    filled yet is not an entry and is not counted in ``nbytes``, for any method.
    """

    compressed = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, room: int = ROOM) -> None:
        self.length = keys.shape[1]
        self._keys, self._values = with_room(keys, room), with_room(values, room)

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, : self.length]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[1]
        if self.length + new > self._keys.shape[1]:
            room = max(new, ROOM, self.length // 2)
            self._keys, self._values = with_room(self.keys, room), with_room(self.values, room)
        self._keys[:, self.length : self.length + new] = keys
        self._values[:, self.length : self.length + new] = values
        self.length += new

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        return causal_attention(query[None], self.keys[None], self.values[None], options)[0]

    def settle(self) -> None:
        """A plain layer keeps everything that it is given."""

    def copy(self) -> PlainLayer:
        return PlainLayer(self.keys, self.values, room=self._keys.shape[1] - self.length)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"keys": self.keys, "values": self.values}

    @property
    def entries(self) -> float:
        return float(self.length)


class SlidingLayer:
    """The last ``window - 1`` entries of a layer that never looks further back: what the next token can see."""

    compressed = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int) -> None:
        self.window = window
        self.keys, self.values = keys, values
        self.settle()

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = torch.cat([self.keys, keys], dim=1)
        self.values = torch.cat([self.values, values], dim=1)

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        return causal_attention(query[None], self.keys[None], self.values[None], options)[0]

    def settle(self) -> None:
        drop = self.keys.shape[1] - (self.window - 1)
        if drop > 0:  # clone: a view would keep the longer tensor alive
            self.keys, self.values = self.keys[:, drop:].clone(), self.values[:, drop:].clone()

    def copy(self) -> SlidingLayer:
        return SlidingLayer(self.keys.clone(), self.values.clone(), self.window)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"keys": self.keys, "values": self.values}

    @property
    def entries(self) -> float:
        return float(self.keys.shape[1])


@dataclass
class Cache:
    """One row of decoding: a layer cache per attention layer, and the position that the next token will take."""

    layers: list[LayerCache]
    next_position: int

    def copy(self) -> Cache:
        """An independent cache with the same content (one compressed context serves several questions)."""
        return Cache([layer.copy() for layer in self.layers], self.next_position)

    def nbytes(self, where: str = "device") -> int:
        """Bytes of the tensors held: ``device`` (the model's device, whatever it is) or ``host`` (offloaded)."""
        total = 0
        for layer in self.layers:
            for name, tensor in layer.tensors().items():
                if name.startswith("host_") == (where == "host"):
                    total += tensor.element_size() * tensor.numel()
        return total

    def entries(self) -> float:
        """Stored entries per KV head, averaged over the layers that are compressed (over all, if none is)."""
        layers = [layer for layer in self.layers if layer.compressed] or self.layers
        return sum(layer.entries for layer in layers) / len(layers)

    def fingerprint(self) -> str:
        """A hash of what is stored, bit for bit: shapes, dtypes and contents of every tensor, and the next position."""
        digest = hashlib.sha256(str(self.next_position).encode())
        tensors = [(name, tensor) for layer in self.layers for name, tensor in sorted(layer.tensors().items())]
        for name, tensor in tensors:
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        for device, held in by_device.items():
            if device.type == "cpu":
                for tensor in held:
                    digest.update(as_bytes(tensor).numpy().data)
            else:
                digest.update(content_hash(held).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def with_room(entries: torch.Tensor, room: int) -> torch.Tensor:
    """A new buffer [heads, n + room, dim] whose first n entries are those given; the rest is zero, not garbage."""
    heads, length, dim = entries.shape
    buffer = entries.new_zeros(heads, length + room, dim)
    buffer[:, :length] = entries
    return buffer


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as a flat uint8 tensor."""
    return tensor.contiguous().view(torch.uint8).reshape(-1)


HASH_WORDS = 1 << 24  # words hashed at once


def content_hash(tensors: list[torch.Tensor]) -> torch.Tensor:
    """int64 [2]: a position-dependent hash of the tensors' bits, computed on the device where they all lie.

    Hashing there keeps a cache of gigabytes from travelling to the host. Two sums modulo 2**64 with different odd
    weights per position: a changed, moved or swapped entry changes them.
    """
    flat = torch.cat([as_bytes(tensor) for tensor in tensors])
    words = F.pad(flat, (0, -flat.numel() % 4)).view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), HASH_WORDS):
        bits = words[start : start + HASH_WORDS].long()
        at = torch.arange(start, start + bits.numel(), device=bits.device)
        first = (at * 2 + 1) * 0x9E3779B97F4A7C1 ^ (at >> 7)
        second = (at * 0x2545F4914F6CDD1D + 0x1B873593) | 1
        sums += torch.stack([(bits * first).sum(), ((bits ^ (bits << 13)) * second).sum()])
    return sums
