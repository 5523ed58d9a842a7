"""Budgets are kept and bytes are real, whatever the allocator, the codec, the heads, the layers and the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine import Capture, LayerCapture, Needs
from kvbench.engine.attention import AttentionOptions
from kvbench.methods import Compressed, Method, Protect, Region
from kvbench.methods.allocators import Adaptive, Allocator, Global, PerHead, PerLayer, Pyramid, Uniform
from kvbench.methods.codecs import Plain
from kvbench.methods.head_classes import HeadClasses
from kvbench.methods.kivi import Kivi

DIM, GROUP, RESIDUAL, WINDOW = 16, 16, 16, 8
CODECS = (Plain(), Kivi(group=GROUP, residual=RESIDUAL))
ALLOCATORS = ("uniform", "per_layer", "per_head", "pyramid", "adaptive", "global", "head_classes")
SCORES = ("random", "few levels", "equal", "zero", "negative")


@dataclass(frozen=True)
class Given:
    """A scorer whose scores were drawn before: one tensor [kv_heads, n] per layer."""

    scores: tuple[torch.Tensor, ...]

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        return self.scores[layer.index]


@dataclass(frozen=True)
class Trial:
    """One method on one made-up capture."""

    method: Method
    capture: Capture
    region: Region
    budget: int
    heads: int
    weights: tuple[int, ...]  # of PerLayer and PerHead

    @property
    def whole(self) -> list[LayerCapture]:
        return [layer for layer in self.capture.layers if layer.options.sliding_window is None]

    def compressed(self) -> Compressed:
        return self.method.compress(self.capture, self.region, self.budget, room=3)


@st.composite
def trials(draw: Callable) -> Trial:
    heads, group, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    evictable, on_top, dropped = draw(st.integers(1, 80)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    sliding = draw(st.booleans())  # a layer between them that is passed through
    tokens, sinks, recent = evictable + on_top + dropped, draw(st.integers(0, 4)), draw(st.integers(1, 6))
    kind, torch_seed = draw(st.sampled_from(SCORES)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(torch_seed)
    captured = []
    for index in range(layers + sliding):
        options = AttentionOptions(DIM**-0.5, sliding_window=WINDOW if sliding and index == layers // 2 else None)
        keys, values = torch.randn(2, heads, tokens, DIM, generator=generator).to(draw(DTYPES)).unbind()
        queries = torch.randn(heads * group, 1, DIM, generator=generator)
        captured.append(LayerCapture(keys, values, queries, options, index, seed=0))
    drawn = tuple(made_scores(kind, heads, tokens, generator) for _ in captured)
    name = draw(st.sampled_from(ALLOCATORS))
    count = layers if name == "per_layer" else heads
    weights = tuple(draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)))
    importance = tuple(tuple(row) for row in torch.rand(layers, heads, generator=generator).tolist())
    allocators: dict[str, Allocator] = {
        "uniform": Uniform(),
        "per_layer": PerLayer(weights),
        "per_head": PerHead(weights),
        "pyramid": Pyramid(recent, draw(st.integers(1, 30))),
        "adaptive": Adaptive(recent, draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])), draw(st.booleans())),
        "global": Global(sinks, recent),
        "head_classes": HeadClasses(sinks=sinks, recent=recent, importance=importance),
    }
    method = Method(name, Given(drawn), allocators[name], Protect(sinks, recent), draw(st.sampled_from(CODECS)))
    budget = draw(st.integers(1, evictable + 2))
    region = Region(evictable, evictable + on_top)
    return Trial(method, Capture(tuple(captured), tokens, None), region, budget, heads, weights)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def made_scores(kind: str, heads: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    scores = torch.rand(heads, tokens, generator=generator)
    made = {"few levels": (scores * 3).floor(), "equal": torch.ones_like(scores), "zero": torch.zeros_like(scores)}
    return made.get(kind, -scores if kind == "negative" else scores)


@settings(max_examples=400, deadline=None)
@given(trial=trials())
def test_exactly_the_promised_entries_are_kept(trial: Trial) -> None:
    made, n = trial.compressed(), trial.region.evictable
    on_top = list(range(n, trial.region.stored))
    counts = []  # of every layer, per KV head
    for layer in trial.whole:
        kept = [head.tolist() for head in made.positions[layer.index]]
        for head in kept:
            assert head == sorted(set(head)), "ascending, each once"
            assert head[len(head) - len(on_top) :] == on_top, "what is stored on top of the budget"
        counts.append([sum(at < n for at in head) for head in kept])
    nothing_evicted = trial.budget >= n or trial.method.protect.sinks + trial.method.protect.recent >= n
    if nothing_evicted:
        assert made.note
        assert counts == [[n] * trial.heads] * len(counts)
    else:
        promised_counts(trial, counts)
    means = [sum(row) / len(row) for row in counts]
    assert list(made.kept) == means
    assert abs(made.cache.entries() - sum(means) / len(means) - len(on_top)) < 1e-9


def promised_counts(trial: Trial, counts: list[list[int]]) -> None:
    """What each allocator's docstring says of the counts [layers][kv_heads]."""
    name, budget, n, layers = trial.method.name, trial.budget, trial.region.evictable, len(counts)
    flat = [count for row in counts for count in row]
    assert min(flat) >= 1 and max(flat) <= n
    if name in ("uniform", "pyramid", "per_layer"):
        assert all(len(set(row)) == 1 for row in counts), "one count in all heads of a layer"
    if name == "uniform":
        assert set(flat) == {budget}
    if name == "adaptive":
        assert {sum(row) for row in counts} == {budget * trial.heads}, "exact in every layer"
    if name == "per_head":
        expected = shares(trial.weights, budget * trial.heads)
        assert counts == [[min(n, max(1, share)) for share in expected]] * layers
    if name == "per_layer":
        expected = shares(trial.weights, budget * layers)
        assert [row[0] for row in counts] == [min(n, max(1, share)) for share in expected]
    if name in ("uniform", "pyramid", "adaptive", "global", "head_classes"):
        assert sum(flat) == budget * len(flat), "the mean over layers and heads is the budget"
    if name == "pyramid":
        assert all(above[0] >= below[0] - 1 for above, below in pairwise(counts))


