"""Head classes: exact totals, the ranking, files, and the measure behind them against a plainly written oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine import Engine
from kvbench.engine.attention import AttentionOptions, causal_attention, forward_pass
from kvbench.engine.streaming import Band
from kvbench.errors import InputError
from kvbench.methods import head_calibration
from kvbench.methods.head_calibration import CalibrationText, make_text, measure, scaled
from kvbench.methods.head_classes import HeadClasses
from kvbench.methods.setup import Setup
from kvbench.models.byte_tokenizer import SIZE, build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from tests.conftest import tiny_llama
from tests.models.tiny_configs import build

HAND = ((0.1, 0.9), (0.5, 0.5))


def scores(heads: list[int], n: int) -> list[torch.Tensor]:
    return [torch.zeros(count, n) for count in heads]


def entries(classes: HeadClasses, budget: int, n: int) -> list[list[int]]:
    assert classes.importance is not None
    return [row.tolist() for row in classes(budget, scores([len(row) for row in classes.importance], n))]


@pytest.mark.parametrize(
    "budget, expected",
    [
        (100, [[100, 100], [100, 100]]),
        (120, [[100, 100], [100, 100]]),
        (10, [[10, 10], [10, 10]]),  # sinks + recent: nothing is left for whole heads
        (4, [[4, 4], [4, 4]]),
        (11, [[10, 14], [10, 10]]),  # 4 over: a longer window of the first in rank
        (33, [[10, 100], [12, 10]]),  # 92 over: 90 make one head whole, 2 are left for the next (ties: first head)
        (55, [[10, 100], [100, 10]]),  # 180 over: two whole heads, nothing left
        (99, [[96, 100], [100, 100]]),
    ],
)
def test_by_hand(budget: int, expected: list[list[int]]) -> None:
    assert entries(HeadClasses(sinks=2, recent=8, importance=HAND), budget, 100) == expected


def test_counts_are_int64_on_the_cpu() -> None:
    for row in HeadClasses(sinks=2, recent=8, importance=HAND)(50, scores([2, 2], 100)):
        assert (row.dtype, row.device.type) == (torch.int64, "cpu")


@given(data=st.data())
def test_totals_are_exact_and_ranks_respected(data: st.DataObject) -> None:
    heads = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    n, budget = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 450))
    sinks, recent = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 80))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    rows = tuple(tuple(data.draw(st.lists(value, min_size=count, max_size=count))) for count in heads)
    found = entries(HeadClasses(sinks=sinks, recent=recent, importance=rows), budget, n)
    flat = [count for row in found for count in row]
    assert [len(row) for row in found] == heads
    assert sum(flat) == min(budget, n) * sum(heads)
    assert all(1 <= count <= n for count in flat)
    window = min(sinks + recent, n)
    if budget <= window:
        assert set(flat) == {budget}
    else:
        assert min(flat) >= window
        assert sum(window < count < n for count in flat) <= 1, "only one head may be between the classes"
    ranked = sorted(range(len(flat)), key=lambda i: -[number for row in rows for number in row][i])  # ties keep order
    counts = [flat[i] for i in ranked]
    assert counts == sorted(counts, reverse=True), "a head of a higher rank never gets less"


def test_a_ranking_of_other_heads_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 x 2"):
        HeadClasses(importance=HAND)(5, scores([2, 2, 2], 10))
    with pytest.raises(RuntimeError, match="prepared"):
        HeadClasses()(5, scores([2, 2], 10))


def test_importance_may_be_a_tensor_and_stays_hashable() -> None:
    classes = HeadClasses(importance=torch.tensor([[0.25, 0.5]]))  # type: ignore[arg-type]
    assert classes.importance == ((0.25, 0.5),)
    assert hash(classes) == hash(HeadClasses(importance=((0.25, 0.5),)))


@pytest.mark.parametrize(
    "name, value",
    [("sinks", -1), ("sinks", 1.5), ("recent", 0), ("texts", 0), ("tokens", True), ("seed", -1), ("path", 3)],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        HeadClasses(**{name: value})
    assert caught.value.key == f"method.allocator.{name}"
    assert caught.value.fix


# --- files


def setup_of(model: Any) -> Setup:
    return Setup(Engine(model), PromptEncoder(build_byte_tokenizer()), "model")


@pytest.fixture(scope="module")
def llama_setup() -> Setup:
    return setup_of(tiny_llama(vocab_size=SIZE))


@pytest.mark.parametrize("suffix", ["json", "tsv"])
def test_a_file_of_numbers(tmp_path: Path, llama_setup: Setup, suffix: str) -> None:
    file = tmp_path / f"heads.{suffix}"
    lines = "\n".join("\t".join(f"{number:.18e}" for number in row) for row in HAND) + "\n\n"
    file.write_text(json.dumps(HAND) if suffix == "json" else lines)
    prepared = HeadClasses(str(file), sinks=2, recent=8).prepared(llama_setup)
    assert prepared.importance == HAND
    assert entries(prepared, 33, 100) == [[10, 100], [12, 10]]
    facts = prepared.facts()
    assert facts["source"].startswith(f"heads.{suffix} sha256:")
    assert facts["heads"] == 4
    given = HeadClasses(importance=HAND).prepared(llama_setup).facts()
    assert given["source"] == "given"
    assert given["importance_sha256"] == facts["importance_sha256"]
    assert prepared.prepared(llama_setup) == prepared, "preparing twice changes nothing"


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.tsv", "1\t2\n3\tnan\n", "row 2, column 2 is nan"),
        ("a.json", "[[1, 2], [3, NaN]]", "row 2, column 2 is nan"),
        ("a.json", "[[1, 2], [3, 1" + "0" * 400 + "]]", "row 2, column 2"),
        ("a.json", "[[1, 2], [true, 4]]", "row 2, column 1 is True"),
        ("a.json", '{"a": 1}', "not a list of rows"),
        ("a.json", "[1, 2]", "not a list of rows"),
        ("a.json", "[[1, 2", "no table of numbers"),
        ("a.tsv", "1\t2\nx\t4\n", "no table of numbers"),
        ("a.tsv", "1\t2\n3\t4\n5\t6\n", "has 3 x 2 numbers, expected 2 x 2"),
        ("a.tsv", "1\t2\n3\n", "has 2 rows of 2, 1 numbers, expected 2 x 2"),
        ("a.tsv", "", "has 0 x 0 numbers, expected 2 x 2"),
        ("a.npy", "", "is no .tsv or .json file"),
        ("a.tsv", None, "there is no such file"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, llama_setup: Setup, name: str, content: str | None, reason: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as caught:
        HeadClasses(str(file)).prepared(llama_setup)
    assert caught.value.key == "method.allocator.path"
    assert caught.value.value == str(file)
    assert reason in caught.value.reason
    assert ".tsv" in caught.value.fix


def test_a_file_and_numbers_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(HAND))
    with pytest.raises(InputError, match="importance is given as well"):
        HeadClasses(str(tmp_path / "a.json"), importance=HAND)


def test_rows_for_all_layers_or_for_the_compressed_ones(tmp_path: Path) -> None:
    """Two of the four layers have a sliding window."""
    setup = setup_of(build("gemma3_text"))
    assert [layer.sliding for layer in setup.layers] == [True, False, True, False]
    file = tmp_path / "a.json"
    file.write_text(json.dumps([[9, 9], *HAND[:1], [9, 9], *HAND[1:]]))
    assert HeadClasses(str(file)).prepared(setup).importance == HAND
    file.write_text(json.dumps(HAND))
    assert HeadClasses(str(file)).prepared(setup).importance == HAND
    file.write_text(json.dumps(HAND[:1]))
    with pytest.raises(InputError, match=r"1 x 2 numbers, expected 2 x 2 .* or 4 x 2 \(all layers\)"):
        HeadClasses(str(file)).prepared(setup)


# --- calibration


class Recorder:
    """Remembers what every layer is given, and attends as usual."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.given[layer] = query[0], key[0], value[0], options
        return causal_attention(query, key, value, options)


