"""KIVI (arXiv 2402.02750): nothing is dropped; keys and values are stored in a few bits and a scale per group.

Keys are quantised per channel, in groups along the tokens; values per token, in groups along the channels. The newest
entries stay in the model's dtype: keys until R (the residual length) of them fill a block, values while they are among
the last R. Codes are really packed, 32 / bits of them to an int32 word.

As in the authors' code (github.com/jy-yuan/KIVI):

- prefill, and every token that a pass brings, attends at full precision; entries are quantised when the pass is over;
- of t entries the t mod R newest keys are at full precision (none, if R divides t) and the min(t, R) newest values;
- codes are computed in the dtype of the entries, clamped, then rounded half to even; stored numbers are read in fp32.

Deviations: entries are turned back into the model's dtype for the time of one attention call, where the authors fuse
that with the product; a group of equal numbers comes back as that number, where theirs divides 0 by 0; 8 bits work; and
several tokens may come at once after prefill (a question), all of which attend at full precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from kvbench.engine.attention import AttentionOptions, causal_attention
from kvbench.engine.cache import LayerCache
from kvbench.errors import InputError

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup

KEY = "method.codec"
BITS = (2, 4, 8)
WORD = 32  # bits of the integers that codes are packed into
AT_ONCE = 1 << 24  # numbers packed or unpacked at once: each takes some 8 bytes while that lasts


@dataclass(frozen=True)
class Kivi:
    """The codec with the paper's main setting (G = 32, R = 128) as its default."""

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32  # numbers that share a scale and a zero point
    residual: int = 128  # how many of the newest entries stay, at most, at full precision

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not int:
                raise InputError(f"{KEY}.{field.name}", getattr(self, field.name), "is not a whole number.")
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in BITS:
                raise InputError(f"{KEY}.{name}", bits, "codes have 2, 4 or 8 bits.", "Use one of these.")
        if self.group < 1 or not self._fills_words(self.group):
            step = WORD // min(self.key_bits, self.value_bits)
            reason = f"a group's codes of {min(self.key_bits, self.value_bits)} bits must fill words of {WORD} bits."
            raise InputError(f"{KEY}.group", self.group, reason, f"Use a multiple of {step}.")
        if self.residual < 1 or self.residual % self.group:
            reason = "keys are quantised in blocks of this many tokens, which must be whole groups."
            near = max(1, self.residual // self.group) * self.group
            fix = f"Use a multiple of {KEY}.group={self.group}, such as {near}."
            raise InputError(f"{KEY}.residual", self.residual, reason, fix)

    def _fills_words(self, group: int) -> bool:
        return group * self.key_bits % WORD == 0 and group * self.value_bits % WORD == 0

    @property
    def label(self) -> str:
        if self.key_bits == self.value_bits:
            return f"kivi{self.key_bits}"
        return f"kivi-k{self.key_bits}v{self.value_bits}"

    @property
    def block(self) -> int:
        """Keys are coded this many at once: only there do more entries take fewer bytes."""
        return self.residual

    def prepared(self, setup: Setup) -> Kivi:
        """Itself; InputError where a layer's values cannot be cut into whole groups of channels."""
        dims = {layer.value_dim for layer in setup.layers if not layer.sliding}
        if all(dim % self.group == 0 for dim in dims):
            return self
        common = math.gcd(*dims)
        divisors = [group for group in range(1, common + 1) if common % group == 0]
        allowed = [group for group in divisors if self._fills_words(group) and self.residual % group == 0]
        shown = " and ".join(str(dim) for dim in sorted(dims))
        reason = f"values have {shown} channels in this model, which is not a whole number of groups."
        fix = f"Use {KEY}.group={' or '.join(str(group) for group in allowed)}."
        if not allowed:
            fix = f"No group fits with these bits: raise {KEY}.key_bits and {KEY}.value_bits, or use another codec."
        raise InputError(f"{KEY}.group", self.group, reason, fix)

    def __call__(
        self, layer: int, heads: Sequence[int], keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> LayerCache:
        """The cache of a layer from its entries [kv_heads, n, dim], sorted by position; ``room`` tokens will follow."""
        return KiviLayer(keys, values, self, room)


class KiviLayer:
    """Packed keys and values and the newest ones at full precision; of t entries:

    packed keys [kv_heads, key_dim, t - t mod R], groups along the tokens; full_keys [kv_heads, t mod R, key_dim];
    packed values [kv_heads, t - min(t, R), value_dim], groups along the channels; full_values
    [kv_heads, min(t, R), value_dim]. Between ``append`` and ``settle`` the full ones also hold the new tokens' entries.
    """

    compressed = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, codec: Kivi, room: int = 0) -> None:
        n, self.residual = keys.shape[1], codec.residual
        (packed_keys, packed_values), (last_keys, last_values) = self._packed_counts(n), self._packed_counts(n + room)
        self._keys = Packed(keys[:, :packed_keys].mT, 2, codec.key_bits, codec, last_keys)
        self._values = Packed(values[:, :packed_values], 1, codec.value_bits, codec, last_values)
        # clone: a view would keep all entries alive
        self._full_keys, self._full_values = keys[:, packed_keys:].clone(), values[:, packed_values:].clone()

    def _packed_counts(self, n: int) -> tuple[int, int]:
        """How many of n keys and of n values are stored in codes."""
        return n - n % self.residual, max(0, n - self.residual)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._full_keys = torch.cat([self._full_keys, keys], dim=1)
        self._full_values = torch.cat([self._full_values, values], dim=1)

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        keys = _joined(self._keys, self._full_keys, turned=True)
        values = _joined(self._values, self._full_values, turned=False)
        return causal_attention(query[None], keys[None], values[None], options)[0]

    def settle(self) -> None:
        """Packs whole blocks of R keys, and the values that are no longer among the last R."""
        new_keys, _ = self._packed_counts(self._full_keys.shape[1])
        _, new_values = self._packed_counts(self._full_values.shape[1])
        if new_keys > 0:
            self._keys.append(self._full_keys[:, :new_keys].mT)
            self._full_keys = self._full_keys[:, new_keys:].clone()
        if new_values > 0:
            self._values.append(self._full_values[:, :new_values])
            self._full_values = self._full_values[:, new_values:].clone()

    def copy(self) -> KiviLayer:
        twin = copy.copy(self)
        twin._keys, twin._values = self._keys.copy(), self._values.copy()
        twin._full_keys, twin._full_values = self._full_keys.clone(), self._full_values.clone()
        return twin

    def tensors(self) -> dict[str, torch.Tensor]:
        packed = {f"key_{name}": tensor for name, tensor in self._keys.tensors().items()}
        packed |= {f"value_{name}": tensor for name, tensor in self._values.tensors().items()}
        return {**packed, "full_keys": self._full_keys, "full_values": self._full_values}

    @property
    def entries(self) -> float:
        return float(self._keys.tokens + self._full_keys.shape[1])


def _joined(packed: Packed, full: torch.Tensor, turned: bool) -> torch.Tensor:
    """The entries [kv_heads, t, dim] of ``packed`` (with tokens last, if ``turned``), then those at full precision."""
    kv_heads, newest, dim = full.shape
    out = full.new_empty(kv_heads, packed.tokens + newest, dim)
    old = out[:, : packed.tokens]
    packed.unpack_into(old.mT if turned else old)
    out[:, packed.tokens :] = full
    return out


class Packed:
    """Numbers [kv_heads, rows, columns], quantised in groups along the columns, that grow along ``axis``, the tokens.

    For keys the tokens are the columns (axis 2), for values the rows (axis 1). ``tokens`` of them are stored, and there
    is room for ``capacity`` before a buffer has to be copied into a larger one.
    """

    def __init__(self, numbers: torch.Tensor, axis: int, bits: int, codec: Kivi, capacity: int) -> None:
        self.axis, self.bits, self.group, self.tokens = axis, bits, codec.group, 0
        # what is worked on at once ends, for keys, where a block ends: whole groups, whole words
        per_block = numbers.shape[0] * numbers.shape[3 - axis] * codec.residual
        self.step = max(1, AT_ONCE // per_block) * codec.residual
        nothing = quantise(numbers.narrow(axis, 0, 0), bits, self.group)
        rooms = self._lengths(capacity)
        self._parts = [Growing(part, axis, room) for part, room in zip(nothing, rooms, strict=True)]
        self.append(numbers)

    def _lengths(self, tokens: int) -> tuple[int, int, int]:
        """How long the words, the scales and the zero points of so many tokens are along the axis."""
        if self.axis == 1:
            return tokens, tokens, tokens
        return tokens * self.bits // WORD, tokens // self.group, tokens // self.group

    def append(self, numbers: torch.Tensor) -> None:
        for piece in numbers.split(self.step, self.axis):
            for part, new in zip(self._parts, quantise(piece, self.bits, self.group), strict=True):
                part.append(new)
        self.tokens += numbers.shape[self.axis]

    def unpack_into(self, out: torch.Tensor) -> None:
        """Writes the numbers, as far as the codes tell them, into ``out`` [kv_heads, rows, columns]."""
        lengths = self._lengths(self.step)
        parts = [part.filled.split(n, self.axis) for part, n in zip(self._parts, lengths, strict=True)]
        for target, words, scale, zero in zip(out.split(self.step, self.axis), *parts, strict=True):
            target.copy_(dequantise(words, scale, zero, self.bits, self.group))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: part.filled for name, part in zip(("codes", "scale", "zero"), self._parts, strict=True)}

    def copy(self) -> Packed:
        twin = copy.copy(self)
        twin._parts = [part.copy() for part in self._parts]
        return twin


class Growing:
    """A tensor that grows along ``axis`` inside a buffer, so that what it holds is not copied at every step."""

    def __init__(self, start: torch.Tensor, axis: int, room: int) -> None:
        self.axis, self.length = axis, start.shape[axis]
        shape = list(start.shape)
        shape[axis] += room
        self._buffer = start.new_zeros(shape)
        self.filled.copy_(start)

    @property
    def filled(self) -> torch.Tensor:
        return self._buffer.narrow(self.axis, 0, self.length)

    def append(self, more: torch.Tensor) -> None:
        new = more.shape[self.axis]
        if self.length + new > self._buffer.shape[self.axis]:
            self._buffer = Growing(self.filled, self.axis, max(new, self.length // 2))._buffer
        self._buffer.narrow(self.axis, self.length, new).copy_(more)
        self.length += new

    def copy(self) -> Growing:
        return Growing(self.filled, self.axis, self._buffer.shape[self.axis] - self.length)


def quantise(numbers: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes int32 [..., n * bits / 32], scales and zero points [..., n / group] of numbers [..., n].

    The arithmetic is in the numbers' dtype, step by step as in the authors' code: another one gives other codes.
    """
    groups = numbers.unflatten(-1, (numbers.shape[-1] // group, group))
    zero, largest = groups.amin(-1), groups.amax(-1)
    top = 2**bits - 1
    scale = (largest - zero) / top
    codes = (groups - zero[..., None]).div_(scale[..., None]).clamp_(0, top).round_()
    codes.masked_fill_(scale[..., None] == 0, 0)  # equal numbers: 0 / 0
    return pack(codes.flatten(-2), bits), scale, zero


def dequantise(words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The numbers in fp32 [..., n] from packed codes [..., n * bits / 32], scales and zero points [..., n / group]."""
    codes = unpack(words, bits).unflatten(-1, (scale.shape[-1], group))
    return codes.mul(scale.float()[..., None]).add_(zero.float()[..., None]).flatten(-2)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words [..., n * bits / 32] of whole codes [..., n]; a word's first code is in its lowest bits."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=codes.device)
    codes = codes.to(torch.int32).unflatten(-1, (codes.shape[-1] // len(shifts), len(shifts)))
    # codes do not overlap, so their sum is their union; the highest may take the sign bit
    return (codes << shifts).sum(-1, dtype=torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 codes [..., n] from words [..., n * bits / 32]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    # >> repeats the sign bit to its left: the mask takes it away
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
