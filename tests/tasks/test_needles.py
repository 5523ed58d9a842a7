"""passkey and niah: prompts of the exact length, depths, and what each sample depends on."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import InputError
from kvbench.tasks import niah, passkey
from kvbench.tasks.haystack import nearest_boundary, pydoc_haystack, sentences, van_der_corput
from tests.tasks.helpers import TOKENIZERS, CountingEncoder, write_lines


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    length=st.integers(900, 2600),
    keys=st.sampled_from([1, 1, 2, 4]),
    filler=st.sampled_from(passkey.FILLERS),
    depth=st.sampled_from([None, 0, 0.33, 1.0]),
    chat=st.booleans(),
    seed=st.integers(0, 5),
)
def test_passkey_prompts_have_exactly_the_length_asked_for(kind, length, keys, filler, depth, chat, seed):
    encoder = CountingEncoder(kind)
    task = passkey.build(
        encoder=encoder, seed=seed, length=length, samples=3, keys=keys, filler=filler, depth=depth, chat=chat
    )
    assert encoder.calls <= 3 * 60  # about eight each; more where this tokenizer skips the length
    for sample in task.samples:
        assert encoder.count(sample, chat) == length
        assert f"{sample.answers[0]} is the pass key" in sample.context  # the needle is whole
        assert sample.context.count("Remember it.") == keys


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_every_length_is_reached(kind):
    """Also short ones, where the hay is shorter than one unit of it."""
    for length in range(260, 300):
        for filler in passkey.FILLERS:
            encoder = CountingEncoder(kind)
            task = passkey.build(encoder=encoder, length=length, samples=2, filler=filler)
            assert all(encoder.count(sample, True) == length for sample in task.samples)


def test_long_prompts_cost_few_counts():
    """Tokenising 100,000 tokens takes a third of a second with a real tokenizer."""
    encoder, start = CountingEncoder(), time.perf_counter()
    passkey.build(encoder=encoder, length=100_000, samples=4)
    assert encoder.calls <= 4 * 12
    assert time.perf_counter() - start < 10


def test_more_samples_leave_the_first_ones_as_they_are():
    """Sample i depends on seed and i only, so a larger run extends a smaller one."""
    few = passkey.build(encoder=CountingEncoder(), samples=5, keys=3).samples
    many = passkey.build(encoder=CountingEncoder(), samples=12, keys=3).samples
    assert many[:5] == few
    assert len({sample.id for sample in many}) == 12
    other = passkey.build(encoder=CountingEncoder(), samples=5, keys=3, seed=1)
    assert not {s.answers for s in few} & {s.answers for s in other.samples}
    assert other.data_sha256 != passkey.build(encoder=CountingEncoder(), samples=5, keys=3).data_sha256


@given(st.integers(0, 10))
def test_van_der_corput_has_one_point_in_every_stratum(power):
    """Of the first 2**k points, one lies in each [j / 2**k, (j + 1) / 2**k)."""
    n = 2**power
    assert sorted(int(van_der_corput(i) * n) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_the_first_n_depths_are_stratified(seed, n):
    """Position alone decides what positional methods keep: no stratum may be empty by chance."""
    task = passkey.build(encoder=CountingEncoder(), seed=seed, length=4096, samples=32)
    depths = sorted(sample.info["depth"] for sample in task.samples[:n])
    gaps = [b - a for a, b in pairwise(depths)]
    assert max([depths[0], 1 - depths[-1], *gaps]) < 1 / n + 0.02
    assert min(gaps) > 1 / n - 0.02


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_given_depth_is_kept(depth):
    task = passkey.build(encoder=CountingEncoder(), length=2048, samples=3, depth=depth)
    assert all(abs(sample.info["depth"] - depth) < 0.01 for sample in task.samples)


def test_several_keys_have_names_and_swapped_asks_for_another():
    for sample in passkey.build(encoder=CountingEncoder(), samples=6, keys=4).samples:
        name = sample.question.split()[-1].rstrip("?")
        assert f"The pass key of {name} is {sample.answers[0]}." in sample.context
        other = sample.other_question.split()[-1].rstrip("?")
        assert other != name and f"The pass key of {other} is" in sample.context
        assert sample.other_answer_prefix.endswith(f" {other} is")


def test_with_one_key_the_other_question_does_not_hint_at_it():
    sample = passkey.build(encoder=CountingEncoder(), samples=1).samples[0]
    assert sample.other_question and "key" not in sample.other_question and sample.other_answer_prefix == ""
    assert sample.question == "\n\nWhat is the pass key?" and sample.answer_prefix == " The pass key is"


def test_the_grass_filler_is_the_usual_text():
    sample = passkey.build(encoder=CountingEncoder(), samples=1, depth=1.0).samples[0]
    line = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    assert sample.context.count(line) > 20
    assert sample.instruction.startswith("There is an important info hidden inside a lot of irrelevant text.")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"length": 20}, "task.length"),  # shorter than the prompt without filler
        ({"length": 0}, "task.length"),
        ({"length": 1.5}, "task.length"),
        ({"samples": 0}, "task.samples"),
        ({"keys": 0}, "task.keys"),
        ({"keys": 10, "digits": 1}, "task.keys"),  # only nine keys of one digit
        ({"digits": 0}, "task.digits"),
        ({"depth": 1.1}, "task.depth"),
        ({"depth": "deep"}, "task.depth"),
        ({"filler": "grss"}, "task.filler"),
        ({"path": "x"}, "task.path"),
    ],
)
def test_wrong_passkey_parameters_name_their_key(changes, key):
    with pytest.raises(InputError) as caught:
        passkey.build(encoder=CountingEncoder(), **changes)
    assert caught.value.key == key


# --- niah ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("needles", ["facts", "san_francisco"])
def test_niah_grid_has_exact_lengths_and_whole_needles_at_sentence_boundaries(kind, needles):
    encoder = CountingEncoder(kind)
    task = niah.build(encoder=encoder, length=[1200, 3000], depths=5, repeats=2, needles=needles)
    assert len(task.samples) == len({sample.id for sample in task.samples}) == 20
    assert task.metric == "contains"
    for sample in task.samples:
        assert encoder.count(sample, True) == sample.info["length"]
        assert sample.answers[0] in sample.context
        place = sample.context.index(sample.answers[0])
        before = sample.context[:place]
        # whole sentences stand before the needle's own: it is at the start, or the text before it ends a sentence
        ends = [i for i, c in enumerate(before) if c in ".!?\n" and before[i + 1 : i + 2] in (" ", "\n", "")]
        assert sample.info["depth"] == 0 or sample.info["depth_reached"] <= 0.02 or ends


def test_niah_depths_are_near_what_was_asked_for():
    """The nearest sentence boundary: within half a sentence (under 1,500 characters of 24,000) on either side."""
    task = niah.build(encoder=CountingEncoder(), length=6000, depths=[0, 0.2, 0.5, 0.8, 1])
    assert [s.info["depth"] for s in task.samples] == [0, 0.2, 0.5, 0.8, 1]
    assert all(abs(s.info["depth"] - s.info["depth_reached"]) < 0.03 for s in task.samples)


def test_niah_asks_in_several_wordings_and_has_another_question():
    samples = niah.build(encoder=CountingEncoder(), length=600, depths=8, repeats=5).samples
    assert len({sample.question for sample in samples}) > 8
    assert all(sample.other_question and sample.answers[0] not in sample.other_question for sample in samples)
    assert all(sample.answers[0] not in sample.question + sample.answer_prefix for sample in samples)


def test_niah_reads_a_folder_in_the_order_of_names_and_repeats_it(tmp_path):
    (tmp_path / "b.txt").write_text("Second file here. It ends.")
    (tmp_path / "a.txt").write_text("First file here. It goes on.")
    (tmp_path / "c.md").write_text("Never read.")
    sample = niah.build(encoder=CountingEncoder(), length=300, depths=[1.0], haystack=str(tmp_path)).samples[0]
    assert "It goes on. Second file here. It ends. First file here." in sample.context
    assert "Never read" not in sample.context


def test_the_content_hash_follows_the_haystack(tmp_path):
    (tmp_path / "a.txt").write_text("First file here. It goes on.")
    build = lambda: niah.build(encoder=CountingEncoder(), length=300, depths=2, haystack=str(tmp_path))  # noqa: E731
    before = build()
    assert build() == before
    (tmp_path / "a.txt").write_text("Another text here. It goes on.")
    assert build().data_sha256 != before.data_sha256


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"length": []}, "task.length"),
        ({"length": [500, 500]}, "task.length"),
        ({"length": "long"}, "task.length"),
        ({"depths": [0.5, 2]}, "task.depths"),
        ({"depths": 0}, "task.depths"),
        ({"needles": "fact"}, "task.needles"),
        ({"haystack": "/nowhere"}, "task.haystack"),
        ({"repeats": 0}, "task.repeats"),
    ],
)
def test_wrong_niah_parameters_name_their_key(changes, key):
    with pytest.raises(InputError) as caught:
        niah.build(encoder=CountingEncoder(), **changes)
    assert caught.value.key == key


# --- the texts ----------------------------------------------------------------------------------------------------


def test_pydoc_prose_is_plain_sentences():
    units = pydoc_haystack().units
    assert sum(map(len, units)) > 100_000  # enough for 25,000 tokens before it repeats
    assert all(unit.strip()[-1] in ".!?" and "\n" not in unit for unit in units)
    assert not [unit for unit in units if "::=" in unit or ">>>" in unit or "   " in unit]


def test_sentences_end_at_marks_and_blank_lines():
    text = 'One is here. "Two" is\nthere! 3.5 is no end, e.g. this. \n\nA title\n\nLast'
    assert sentences(text) == ["One is here.", '"Two" is there!', "3.5 is no end, e.g. this.", "A title", "Last"]


@pytest.mark.parametrize(("depth", "wanted"), [(0, 0), (0.1, 0), (0.3, 1), (0.5, 1), (0.9, 2), (1, 2)])
def test_nearest_boundary(depth, wanted):
    """Boundaries of two units of five characters lie at 0, 0.5 and 1."""
    assert nearest_boundary(["12345", "12345"], depth) == wanted


def test_a_real_encoder_counts_what_the_task_promises():
    from kvbench.models.byte_tokenizer import build_byte_tokenizer
    from kvbench.prompts import PromptEncoder

    encoder = PromptEncoder(build_byte_tokenizer())
    for sample in passkey.build(encoder=encoder, length=1024, samples=4).samples:
        prompt = encoder.encode(sample, chat=True, limit=10_000, truncation="document")
        assert len(prompt.context_ids) + len(prompt.question_ids) == 1024
        assert replace(sample, context="").instruction in prompt.text


def test_helpers_write_bytes_as_they_are(tmp_path):
    assert write_lines(tmp_path / "x", [b"\xff", {"a": 1}]).read_bytes() == b'\xff\n{"a": 1}\n'