@torch.inference_mode()
def plain_importance(model: Any, text: CalibrationText, band: Band) -> list[list[float]]:
    """Head by head and query by query, each softmax written out over the keys that it may see."""
    recorder, n = Recorder(), len(text.ids)
    with forward_pass(recorder):
        model(torch.tensor([text.ids]), position_ids=torch.arange(n)[None], use_cache=False)
    rows = []
    for layer in sorted(recorder.given):
        query, key, value, options = recorder.given[layer]
        if options.sliding_window is not None:
            continue
        group, row = query.shape[0] // key.shape[0], []
        for kv in range(key.shape[0]):
            lost = []
            for head in range(kv * group, (kv + 1) * group):
                for t in range(n - text.observed, n):
                    outs = []
                    for keys in (
                        range(t + 1),
                        [j for j in range(t + 1) if j < band.sinks or j >= t - band.recent],
                    ):
                        at = torch.tensor(list(keys))
                        raw = key[kv, at] @ query[head, t] * options.scaling
                        if options.softcap is not None:
                            raw = options.softcap * torch.tanh(raw / options.softcap)
                        outs.append(raw.softmax(0) @ value[kv, at])
                    lost.append(float((outs[0] - outs[1]).norm() / outs[0].norm()))
            row.append(sum(lost) / len(lost))
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_importance_is_what_the_band_loses(name: str) -> None:
    engine = Engine(tiny_llama(layers=3) if name == "llama" else build(name))
    generator = torch.Generator().manual_seed(1)
    texts = [CalibrationText(tuple(torch.randint(0, 128, (40,), generator=generator).tolist()), 7) for _ in range(2)]
    band = Band(3, 8)
    found = torch.tensor(measure(engine, texts, band))
    plain = torch.tensor([plain_importance(engine.model, text, band) for text in texts]).mean(0)
    assert found.shape == plain.shape
    assert torch.allclose(found, plain.double().to(found.dtype), atol=1e-4)
    assert found.min() > 0.01, "random heads look everywhere"