def shares(weights: tuple[int, ...], whole: int) -> list[int]:
    """``whole`` in proportion to the weights: the whole parts, then one more for the first ones until it is met."""
    parts = [floor(Fraction(whole * weight, sum(weights))) for weight in weights]
    left = whole - sum(parts)
    return [part + (at < left) for at, part in enumerate(parts)]


@settings(max_examples=200, deadline=None)
@given(trial=trials())
def test_protected_entries_survive_ties(trial: Trial) -> None:
    """Sinks and recent entries stay by index wherever a head has room for them, and the newest one always."""
    made, n, protect = trial.compressed(), trial.region.evictable, trial.method.protect
    protected = {*range(min(protect.sinks, n)), *range(max(0, n - protect.recent), n)}
    both = protect.sinks + protect.recent
    guaranteed = {"uniform": both, "global": both, "head_classes": both, "pyramid": protect.recent}
    guaranteed["adaptive"] = min(protect.recent, trial.budget - 1)  # one entry is left to share out
    for layer in trial.whole:
        for head in made.positions[layer.index]:
            kept = {at for at in head.tolist() if at < n}
            assert n - 1 in kept
            assert len(kept) >= min(n, trial.budget, guaranteed.get(trial.method.name, 1))
            if len(kept) >= len(protected):
                assert protected <= kept


@settings(max_examples=200, deadline=None)
@given(trial=trials())
def test_bytes_are_those_of_the_tensors_held(trial: Trial) -> None:
    made = trial.compressed()
    held = [tensor for layer in made.cache.layers for tensor in layer.tensors().values()]
    assert made.cache.nbytes() == sum(tensor.element_size() * tensor.numel() for tensor in held)
    assert made.cache.nbytes("host") == 0
    expected = 0
    for layer in trial.capture.layers:
        size = layer.keys.element_size()
        if layer.options.sliding_window is not None:
            expected += 2 * trial.heads * min(trial.region.stored, WINDOW - 1) * DIM * size
            continue
        lengths = [len(head) for head in made.positions[layer.index]]
        if isinstance(trial.method.codec, Plain):
            ragged = len(set(lengths)) > 1  # then the lengths are stored as well
            expected += sum(2 * length * DIM * size for length in lengths) + ragged * 8 * len(lengths)
        else:
            expected += sum(kivi_bytes(length, size) for length in lengths)
    assert made.cache.nbytes() == expected


def kivi_bytes(entries: int, size: int) -> int:
    """One KV head's entries at 2 bits: codes, a scale and a zero point per group, the newest ones as they are."""
    keys, values = entries - entries % RESIDUAL, max(0, entries - RESIDUAL)
    coded = (keys + values) * DIM
    return coded * 2 // 8 + coded // GROUP * 2 * size + (2 * entries - keys - values) * DIM * size
