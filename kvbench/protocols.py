"""The experiment: what is captured, what may be evicted and what is fed, for every protocol and switch.

- ``blind``: prefill the context; compress; feed the question through the compressed cache; decode.
- ``aware``: prefill context and question; compress; decode. The scores have seen the question.
- ``swapped``: prefill the context and another question; compress; drop that question; feed the real one; decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvbench.budget import Budget
from kvbench.engine import Cache, Capture, Engine, Needs
from kvbench.engine.rotation import Rotation
from kvbench.engine.streaming import Streamed
from kvbench.errors import SampleError
from kvbench.methods import Compressed, Method, Region
from kvbench.streamed_start import compressed as compressed_stream
from kvbench.streamed_start import is_streamed, read


@dataclass(frozen=True)
class Switches:
    """The switches of a cell, as in the configuration."""

    protocol: str  # blind | aware | swapped
    budget_scope: str = "context"  # context | prompt
    question_evictable: bool = False
    first_token: str = "compressed"  # compressed | full


@dataclass(frozen=True)
class Plan:
    """What the switches mean for one prompt."""

    captured: tuple[int, ...]  # tokens captured after the context: the question, another question, or none
    region: Region
    budget: int  # entries per KV head of the evictable region
    fed: tuple[int, ...]  # prompt tokens that go through the compressed cache
    first_from_full: bool  # the first answer token comes from the uncompressed prompt


def plan(
    switches: Switches, context: int, question: Sequence[int], other: Sequence[int] | None, budget: Budget
) -> Plan:
    """The plan for a context of ``context`` tokens, a question and (swapped) another question about that context.

    Budget scope ``prompt`` counts every prompt token. Where the question is not evictable, its entries are taken off
    the context's share, so that all protocols start decoding at the same size; SampleError if nothing is left.
    """
    asked, full = tuple(question), switches.first_token == "full"
    evictable = context
    if switches.protocol == "aware" and switches.question_evictable:
        evictable = context + len(asked)
    in_scope = context + len(asked) if switches.budget_scope == "prompt" else context
    entries = budget.entries(in_scope) if in_scope else 0
    if switches.budget_scope == "prompt" and evictable == context:
        entries -= len(asked)
        if entries < 1 and context:
            raise SampleError(
                f"budget={budget} leaves nothing for the context: the question alone takes {len(asked)} entries "
                "(budget_scope=prompt, question_evictable=false)"
            )
    if switches.protocol == "aware":
        fed = () if full else asked[-1:]
        region = Region(evictable, context + len(asked) - len(fed), len(fed), again=len(fed))
        return Plan(asked, region, entries, fed, full)
    captured = tuple(other or ()) if switches.protocol == "swapped" else ()
    return Plan(captured, Region(context, context, len(asked)), entries, asked, full)


@dataclass
class ContextRun:
    """One context's capture and its blind compression, shared by all cells and all questions about it.

    The context is prefilled once, alone, and each question extends it, so that what is stored of a context does not
    depend, not even in its rounding, on what follows it or on which cells share it. (The exception is the full cache of
    an aware sample whose context nobody shares: there one pass reads both.)
    """

    engine: Engine
    ids: tuple[int, ...]
    needs: Needs
    shared: bool = False  # do other questions about the context exist?
    cells: int = 1  # how many cells use each capture
    prefill_s: float = 0.0
    _capture: Capture | None = None
    _extended: dict[tuple[int, ...], tuple[Capture, float]] = field(default_factory=dict)
    _scores: dict[tuple[str, tuple[int, ...]], tuple[list[torch.Tensor], float]] = field(default_factory=dict)
    _streamed: tuple[tuple[int, tuple[int, ...], int], tuple[Streamed, int]] | None = None
    _blind: dict[tuple[int, int, int], Compressed] = field(default_factory=dict)

    def context(self) -> Capture:
        """The capture of the context alone."""
        if self._capture is None:
            started = self.now()
            self._capture = self.engine.prefill(self.ids, self.needs)
            self.prefill_s = self.now() - started
        return self._capture

    def capture(self, following: tuple[int, ...], one_pass: bool = False) -> tuple[Capture, float]:
        """The capture of the context followed by these tokens, and the seconds that it cost (the context's included).

        A context that is prefilled already is not prefilled again; its seconds are those it cost when it was.
        """
        if one_pass:
            started = self.now()
            capture = self.engine.prefill((*self.ids, *following), context=len(self.ids))
            return capture, self.now() - started
        context = self.context()
        if not following:
            return context, self.prefill_s
        if following in self._extended:
            return self._extended[following]
        started = self.now()
        capture = self.engine.extend(context, following, self.needs)
        extended = capture, self.prefill_s + self.now() - started
        if self.cells > 1:
            self._extended[following] = extended
        return extended

    def scores(self, method: Method, plan: Plan, capture: Capture) -> tuple[list[torch.Tensor] | None, float]:
        """The method's scores, computed once for all cells with its scorer, and the seconds that this call saved.

        None where they need not be kept: the method then computes them itself, if at all.
        """
        if self.cells == 1 or not method.scorer_settings or plan.budget >= plan.region.evictable:
            return None, 0.0
        key = method.scorer_settings, plan.captured
        if key in self._scores:
            return self._scores[key]
        started = self.now()
        scores = method.scores(capture, plan.region)
        self._scores[key] = scores, self.now() - started
        return scores, 0.0

    def streamed(
        self, method: Method, ids: tuple[int, ...], budget: int, rotation: Rotation | None
    ) -> tuple[Streamed, int]:
        """The text read through sinks and a recent window; read once for all questions that see the same text."""
        key = id(method), ids, budget
        if self._streamed is None or self._streamed[0] != key:
            self._streamed = key, read(self.engine, method, ids, budget, rotation)
        return self._streamed[1]

    def release(self) -> None:
        """Lets go of what this question needed, and of all where there is no other; it would be computed again."""
        self._extended.clear()
        self._scores = {key: scores for key, scores in self._scores.items() if self.shared and not key[1]}
        if not self.shared:
            self._capture = self._streamed = None

    def now(self) -> float:
        """Seconds, once the device has done what it was asked to do."""
        synchronise(self.engine.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Start:
    """A sample ready to decode in one cell, with what has been measured so far."""

    cache: Cache
    logits: torch.Tensor  # [vocabulary]: the first answer token is their argmax
    compressed: Compressed
    fingerprint: str  # of the compressed cache, before anything was fed to it
    prefill_s: float
    compress_s: float
    feed_s: float
    bytes_full: int


def start(
    run: ContextRun,
    method: Method,
    plan: Plan,
    question: Sequence[int],
    room: int,
    rotation: Rotation | None = None,
    keep: bool = True,
) -> Start:
    """Captures, compresses and feeds, up to the logits of the first answer token.

    ``room`` is the number of answer tokens to set space aside for. Where the context is shared, its blind compressed
    cache is kept for the next question and this one works on a copy; not so without ``keep`` (a budget that is only
    tried, or that depends on the question).
    """
    engine, asked = run.engine, tuple(question)
    if is_streamed(method, plan.region, plan.budget):
        return _start_streamed(run, method, plan, asked, room, rotation)
    # A method that stores everything unchanged need not feed again what prefill has computed: in the aware protocol the
    # last token's entry and the logits after it are taken over from the capture, as in plain generation, which is one
    # pass where nobody else needs the context. Blind must not: its context is computed without the question.
    adopt = method.lossless and plan.captured == asked
    capture, prefill_s = run.capture(plan.captured, one_pass=adopt and not run.shared)
    first: torch.Tensor | None = None
    if plan.first_from_full and not adopt:
        if plan.captured == asked:
            first = capture.logits
        else:
            full, more = run.capture(asked)
            first, prefill_s = full.logits, prefill_s + more
    before = run.now()
    compressed, saved = _compress(run, method, plan, capture, room + len(plan.fed), rotation, keep)
    compressed_at = run.now()
    cache = compressed.cache
    check_entries(compressed, plan.region)
    fingerprint = cache.fingerprint()
    fed_from = run.now()
    if adopt:
        adopt_entries(cache, capture)
        logits = capture.logits
    else:
        logits = engine.feed(cache, plan.fed) if plan.fed else None
    fed_at = run.now()
    logits = logits if first is None else first
    if logits is None:
        raise SampleError("nothing to feed: the prompt is empty")
    return Start(
        cache=cache,
        logits=logits,
        compressed=compressed,
        fingerprint=fingerprint,
        prefill_s=prefill_s,
        compress_s=compressed_at - before + saved,
        feed_s=fed_at - fed_from,
        bytes_full=capture.nbytes(len(run.ids) + len(question)),
    )


def _start_streamed(
    run: ContextRun, method: Method, plan: Plan, asked: tuple[int, ...], room: int, rotation: Rotation | None
) -> Start:
    """The same for a method that has no full prefill: the text is streamed, what is left of the question is fed."""
    evictable = plan.region.evictable > len(run.ids)
    fed = asked[-1:] if evictable else asked
    ids = (*run.ids, *asked[:-1]) if evictable else run.ids
    started = run.now()
    streamed, sinks = run.streamed(method, ids, plan.budget, rotation)
    read_at = run.now()
    on_top = 0 if evictable else len(asked)
    made = compressed_stream(method, streamed, sinks, plan.budget, on_top, room + len(fed), rotation)
    fingerprint = made.cache.fingerprint()
    fed_from = run.now()
    logits = run.engine.feed(made.cache, fed) if fed else streamed.logits
    if logits is None:
        raise SampleError("nothing to feed: the prompt is empty")
    full = Capture(streamed.layers, streamed.tokens, None).nbytes(len(run.ids) + len(asked))
    return Start(
        cache=made.cache,
        logits=logits,
        compressed=made,
        fingerprint=fingerprint,
        prefill_s=read_at - started,
        compress_s=fed_from - read_at,
        feed_s=run.now() - fed_from,
        bytes_full=full,
    )


def adopt_entries(cache: Cache, capture: Capture) -> None:
    """Adds to an uncompressed cache the captured entries that it lacks, up to the capture's last token."""
    for held, layer in zip(cache.layers, capture.layers, strict=True):
        held.append(layer.keys[:, cache.next_position :], layer.values[:, cache.next_position :])
        held.settle()
    cache.next_position = capture.tokens


def _compress(
    run: ContextRun, method: Method, plan: Plan, capture: Capture, room: int, rotation: Rotation | None, keep: bool
) -> tuple[Compressed, float]:
    """The compressed cache, and the seconds that scores known from another cell have saved."""
    key = (id(method), plan.budget, plan.region.fed)
    reused = run.shared and keep and not plan.captured
    if reused and key in run._blind:
        kept = run._blind[key]
        return Compressed(kept.cache.copy(), kept.kept, kept.positions, kept.note), 0.0
    scores, saved = run.scores(method, plan, capture)
    made = method.compress(capture, plan.region, plan.budget, room, rotation, scores)
    if reused:
        run._blind[key] = made
        made = Compressed(made.cache.copy(), made.kept, made.positions, made.note)
    return made, saved


def check_entries(compressed: Compressed, region: Region) -> None:
    """Every compressed layer holds exactly the promised entries; a cache that was left uncompressed is an error."""
    layers = [layer for layer in compressed.cache.layers if layer.compressed]
    for layer, kept in zip(layers, compressed.kept, strict=True):
        promised = kept + region.stored - region.evictable
        if abs(layer.entries - promised) > 1e-6:
            raise SampleError(f"a layer holds {layer.entries:g} entries per KV head where {promised:g} were promised")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def window_question_tokens(switches: Switches, window: int, question: int, tail: int) -> int | None:
    """How many of the scoring window's tokens belong to the question itself, not to the template's tail or the context.

    None where a method has no window or its scores do not see the question.
    """
    if not window or switches.protocol != "aware":
        return None
    return max(0, min(window, question) - tail)
