"""prefill=streaming through the protocols: the same cache whatever the protocol, rolling on from the text's end."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine import Engine
from kvbench.engine.rotation import discover
from kvbench.engine.streaming import stream
from kvbench.protocols import Switches
from tests.cells import PROTOCOLS, answer, begin, method, text
from tests.models.tiny_configs import build
from tests.oracle import generate

CONTEXT, QUESTION, OTHER = text(70, 5), text(7, 6), text(11, 7)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(build(request.param))


@pytest.mark.parametrize("compact", [True, False])
def test_all_protocols_are_one(engine: Engine, compact: bool) -> None:
    chosen = method("streamingllm", "method.prefill=streaming")
    answers, prints = [], set()
    for protocol in PROTOCOLS:
        started = begin(engine, chosen, CONTEXT, QUESTION, Switches(protocol), 20, OTHER, compact=compact)
        assert {layer.entries for layer in started.cache.layers if layer.compressed} == {27}
        prints.add(started.fingerprint)
        answers.append(answer(engine, started, 12))
        assert {layer.entries for layer in started.cache.layers if layer.compressed} == {27}
    assert len(prints) == 1 and answers[0] == answers[1] == answers[2]


def test_a_question_in_the_budget_is_streamed_to_its_last_token(engine: Engine) -> None:
    """budget_scope=prompt, question_evictable: the logits are those of one stream over the whole prompt."""
    chosen = method("streamingllm", "method.prefill=streaming")
    switches = Switches("aware", "prompt", True)
    started = begin(engine, chosen, CONTEXT, QUESTION, switches, 20, compact=True)
    expected = stream(engine, [*CONTEXT, *QUESTION], 4, 16, discover(engine))
    assert expected.logits is not None and torch.allclose(started.logits, expected.logits, atol=1e-4)
    # ... and so is every answer token
    tokens = answer(engine, started, 6)
    for at, token in enumerate(tokens):
        logits = stream(engine, [*CONTEXT, *QUESTION, *tokens[:at]], 4, 16, discover(engine)).logits
        assert logits is not None and int(logits.argmax()) == token


def test_a_budget_of_the_whole_text_is_the_usual_prefill(engine: Engine) -> None:
    chosen = method("streamingllm", "method.prefill=streaming")
    started = begin(engine, chosen, CONTEXT, QUESTION, Switches("blind"), "full", compact=True)
    tokens = answer(engine, started, 8)
    expected = generate(engine.model, CONTEXT + QUESTION, 8)
    engine.model.set_attn_implementation("kvbench")
    assert tokens == expected
