"""Positions within the cache."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine import Engine
from kvbench.engine.rotation import LayerRotation, length_dependent
from kvbench.protocols import Switches
from tests.cells import answer, begin, method, text
from tests.conftest import tiny_llama
from tests.models.tiny_configs import build
from tests.oracle import generate

CONTEXT, QUESTION = text(60, 1), text(5, 2)
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("scaling", [None, *SCALED])
@pytest.mark.parametrize("protocol", ["blind", "aware"])
def test_compact_positions_are_those_of_a_text_of_the_kept_tokens(scaling: str | None, protocol: str) -> None:
    """In a model of one layer keys and values depend on token and position alone.

    So a compact cache must equal the cache of a shorter text that holds only the kept tokens, scaled RoPE or not.
    """
    changes = {} if scaling is None else {"rope_parameters": SCALED[scaling]}
    engine = Engine(tiny_llama(layers=1, **changes))
    started = begin(engine, method("streamingllm"), CONTEXT, QUESTION, Switches(protocol), 20, compact=True)
    kept = [*CONTEXT[:4], *CONTEXT[-16:]]
    logits = engine.prefill([*kept, *QUESTION]).logits
    assert logits is not None
    assert torch.allclose(started.logits, logits, atol=1e-4)
    assert started.cache.next_position == 25
    original = begin(engine, method("streamingllm"), CONTEXT, QUESTION, Switches(protocol), 20)
    assert (original.logits - logits).abs().max() > 1e-2, "the two kinds of positions must be told apart"
    assert original.cache.next_position == 65
    # at every decode step the oldest entry that is no sink goes and the rest close up (seen: limit + 1 entries)
    seen, tokens = [*kept, *QUESTION], answer(engine, started, 8)
    for step, token in enumerate(tokens):
        rolled = [*seen[:4], *seen[4 + max(0, step - 1) :]] if step else seen
        expected = engine.prefill(rolled).logits
        assert expected is not None and token == int(expected.argmax())
        seen.append(token)


def test_layers_of_unequal_length_are_aligned_to_the_next_token(llama: object) -> None:
    """The last entry of every layer stands just before the next token, whatever the layer's length."""
    from kvbench.engine.rotation import discover
    from kvbench.methods import Method, Region
    from kvbench.methods.allocators import PerLayer

    engine = Engine(llama)  # type: ignore[arg-type]
    base = method("streamingllm")
    uneven = Method("uneven", base.scorer, PerLayer([3, 1]), base.protect, base.codec)
    capture, rotation = engine.prefill(CONTEXT), discover(engine)
    compressed = uneven.compress(capture, Region(60, 60), 16, 8, rotation)
    assert compressed.kept == (24, 8)
    assert compressed.cache.next_position == 24
    for index, first in ((0, 0), (1, 16)):
        kept = torch.stack(list(compressed.positions[index]))
        at = torch.arange(first, 24)
        captured = capture.layers[index].keys.gather(1, kept[:, :, None].expand(-1, -1, 16))
        expected = rotation.turn(index, captured, at - kept)
        assert torch.equal(compressed.cache.layers[index].tensors()["keys"], expected)


@pytest.mark.parametrize("name", ["gemma3_text", "cohere2", "glm", "smollm3"])
def test_nothing_evicted_means_nothing_moved(name: str) -> None:
    engine = Engine(build(name))
    expected = generate(engine.model, CONTEXT + QUESTION, 8)
    engine.model.set_attn_implementation("kvbench")
    started = begin(engine, method("streamingllm"), CONTEXT, QUESTION, Switches("blind"), "full", compact=True)
    assert answer(engine, started, 8) == expected


def test_turning_forth_and_back_is_nothing() -> None:
    rotation = LayerRotation(1.0 / 10000.0 ** (torch.arange(4) / 4.0), interleaved=True)
    keys = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    by = torch.tensor([[7, -3, 0, 100, 2000]] * 2)
    assert torch.allclose(rotation.turn(rotation.turn(keys, by), -by), keys, atol=1e-5)
    assert torch.equal(rotation.turn(keys, by)[..., 8:], keys[..., 8:]), "dimensions beyond the rotary part stay"


def test_frequencies_that_depend_on_the_length_are_named() -> None:
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert length_dependent(model.config) == "dynamic"
    assert length_dependent(tiny_llama().config) is None