def looking_far(far: list[int]) -> Any:
    """A llama in whose layer i the KV head ``far[i]`` attends to everything alike and the others to what is near."""
    model: Any = tiny_llama(layers=len(far), vocab_size=SIZE, attention_bias=True)
    with torch.no_grad():
        for layer, head in zip(model.model.layers, far, strict=True):
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.zero_()
                projection.bias.fill_(6.0)  # equal queries and keys meet best where their positions do
            attention.k_proj.bias.view(-1, 16)[head] = 0.0
    return model


def test_calibration_finds_the_heads_that_look_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    setup = setup_of(looking_far([1, 0, 0]))
    prepared = HeadClasses(texts=2, tokens=700).prepared(setup)
    assert prepared.importance is not None
    far = {(0, 1), (1, 0), (2, 0)}
    by_rank = sorted(((i, h) for i in range(3) for h in range(2)), key=lambda at: -prepared.importance[at[0]][at[1]])  # type: ignore[index]
    assert set(by_rank[:3]) == far
    lowest = min(prepared.importance[i][h] for i, h in far)
    highest = max(prepared.importance[i][h] for i in range(3) for h in range(2) if (i, h) not in far)
    assert lowest > 5 * highest
    assert prepared.facts()["source"] == "calibrated"
    n, window = 1000, 64 + 256
    full = [[int(count == n) for count in row] for row in entries(prepared, (3 * n + 3 * window) // 6, n)]
    assert full == [[0, 1], [1, 0], [1, 0]]


def test_calibration_is_deterministic_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "a"))
    setup, classes = setup_of(tiny_llama(vocab_size=SIZE)), HeadClasses(texts=1, tokens=600)
    first = classes.prepared(setup)
    (file,) = (tmp_path / "a" / "head_classes").iterdir()
    assert HeadClasses(str(file)).prepared(setup).importance == first.importance, "its files can be given as path"
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "b"))
    assert classes.prepared(setup) == first, "the same settings give the same numbers"

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(head_calibration, "measure", never)
        assert classes.prepared(setup) == first
        for other in (HeadClasses(texts=1, tokens=600, seed=1), HeadClasses(texts=1, tokens=900),
                      HeadClasses(texts=1, tokens=600, sinks=8)):  # fmt: skip
            with pytest.raises(AssertionError, match="measured again"):
                other.prepared(setup)
        setup.model_sha256 = "another"
        with pytest.raises(AssertionError, match="measured again"):
            classes.prepared(setup)
    setup.model_sha256 = "model"
    for file in (tmp_path / "b" / "head_classes").iterdir():
        file.write_text("[[1")  # torn
    assert classes.prepared(setup) == first


