"""The rules that must always hold, over all methods and protocols, on tiny models with initializer range 0.2."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from kvbench.engine import Engine, Needs
from kvbench.engine.attention import NAME
from kvbench.methods import Region
from kvbench.methods.allocators import PerHead, PerLayer
from kvbench.protocols import ContextRun, Switches
from tests.cells import APPROXIMATE, EVICTING, METHODS, PROTOCOLS, answer, begin, fitted, method, text
from tests.models.tiny_configs import build
from tests.oracle import generate, kept_mask, masked_logits

ARCHITECTURES = ["llama", "qwen3", "gemma3_text"]
CONTEXT, QUESTION, OTHER = text(70, 5), text(7, 6), text(11, 7)
SWITCHES = [
    Switches(protocol, scope, evictable, first)
    for protocol, scope, evictable, first in product(
        PROTOCOLS, ("context", "prompt"), (False, True), ("compressed", "full")
    )
    if not (evictable and scope == "context")
]
NAMES = [
    f"{s.protocol}-{s.budget_scope}-{'evictable-' if s.question_evictable else ''}{s.first_token}" for s in SWITCHES
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(build(request.param))


@pytest.fixture(scope="module")
def reference(engine: Engine) -> list[int]:
    tokens = generate(engine.model, CONTEXT + QUESTION, 10)
    engine.model.set_attn_implementation(NAME)
    return tokens


# Rule 1: full is full


@pytest.mark.parametrize("switches", SWITCHES, ids=NAMES)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in APPROXIMATE])
def test_a_budget_of_at_least_the_prompt_gives_the_tokens_of_generate(
    name: str, switches: Switches, engine: Engine, reference: list[int]
) -> None:
    for budget in ("full", len(CONTEXT) + len(QUESTION), 10_000):
        if name not in EVICTING and budget != "full":
            continue
        started = begin(
            engine, method(name), CONTEXT, QUESTION, switches, budget, OTHER, compact=name == "streamingllm"
        )
        assert answer(engine, started, 10) == reference
        assert started.compressed.note  # the record says why nothing was evicted


# Rule 2: blind is blind


@pytest.mark.parametrize("name", METHODS)
def test_a_blind_cache_does_not_depend_on_the_question(name: str, engine: Engine) -> None:
    questions = [text(10, 20), text(10, 40)]
    seen = []
    for order in (questions, questions[::-1]):
        run = ContextRun(engine, tuple(CONTEXT), fitted(method(name), engine).needs, shared=True)
        for question in order:
            started = begin(engine, method(name), CONTEXT, question, Switches("blind"), 20, run=run)
            seen.append((tuple(question), started.fingerprint, tuple(answer(engine, started, 6))))
    assert len({fingerprint for _, fingerprint, _ in seen}) == 1
    assert len(set(seen)) == 2, "an answer depends on which question came first"


ASKING = [name for name in EVICTING if method(name).needs != Needs()]  # scores look at queries


@pytest.mark.parametrize("name", ASKING)
def test_an_aware_cache_does_depend_on_the_question(name: str, engine: Engine) -> None:
    prints = {
        begin(engine, method(name), CONTEXT, q, Switches("aware"), 20).fingerprint for q in (text(10, 20), text(10, 40))
    }
    assert len(prints) == 2


BLIND = ["duoattention", "knorm", "random", "streamingllm"]  # a token's score does not depend on what follows it


@pytest.mark.parametrize("name", BLIND)
def test_methods_that_look_at_nothing_else_keep_the_same_context_in_every_protocol(name: str, engine: Engine) -> None:
    kept = []
    for protocol in PROTOCOLS:
        started = begin(engine, method(name), CONTEXT, QUESTION, Switches(protocol), 20, OTHER)
        kept.append(
            {
                index: [head[head < len(CONTEXT)].tolist() for head in at]
                for index, at in started.compressed.positions.items()
            }
        )
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("switches", SWITCHES, ids=NAMES)
@pytest.mark.parametrize("name", METHODS)
def test_one_pass_or_two_make_no_difference(name: str, switches: Switches, engine: Engine) -> None:
    """One of several questions about a context works on a copy, or extends it: same entries, same answer as alone."""
    results = []
    for shared in (True, False):
        started = begin(engine, method(name), CONTEXT, QUESTION, switches, 24, OTHER, shared=shared)
        positions = {index: [head.tolist() for head in at] for index, at in started.compressed.positions.items()}
        results.append((started.cache.entries(), started.bytes_full, positions, answer(engine, started, 8)))
    assert results[0] == results[1]


# Rule 3: evicting equals masking


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("shares", [None, "layers", "heads"])
def test_evicting_equals_masking(name: str, protocol: str, shares: str | None, engine: Engine) -> None:
    chosen = method(name)
    layers = sum(layer.options.sliding_window is None for layer in engine.prefill([1]).layers)
    if shares == "layers":
        chosen = replace(chosen, allocator=PerLayer(tuple(([3, 1] * layers)[:layers])))
    if shares == "heads":
        heads = engine.prefill([1]).layers[0].keys.shape[0]
        chosen = replace(chosen, allocator=PerHead(tuple(([3, 2] * heads)[:heads])))
    chosen = replace(chosen, decode=None)  # what is evicted later has tests of its own
    started = begin(engine, chosen, CONTEXT, QUESTION, Switches(protocol), 24, OTHER)
    capture = engine.prefill(CONTEXT)
    fed = QUESTION
    if protocol == "aware":
        capture, fed = engine.extend(capture, QUESTION[:-1]), QUESTION[-1:]
    kept = {index: kept_mask(at, capture.tokens) for index, at in started.compressed.positions.items()}
    held = sum(int(mask[:, : len(CONTEXT)].sum()) / mask.shape[0] for mask in kept.values())
    assert held == pytest.approx(24 * layers)
    logits = masked_logits(engine, capture, kept, fed)[-1]
    assert torch.allclose(started.logits, logits, atol=1e-4, rtol=1e-4)
    # ... and so does every later step
    tokens = answer(engine, started, 6)
    again = masked_logits(engine, capture, kept, [*fed, *tokens[:-1]])[len(fed) - 1 :]
    assert again.argmax(-1).tolist() == tokens


def test_wrong_positions_fail_the_oracle() -> None:
    """What the oracle must be able to see: positions counted within the evicted cache move logits by much."""
    engine = Engine(build("llama"))
    started = begin(engine, method("snapkv"), CONTEXT, QUESTION, Switches("blind"), 20)
    capture = engine.prefill(CONTEXT)
    kept = {index: kept_mask(at, capture.tokens) for index, at in started.compressed.positions.items()}
    wrong = masked_logits(engine, capture, kept, QUESTION, start=20)[-1]
    assert (started.logits - wrong).abs().max() > 0.5


# Rule 5: no state leaks


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", METHODS)
def test_no_state_leaks_between_samples(name: str, protocol: str, engine: Engine) -> None:
    def run(context: list[int]) -> tuple[list[int], dict[int, list], str]:
        started = begin(engine, method(name), context, QUESTION, Switches(protocol), 64, OTHER)
        at = {index: [head.tolist() for head in kept] for index, kept in started.compressed.positions.items()}
        assert started.compressed.kept_mean == (64 if name in EVICTING else len(context))
        return answer(engine, started, 6), at, started.fingerprint

    long, short = text(300, 1), text(120, 2)
    alone = run(long)
    results = [run(context) for context in (long, short, long)]
    assert results[0] == results[2] == alone
    assert results[0] != results[1]


# Rule 6: budgets are kept


@pytest.mark.parametrize("switches", SWITCHES, ids=NAMES)
@pytest.mark.parametrize("name", EVICTING)
def test_every_head_and_layer_holds_the_promised_entries(name: str, switches: Switches, engine: Engine) -> None:
    for budget in (20, 0.4):
        started = begin(engine, method(name), CONTEXT, QUESTION, switches, budget, OTHER)
        whole = [layer for layer in started.cache.layers if layer.compressed]
        scope = len(CONTEXT) + len(QUESTION) if switches.budget_scope == "prompt" else len(CONTEXT)
        entries = 20 if budget == 20 else round(0.4 * scope)
        on_top = len(QUESTION) if switches.budget_scope == "context" else 0
        held = sum(layer.entries for layer in whole) / len(whole)
        assert held == pytest.approx(entries + on_top), "at the first decode step, question included"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [name for name in EVICTING if method(name).decode is not None])
def test_a_decode_rule_holds_its_bound_at_every_step(name: str, protocol: str, engine: Engine) -> None:
    """20 context entries and the question's 7, before and after every step, in every head of every layer."""
    chosen = method(name)
    started = begin(engine, chosen, CONTEXT, QUESTION, Switches(protocol), 20, OTHER, compact=name == "streamingllm")
    logits = started.logits
    for _ in range(30):
        assert {layer.entries for layer in started.cache.layers if layer.compressed} == {27}
        logits = engine.feed(started.cache, [int(logits.argmax())])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
