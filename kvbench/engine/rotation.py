"""Re-rotation of stored keys, for positions counted within the cache (StreamingLLM, section 3.2).

A key rotated for position p becomes the key for position p' by a rotation through p' - p. How a layer rotates (which
frequencies, which pairs of dimensions, not at all) differs between models, so it is not assumed but found out: a lone
token's keys depend on its position by rotation only, in every layer, so the frequencies that turn its keys at one
position into those at another are the layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import InputError

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine

PROBE_POSITIONS = (0, 37)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class LayerRotation:
    """How one layer rotates the first ``2 * len(frequencies)`` dimensions of its keys."""

    frequencies: torch.Tensor  # [pairs], radians per position, fp32
    interleaved: bool  # pairs are (0, 1), (2, 3), ... instead of (0, r/2), (1, r/2 + 1), ...

    def turn(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """keys [heads, m, dim] turned through ``by`` [heads, m] positions (may be negative)."""
        angle = by[..., None].float() * self.frequencies.to(keys.device)  # [heads, m, pairs]
        return self._turned(keys, angle.cos(), angle.sin())

    def mean_turn(self, vectors: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """vectors [..., dim], the mean of their turns through ``first``, ``first + 1``, ... (``count`` of them)."""
        at = torch.arange(first, first + count, device=vectors.device, dtype=torch.float32)
        angle = at[:, None] * self.frequencies.to(vectors.device)  # [count, pairs]
        return self._turned(vectors, angle.cos().mean(0), angle.sin().mean(0))

    def _turned(self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated = 2 * self.frequencies.numel()
        part, rest = vectors[..., :rotated].float(), vectors[..., rotated:]
        if self.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        return torch.cat([joined.to(vectors.dtype), rest], dim=-1)


@dataclass(frozen=True)
class Rotation:
    """The rotation of every layer; None where a layer's keys do not depend on their position."""

    layers: tuple[LayerRotation | None, ...]

    def turn(self, layer: int, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """keys [heads, m, dim] of a layer, moved by ``by`` [heads, m] positions."""
        rotation = self.layers[layer]
        return keys if rotation is None else rotation.turn(keys, by)


def discover(engine: Engine) -> Rotation:
    """The rotation of every layer of the engine's model.

    Raises InputError where keys cannot be moved: learned positions, or frequencies that change with the length of the
    text (dynamic NTK, LongRoPE).
    """
    changing = length_dependent(engine.model.config)
    if changing:
        raise refused(f"its RoPE type {changing!r} changes with the length of the text")
    start, end = (engine.lone_token_keys(position) for position in PROBE_POSITIONS)
    found = {
        name: buffer.float()
        for name, buffer in engine.model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1
    }
    layers = [match(a, b, list(found.values()), index) for index, (a, b) in enumerate(zip(start, end, strict=True))]
    return Rotation(tuple(layers))


def match(start: torch.Tensor, end: torch.Tensor, found: list[torch.Tensor], index: int) -> LayerRotation | None:
    """The rotation that turns a layer's keys [heads, 1, dim] at the first probe position into those at the second."""
    tolerance = TOLERANCE[start.dtype] * end.float().abs().max()
    by = torch.full(start.shape[:2], PROBE_POSITIONS[1] - PROBE_POSITIONS[0], device=start.device)

    def error(keys: torch.Tensor) -> torch.Tensor:
        return (keys.float() - end.float()).abs().max()

    if error(start) <= tolerance:
        return None
    candidates = [
        LayerRotation(frequencies, interleaved)
        for frequencies in found
        if 2 * frequencies.numel() <= start.shape[-1]
        for interleaved in (False, True)
    ]
    errors = [error(candidate.turn(start, by)) for candidate in candidates]
    best = min(range(len(errors)), key=lambda i: float(errors[i]), default=None)
    if best is None or errors[best] > tolerance:
        raise refused(f"the keys of layer {index} do not depend on their position by a rotation that it knows")
    return candidates[best]


def length_dependent(config: Any) -> str | None:
    """The RoPE type, if one is configured whose frequencies depend on the length of the text."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for settings in (parameters, *nested):
        kind = settings.get("rope_type", settings.get("type"))
        if kind in ("dynamic", "longrope"):
            return kind
    return None


def refused(reason: str) -> InputError:
    return InputError(
        "positions", "compact", f"this model's stored keys cannot be moved: {reason}.", "Use positions=original."
    )