def test_a_cache_that_cannot_be_written_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file"))
    assert HeadClasses(texts=1, tokens=600).prepared(setup_of(tiny_llama(vocab_size=SIZE))).importance
    assert "were not kept" in caplog.text


def test_a_calibration_text_asks_again_for_what_it_hid() -> None:
    encoder = PromptEncoder(build_byte_tokenizer())
    text = make_text(encoder, 1500, 3, 0)
    assert 1200 < len(text.ids) <= 1500
    whole, repeated = encoder.decode(text.ids), encoder.decode(text.ids[-text.observed :])
    for name in head_calibration.NAMES:
        (line,) = [part for part in repeated.split("The ") if part.startswith(f"{name} passkey: ")]
        assert len(line.split(": ")[1].split()) == head_calibration.WORDS
        assert whole.count(line.strip()) == 2, "planted once, repeated once"
        assert whole.index(line.strip()) < 0.7 * len(whole)
    assert make_text(encoder, 1500, 3, 0) == text
    assert len({make_text(encoder, 1500, seed, index).ids for seed in (3, 4) for index in (0, 1)}) == 4


def test_a_text_too_short_for_its_passkeys_is_refused(llama_setup: Setup) -> None:
    with pytest.raises(InputError, match=r"method\.allocator\.tokens"):
        HeadClasses(tokens=50).prepared(llama_setup)


@pytest.mark.parametrize(
    "tokens, expected", [(2048, Band(64, 256)), (1280, Band(64, 256)), (640, Band(32, 128)), (4, Band(0, 2))]
)
def test_the_band_is_scaled_to_short_texts(tokens: int, expected: Band) -> None:
    assert scaled(Band(64, 256), tokens) == expected


def test_texts_fit_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    lengths: list[int] = []
    plain = head_calibration.measure

    def spy(engine: Engine, texts: list[CalibrationText], band: Band) -> Any:
        lengths.extend(len(text.ids) for text in texts)
        return plain(engine, texts, band)

    monkeypatch.setattr(head_calibration, "measure", spy)
    HeadClasses(texts=2).prepared(setup_of(tiny_llama(vocab_size=SIZE, max_position_embeddings=700)))
    assert all(500 < length <= 700 for length in lengths)
    assert len(lengths) == 2


def test_a_model_without_compressed_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    engine = Engine(build("mistral-sliding"))
    assert measure(engine, [CalibrationText(tuple(range(30)), 4)], Band(2, 4)) == ()
    assert HeadClasses(importance=())(5, []) == []


def test_attention_that_is_not_finite_is_named() -> None:
    model: Any = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="not finite"):
        measure(Engine(model), [CalibrationText(tuple(range(30)), 4)], Band(2, 4))
