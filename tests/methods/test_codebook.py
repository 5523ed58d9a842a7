"""Codebooks: nearest centroids, the fit, the texts it reads, and the files it is kept in."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.engine import Engine
from kvbench.errors import InputError
from kvbench.methods import codebook_fit
from kvbench.methods.codebook import METADATA, Codebooks, LayerCodebook, content_sha256, read
from kvbench.methods.codebook_fit import cluster
from kvbench.methods.codebook_texts import FitSettings, read_texts
from kvbench.methods.hcattention import HCAttention
from kvbench.methods.setup import Setup
from kvbench.models.byte_tokenizer import SIZE, build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from kvbench.tasks.haystack import pydoc_haystack
from tests.conftest import tiny_llama


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- codes


@pytest.mark.parametrize("sets", [1, 3])
def test_nearest_centroids_by_hand(sets: int) -> None:
    book = LayerCodebook(numbers(sets, 4, 10, 2))
    keys = numbers(3, 7, 8, seed=1)
    codes = book.nearest(keys)
    assert codes.shape == (7, 3, 4) and codes.dtype == torch.int16
    rebuilt = book.rebuild(codes)
    for head in range(3):
        for token in range(7):
            for group in range(4):
                part = keys[head, token, 2 * group : 2 * group + 2]
                centroids = book.centroids[head % sets, group]
                best = int((centroids - part).square().sum(-1).argmin())
                assert int(codes[token, head, group]) == best
                assert torch.equal(rebuilt[head, token, 2 * group : 2 * group + 2], centroids[best])


def test_of_equal_centroids_the_first_is_taken() -> None:
    book = LayerCodebook(torch.tensor([1.0, 2.0, 1.0, 2.0]).view(1, 1, 4, 1))
    assert book.nearest(torch.tensor([1.0, 2.0, 1.4]).view(1, 3, 1)).flatten().tolist() == [0, 1, 0]


def test_keys_far_from_the_origin() -> None:
    """Some channels of real keys lie around a large number: distances must not drown in its square."""
    centroids = 500 + numbers(1, 2, 64, 2)
    keys = 500 + numbers(1, 20, 4, seed=1)
    found = LayerCodebook(centroids).nearest(keys)
    distances = (keys.view(20, 2, 1, 2) - centroids).double().square().sum(-1)
    assert torch.equal(found[:, 0].long(), distances.argmin(-1))


def test_no_keys_no_codes() -> None:
    book = LayerCodebook(numbers(2, 4, 10, 2))
    assert book.nearest(numbers(2, 0, 8)).shape == (0, 2, 4)


# --- clusters


def test_the_fit_is_deterministic_and_near_the_keys() -> None:
    vectors = numbers(500, 2).numpy()
    fit = FitSettings(iterations=10, batch_size=100)
    first, count = cluster(vectors, 40, fit)
    assert first.shape == (40, 2) and first.dtype == np.float32 and count == 40
    assert np.array_equal(first, cluster(vectors, 40, fit)[0])
    assert not np.array_equal(first, cluster(vectors, 40, FitSettings(seed=1, iterations=10, batch_size=100))[0])
    error, unfitted = (((vectors[:, None] - book[None]) ** 2).sum(-1).min(1).mean() for book in (first, vectors[:40]))
    assert error < 0.75 * unfitted
    moved, _ = cluster(vectors + np.float32(1000), 40, fit)
    assert np.allclose(moved - 1000, first, atol=0.05), "keys far from the origin, as some channels are"


def test_few_different_keys_fill_the_codebook_by_repetition() -> None:
    vectors = np.tile(np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32), (9, 1))
    found, count = cluster(vectors, 8, FitSettings())
    assert count == 3 and len(found) == 8
    assert {tuple(row) for row in found.tolist()} == {(1, 2), (3, 4), (5, 6)}


# --- texts


def test_generated_texts_are_sentences_out_of_order() -> None:
    fit = FitSettings(texts=3, tokens=50)
    texts = read_texts(fit)
    assert texts == read_texts(FitSettings(texts=3, tokens=50)), "they depend on the settings alone"
    assert len(set(texts.texts)) == 3 and all(len(text) == 50 * 16 for text in texts.texts)
    assert read_texts(FitSettings(texts=3, tokens=50, seed=1)).sha256 != texts.sha256
    original = "".join(pydoc_haystack().units)
    known = set(pydoc_haystack().units)
    for text in texts.texts:
        assert text not in original
        assert any(text.startswith(sentence) for sentence in known)


def test_texts_of_files(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    entries = [{"context": "first one", "text": "not this"}, {"text": "second"}, {"context": "third\u2028line"}]
    lines.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n\n", encoding="utf-8")
    chosen = read_texts(FitSettings(data=str(lines), texts=2))
    assert len(set(chosen.texts)) == 2 and set(chosen.texts) < {"first one", "second", "third\u2028line"}
    assert chosen == read_texts(FitSettings(data=str(lines), texts=2))
    seeds = {read_texts(FitSettings(data=str(lines), texts=1, seed=seed)).texts for seed in range(20)}
    assert len(seeds) == 3
    plain = tmp_path / "own.txt"
    plain.write_text("abcdefghij" * 4)
    assert read_texts(FitSettings(data=str(plain), texts=2, tokens=1)).texts == ("abcdefghijabcdef",) * 2
    assert read_texts(FitSettings(data=str(plain), texts=2)).sha256 != chosen.sha256


@pytest.mark.parametrize(
    "name, content, key, reason",
    [
        ("a.jsonl", '{"text": "x"}\n', "texts", "has only 1 texts"),
        ("a.jsonl", '{"text": "x"}\n[1, 2]\n', "data", "line 2 has neither"),
        ("a.jsonl", '{"text": 3}\n', "data", "line 1 has neither"),
        ("a.jsonl", '{"text": "x"\n', "data", "line 1 is not JSON"),
        ("a.jsonl", '{"text": " "}\n{"text": "\\t"}', "data", "is empty"),
        ("a.txt", "", "data", "is empty"),
        ("a.txt", b"\xff\xfe\xff", "data", "cannot be read"),
    ],
)
def test_files_that_do_not_serve(tmp_path: Path, name: str, content: str | bytes, key: str, reason: str) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=reason) as caught:
        read_texts(FitSettings(data=str(file), texts=2))
    assert caught.value.key == f"method.codec.fit.{key}"


# --- the fit on a model, and its files


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(Engine(tiny_llama(vocab_size=SIZE)), PromptEncoder(build_byte_tokenizer()), "a" * 64)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVBENCH_CACHE", str(folder))
    return folder


def small(**changes: Any) -> HCAttention:
    fit = {"texts": 2, "tokens": 150, "iterations": 3, "batch_size": 200}
    return HCAttention(**{"groups": 4, "centroids": 32, "fit": fit, **changes})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("codebooks/*"))


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("fitted again")


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_fitted_once_and_kept(setup: Setup, cache_folder: Path, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hc = small(scope=scope).prepared(setup)
    (file,) = files(cache_folder)
    assert hc.books is not None and hc.books.of(1, range(2), torch.device("cpu")).centroids.shape == (
        2 if scope == "head" else 1, 4, 32, 4,
    )  # fmt: skip
    about = json.loads(json.dumps(read(file).provenance))
    assert about["model_sha256"] == setup.model_sha256 and about["data"]["name"] == "generated"
    assert about["key_vectors"] == (300 if scope == "head" else 600)
    assert set(about["versions"]) == {"scikit-learn", "torch"}
    assert set(about["mean_squared_error"]) == {"0", "1"} and all(
        0 < e < 1 for e in about["mean_squared_error"].values()
    )
    assert set(about["fewest_different_centroids"].values()) == {32}
    monkeypatch.setattr(codebook_fit, "fit_codebooks", never)
    again = small(scope=scope).prepared(setup)
    given = small(scope=scope, codebook=str(file)).prepared(setup)
    assert hc.facts() == again.facts() == given.facts()
    with pytest.raises(AssertionError, match="again"):
        small(scope=scope, fit={"texts": 2, "tokens": 151, "iterations": 3, "batch_size": 200}).prepared(setup)


def test_two_fits_are_equal(setup: Setup, cache_folder: Path) -> None:
    first = small().prepared(setup).facts()
    files(cache_folder)[0].unlink()
    assert small().prepared(setup).facts() == first


def test_the_error_is_that_of_the_codes(setup: Setup) -> None:
    hc = small().prepared(setup)
    assert hc.books is not None
    texts = read_texts(hc.fit).texts
    keys = codebook_fit.collect_keys(setup, hc.fit, texts)
    book = hc.books.of(0, range(2), torch.device("cpu"))
    error = (book.rebuild(book.nearest(keys[0])) - keys[0]).square().mean()
    assert hc.books.provenance["mean_squared_error"]["0"] == pytest.approx(float(error))
    assert keys[0].shape == (2, 300, 16)
    first = setup.encoder.tokenizer.encode(texts[0])[:150]
    assert torch.equal(keys[1][:, :150], setup.engine.prefill(first).layers[1].keys)


def test_more_centroids_than_keys(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hc = small(centroids=400).prepared(setup)
    assert "different centroids, not 400" in caplog.text
    assert hc.books is not None
    assert 2 <= min(hc.books.provenance["fewest_different_centroids"].values()) <= 300
    assert max(hc.books.provenance["mean_squared_error"].values()) < 1e-8, "every key is its own centroid"


def test_a_text_longer_than_the_window_is_cut() -> None:
    model = tiny_llama(vocab_size=SIZE, max_position_embeddings=64)
    setup = Setup(Engine(model), PromptEncoder(build_byte_tokenizer()), "b" * 64)
    keys = codebook_fit.collect_keys(setup, FitSettings(tokens=100), ["word " * 100])
    assert keys[0].shape[1] == 64


def test_keys_that_are_not_finite_are_refused(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(vocab_size=SIZE)
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("e")] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        small().prepared(Setup(Engine(model), setup.encoder, "c" * 64))


def test_without_scikit_learn(setup: Setup, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().prepared(setup)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    small().prepared(setup)  # a fitted codebook needs nothing
    with pytest.raises(InputError, match="pip install scikit-learn"):
        small(centroids=16).prepared(setup)
    assert not [file for file in files(cache_folder) if file.suffix == ".lock"]


def changed(file: Path, **provenance: Any) -> None:
    """The same file with another provenance."""
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        header = json.loads(content.metadata()[METADATA])
    save_file(load_file(file), file, metadata={METADATA: json.dumps(header | provenance)})


@pytest.mark.parametrize(
    "provenance, reason",
    [
        ({"model_sha256": "f" * 64}, "another model"),
        ({"groups": 8}, "fitted with groups=8, not 4"),
        ({"centroids": 8}, "fitted with centroids=8, not 32"),
        ({"scope": "layer"}, "fitted with scope=layer, not head"),
        ({"format": 99}, "another version"),
        ({"sha256": "0"}, "not those that were stored"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    setup: Setup, cache_folder: Path, tmp_path: Path, provenance: dict[str, Any], reason: str
) -> None:
    first = small().prepared(setup)
    file = tmp_path / "given.safetensors"
    files(cache_folder)[0].rename(file)
    changed(file, **provenance)
    with pytest.raises(InputError, match=reason) as caught:
        small(codebook=str(file)).prepared(setup)
    assert caught.value.key == "method.codec.codebook" and caught.value.fix
    del first


def test_shapes_are_compared_with_the_model(setup: Setup, tmp_path: Path) -> None:
    hc = small().prepared(setup)
    assert hc.books is not None
    file = tmp_path / "given.safetensors"
    for layers, reason in (
        ({0: numbers(2, 4, 32, 4)}, "is for layers"),
        ({0: numbers(2, 4, 32, 4), 1: numbers(2, 4, 32, 8)}, "layer 1 is torch.float32"),
        ({0: numbers(2, 4, 32, 4), 1: numbers(2, 4, 32, 4).half()}, "layer 1 is torch.float16"),
    ):
        Codebooks(layers, hc.books.provenance).store(file)
        with pytest.raises(InputError, match=reason):
            small(codebook=str(file)).prepared(setup)


@pytest.mark.parametrize("how", ["missing", "folder", "text", "torn", "other", "flipped", "header"])
def test_what_is_no_codebook_is_refused_and_fitted_anew_in_the_cache(
    setup: Setup, cache_folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = small().prepared(setup).facts()
    (file,) = files(cache_folder)
    content = file.read_bytes()
    file.unlink()
    if how == "folder":
        (cache_folder / "given").mkdir()
    elif how == "text":
        file.write_text("no tensors")
    elif how == "torn":
        file.write_bytes(content[: len(content) // 2])
    elif how == "other":
        save_file({"layer.0": numbers(2, 2)}, file)
    elif how == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "header":
        save_file({"layer.zero": numbers(2, 2)}, file, metadata={METADATA: "{}"})
    given = cache_folder / "given" if how == "folder" else file
    with pytest.raises(InputError) as caught:
        small(codebook=str(given)).prepared(setup)
    assert caught.value.key == "method.codec.codebook"
    with caplog.at_level(logging.WARNING):
        assert small().prepared(setup).facts() == facts
    assert ("fitted anew" in caplog.text) == (how not in ("missing", "folder"))
    assert file.read_bytes()[-1:] == content[-1:]


def test_a_cache_that_cannot_be_written_costs_no_run(
    setup: Setup, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        hc = small().prepared(setup)
    assert hc.books is not None and "not kept" in caplog.text


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    books = Codebooks({0: numbers(1, 1, 2, 1)}, {"not JSON": float("nan")})
    with pytest.raises(ValueError):
        books.store(tmp_path / "x.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))


def test_the_hash_is_of_the_content() -> None:
    layers = {0: numbers(2, 2, 4, 2), 3: numbers(2, 2, 4, 2, seed=1)}
    before = content_sha256(layers)
    assert before == content_sha256({3: layers[3].clone(), 0: layers[0]})
    assert before != content_sha256({0: layers[3], 3: layers[0]})
    assert Codebooks(layers, {}).nbytes == 2 * 2 * 2 * 4 * 2 * 4
