"""GGUF files: a tiny one written here goes through the whole path; a real one if KVBENCH_GGUF names it."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.config import ModelConfig
from kvbench.errors import InputError
from kvbench.models import copies, gguf, open_model
from kvbench.models.byte_tokenizer import SIZE, SPECIALS, build_byte_tokenizer

gguf_writer = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
IDS = torch.arange(30)[None]  # [1, 30]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dequantised"


@pytest.fixture
def original():
    random = {"architecture": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    random.update(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, vocab_size=SIZE + 2)
    return open_model(ModelConfig(name="r", source="random", random=random)).load("cpu", torch.float32)


@pytest.fixture
def file(tmp_path, original) -> Path:
    path = tmp_path / "tiny.gguf"
    write(path, original)
    return path


def write(path: Path, model) -> None:
    config = model.config
    writer = gguf_writer.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocabulary = build_byte_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(tokens.index(SPECIALS[0]))
    writer.add_eos_token_id(tokens.index(SPECIALS[1]))
    for name, tensor in model.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config(file: Path) -> ModelConfig:
    return ModelConfig(name="gguf", source="gguf", path=str(file))


def load(file: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return open_model(config(file)).load("cpu", dtype)(IDS).logits


def test_gguf_gives_the_original_model_and_loads_from_its_copy_next_time(file, original, cache, monkeypatch):
    with torch.no_grad():
        expected = original(IDS).logits
    source = open_model(config(file))
    assert source.name == "tiny" and source.window == 128
    assert source.tokenizer.encode("abc", add_special_tokens=False) == [SIZE, 99]
    assert source.eos_ids() >= {SIZE - len(SPECIALS) + 1}
    assert torch.equal(load(file), expected)
    copy = cache / f"{source.content_sha256}-float32"
    assert (copy / "model.safetensors").is_file() and (copy / "tokenizer.json").is_file()
    # the second time neither the file's tensors nor the libraries that read them are needed
    monkeypatch.setattr(gguf, "_need_libraries", lambda file: pytest.fail("read the GGUF file again"))
    assert torch.equal(load(file), expected)
    # the copy is a model folder of its own
    folder = open_model(ModelConfig(name="c", source="folder", path=str(copy))).load("cpu", torch.float32)
    assert torch.equal(folder(IDS).logits, expected)


def test_each_dtype_has_its_copy(file, cache):
    load(file), load(file, torch.bfloat16)
    assert {path.name.rpartition("-")[2] for path in cache.iterdir()} == {"description", "float32", "bfloat16"}


@pytest.mark.parametrize("damage", ["truncated", "missing", "unmarked"])
def test_a_broken_copy_is_made_again(file, cache, damage, caplog):
    expected = load(file)
    copy = next(cache.glob("*-float32"))
    if damage == "truncated":
        (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-9])
    else:
        (copy / ("config.json" if damage == "missing" else "complete.json")).unlink()
    assert not copies.is_complete(copy)
    assert torch.equal(load(file), expected)
    assert copies.is_complete(copy) and "incomplete" in caplog.text
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copies.ensure_folder(tmp_path / "there", fail)
    assert not list(tmp_path.iterdir())


def test_the_slower_of_two_processes_takes_the_others_copy(tmp_path):
    target = tmp_path / "there"

    def overtaken(folder: Path) -> None:
        (folder / "weights").write_text("slow")
        copies.ensure_folder(target, lambda other: (other / "weights").write_text("fast"))

    assert copies.ensure_folder(target, overtaken) == target
    assert (target / "weights").read_text() == "fast" and [path.name for path in tmp_path.iterdir()] == ["there"]


def test_too_little_memory_is_told_before_loading(file, cache, monkeypatch):
    source = open_model(config(file))
    monkeypatch.setattr(gguf, "available_memory", lambda: 1000)
    monkeypatch.setattr(gguf.GgufSource, "_dequantise", lambda *_: pytest.fail("started to load"))
    with pytest.raises(InputError, match=r"model\.path=.*needs .* GiB of memory.*has 0\.0 GiB"):
        source.load("cpu", torch.float32)


def test_memory_estimate(file, original):
    size, peak = gguf.dequantised_bytes(file, 2)
    tensors = original.state_dict().values()
    assert size == 2 * sum(tensor.numel() for tensor in tensors)
    assert peak == size + 8 * max(tensor.numel() for tensor in tensors)


def test_missing_library_names_the_extra(file, cache, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(InputError, match=r"kvbench\[gguf\]"):
        open_model(config(file))


def test_what_is_no_gguf_file_is_told(tmp_path, cache):
    text, part = tmp_path / "a.gguf", tmp_path / "b-00001-of-00003.gguf"
    text.write_text("hello")
    part.write_bytes(b"GGUF")
    for path, said in ((text, "not a GGUF"), (part, "split"), (tmp_path, "folder"), (tmp_path / "x.gguf", "not exist")):
        with pytest.raises(InputError, match=rf"model\.path=.*{said}"):
            open_model(config(path))


@pytest.mark.skipif(not os.environ.get("KVBENCH_GGUF"), reason="set KVBENCH_GGUF to a model file to run this")
def test_real_file(caplog):
    caplog.set_level(logging.INFO)
    source = open_model(config(Path(os.environ["KVBENCH_GGUF"])))
    model = source.load("cpu", torch.float32)
    ids = source.tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in source.tokenizer.decode(answer[0])
