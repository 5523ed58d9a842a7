"""How much each KV head looks beyond sinks and a recent window, measured on the model: for ``HeadClasses``.

The texts are sentences that every CPython carries (the topics of ``help()``), shuffled by the seed, with passkeys of
number words planted in their first part. At the end they are asked for and given again; those last tokens are the
queries observed. What a head's output there loses when it may see only sinks and the recent window is its importance.

This is not how DuoAttention (arXiv 2410.10819, section 2.2) finds its heads. There, a gate per head mixes full and
streaming attention, and the gates are optimised by gradient descent through the whole model on such texts (thousands of
steps, up to 128k tokens), against the distance of its last hidden states. Here, every head is looked at by itself, in
one forward pass per text: what it loses is not weighed by what later layers make of it. Where the authors publish a
pattern for the model, prefer it.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.engine.attention import AttentionOptions, causal_attention
from kvbench.engine.engine import Engine
from kvbench.engine.streaming import Band, band_attention
from kvbench.errors import InputError
from kvbench.models.hashing import cache_root, sha256_json
from kvbench.results.files import parse_strict, strict_json, write_whole
from kvbench.tasks.haystack import pydoc_haystack
from kvbench.tasks.sample import Sample

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup
    from kvbench.prompts import PromptEncoder

log = logging.getLogger(__name__)

Matrix = tuple[tuple[float, ...], ...]  # one row per layer, one number per KV head

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = ("first", "second", "third")
WORDS = 8  # number words of a passkey
DEPTHS = (0.05, 0.6)  # between which passkeys are planted: out of the recent window's sight at the end
LARGEST_SHARE = 4  # sinks and recent window are at most one part in so many of a text
SCHEME = 1  # part of what a cached result is found by: raise it when the texts or the measure change


@dataclass(frozen=True)
class Calibration:
    """On what and against which window heads are measured."""

    texts: int
    tokens: int  # of each text, at most
    seed: int
    band: Band


@dataclass(frozen=True)
class CalibrationText:
    """Token ids, of which the last ``observed`` repeat the passkeys."""

    ids: tuple[int, ...]
    observed: int


def calibrated(setup: Setup, calibration: Calibration) -> Matrix:
    """The importance of every KV head of every compressed layer, from the cache or measured now and kept there.

    The cache is ``head_classes`` in ``$KVBENCH_CACHE``; a result is found by the model's content and dtype, the texts'
    token ids and the band. Its files can be given as ``method.allocator.path``.
    """
    limit = getattr(setup.engine.model.config.get_text_config(), "max_position_embeddings", None)
    tokens = min(calibration.tokens, limit or calibration.tokens)
    band = scaled(calibration.band, tokens)
    texts = [make_text(setup.encoder, tokens, calibration.seed, index) for index in range(calibration.texts)]
    identity = [SCHEME, setup.model_sha256, str(setup.engine.model.dtype), band.sinks, band.recent]
    key = sha256_json([*identity, [[text.ids, text.observed] for text in texts]])
    file = cache_root() / "head_classes" / f"{key}.json"
    found = _read(file)
    if found is None or [len(row) for row in found] != [at.kv_heads for at in setup.layers if not at.sliding]:
        log.info("measuring the heads of the model on %d texts of up to %d tokens (once; kept in %s)",
                 calibration.texts, tokens, file)  # fmt: skip
        found = measure(setup.engine, texts, band)
        _write(file, found)
    return found


def scaled(band: Band, tokens: int) -> Band:
    """The band, shrunk in proportion where the text is too short for it to leave most of the text out of sight."""
    most = max(2, tokens // LARGEST_SHARE)
    if band.size <= most:
        return band
    sinks = band.sinks * most // band.size
    return Band(sinks, most - sinks)


def make_text(encoder: PromptEncoder, tokens: int, seed: int, index: int) -> CalibrationText:
    """Text number ``index``: as many whole sentences as fit in ``tokens``, without a chat template.

    It depends on the seed and the index alone. Raises InputError where not even the passkeys fit.
    """
    rng = random.Random(f"head classes {seed} {index}")
    units = list(pydoc_haystack().units)
    rng.shuffle(units)
    keys = [f"The {name} passkey: {' '.join(rng.choices(DIGITS, k=WORDS))}. " for name in NAMES]
    low, high = DEPTHS
    depths = [low + (high - low) * (i + rng.random()) / len(keys) for i in range(len(keys))]

    def sample(sentences: int) -> Sample:
        hay = [units[i % len(units)] for i in range(sentences)]
        for depth, key in reversed(list(zip(depths, keys, strict=True))):  # the last first: places before it stay
            hay.insert(round(depth * sentences), f"Remember this. {key}")
        return Sample("", "".join(hay), "\n\nRepeat all passkeys. ", (), answer_prefix="".join(keys).rstrip())

    def count(sentences: int) -> int:
        return encoder.count(sample(sentences), chat=False)

    bare = count(0)
    if bare > tokens:
        reason = (
            f"the passkeys of a text and their repetition take {bare} tokens; the model or the setting allows less."
        )
        raise InputError("method.allocator.tokens", tokens, reason, "Allow more, or give method.allocator.path.")
    most = 1
    while count(most) <= tokens:
        most *= 2
    fitting = bisect_right(range(most), tokens, key=count) - 1
    prompt = encoder.encode(sample(fitting), chat=False, limit=tokens)
    return CalibrationText((*prompt.context_ids, *prompt.question_ids), prompt.tail_tokens)


class CalibrationPass:
    """Full causal attention, and beside it what the last queries lose when they see a band of the keys only."""

    def __init__(self, observed: int, band: Band) -> None:
        self.observed, self.band = observed, band
        self.lost: dict[int, torch.Tensor] = {}  # layer -> fp32 [kv_heads]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        out = causal_attention(query, key, value, options)
        if options.sliding_window is None:
            self.lost[layer] = self._lost(out, query, key, value, options)
        return out

    def _lost(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """fp32 [kv_heads]: ||full - banded|| / ||full||, the mean over observed queries and a KV head's query heads.

        query, out [1, query_heads, n, dim]; key, value [1, kv_heads, n, dim].
        """
        first = query.shape[2] - self.observed
        sinks = key[:, :, : self.band.sinks], value[:, :, : self.band.sinks]
        banded = band_attention(query[:, :, first:], key, value, sinks, self.band, 0, options).float()
        full = out[:, :, first:].float()
        lost = (full - banded).norm(dim=-1) / full.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return lost.view(key.shape[1], -1).mean(-1)


@torch.inference_mode()
def measure(engine: Engine, texts: list[CalibrationText], band: Band) -> Matrix:
    """The importance of every KV head of every layer that is compressed: the mean over the texts."""
    forward: Any = engine._forward
    lost: list[torch.Tensor] = []  # of each text, [heads of all layers]
    heads: list[int] = []
    for text in texts:
        current = CalibrationPass(text.observed, band)
        ids = torch.tensor([text.ids], device=engine.device)
        forward(current, ids, torch.arange(len(text.ids), device=engine.device)[None])
        layers = [current.lost[index] for index in sorted(current.lost)]
        heads = [layer.numel() for layer in layers]
        lost.append(torch.cat(layers).cpu() if layers else torch.zeros(0))
    mean = torch.stack(lost).double().mean(0)
    if not bool(torch.isfinite(mean).all()):
        raise InputError(
            "dtype", str(engine.model.dtype), "the model's attention is not finite on the texts that head classes are "
            "measured on.", "Use another dtype, or give head classes in method.allocator.path.",
        )  # fmt: skip
    return tuple(tuple(row.tolist()) for row in mean.split(heads))


def _read(file: Path) -> Matrix | None:
    try:
        return tuple(tuple(float(number) for number in row) for row in parse_strict(file.read_bytes()))
    except (OSError, ValueError, TypeError):  # missing or not ours: it is measured anew
        return None


def _write(file: Path, matrix: Matrix) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, strict_json(matrix) + b"\n")
    except OSError as error:  # a cache that cannot be written costs time, not the run
        log.warning("the measured head classes were not kept: %s", error)