@pytest.mark.parametrize("budget", [0.5, 0.1, 0.01, 1, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", METHODS)
def test_tiny_contexts(name: str, protocol: str, budget: float, tokens: int, llama: object) -> None:
    engine = Engine(llama)  # type: ignore[arg-type]
    chosen = method(name, "method.window=32") if name == "snapkv" else method(name)
    started = begin(engine, chosen, text(tokens, 3), QUESTION, Switches(protocol), budget, OTHER)
    assert all(1 <= kept <= tokens for kept in started.compressed.kept)
    if chosen.protect.sinks + chosen.protect.recent >= tokens:
        assert set(started.compressed.kept) == {tokens}
        assert started.compressed.note
    answer(engine, started, 4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", METHODS)
def test_an_empty_context(name: str, protocol: str, engine: Engine) -> None:
    started = begin(engine, method(name), [], QUESTION, Switches(protocol), 8, OTHER)
    tokens = answer(engine, started, 5)
    expected = generate(engine.model, QUESTION, 5)
    engine.model.set_attn_implementation(NAME)
    assert len(tokens) == 5 if name in APPROXIMATE else tokens == expected


# Rule 7: bytes are real


def test_bytes_are_those_of_the_tensors_held(llama: object) -> None:
    engine = Engine(llama)  # type: ignore[arg-type]
    capture = engine.prefill(text(40, 1), Needs(query_window=8))
    full = method("full").compress(capture, Region(40, 40), 40, 0).cache
    small = method("snapkv").compress(capture, Region(40, 40), 16, 100).cache
    # 2 tensors x 2 layers x 2 KV heads x entries x 16 dims x 4 bytes; repeated heads would double it
    assert full.nbytes() == 20_480
    assert small.nbytes() == 8_192
    assert full.nbytes("host") == small.nbytes("host") == 0
    assert capture.nbytes(40) == 20_480
    held = sum(t.element_size() * t.numel() for layer in small.layers for t in layer.tensors().values())
    assert small.nbytes() == held
