"""Opening and loading models: random weights, folders, pickles, GGUF; every mistake named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbench.config import ModelConfig
from kvbench.errors import InputError
from kvbench.models import display_name, open_model
from kvbench.models.byte_tokenizer import EOS, SIZE, TURN_END

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
IDS = torch.arange(40)[None]  # [1, 40]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def random_config(**values) -> ModelConfig:
    return ModelConfig(name="random", source="random", random={"architecture": "llama", **SIZES, **HEADS, **values})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def folder(tmp_path) -> Path:
    source = open_model(random_config())
    target = tmp_path / "model"
    source.load("cpu", torch.float32).save_pretrained(target)
    source.tokenizer.save_pretrained(target)
    return target


def folder_config(folder: Path, **values) -> ModelConfig:
    return ModelConfig(name="folder", source="folder", path=str(folder), **values)


# ---- random --------------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_the_settings_alone():
    first = logits(open_model(random_config()).load("cpu", torch.float32))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert torch.equal(logits(open_model(random_config()).load("cpu", torch.float32)), first)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(logits(open_model(random_config(seed=1)).load("cpu", torch.float32)), first)
    assert first.std() > 0.5  # weights are wide enough for a wrong position to show


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mixtral"])
def test_random_of_other_architectures(architecture):
    source = open_model(random_config(architecture=architecture, max_position_embeddings=256))
    model = source.load("cpu", torch.bfloat16)
    assert source.window == 256 and model.dtype is torch.bfloat16 and not model.training
    assert logits(model).shape == (1, 40, SIZE)


def test_random_identity_follows_the_settings():
    hashes = {open_model(random_config(**kwargs)).content_sha256 for kwargs in ({}, {"seed": 1}, {"init_range": 0.1})}
    assert len(hashes) == 3
    assert open_model(random_config()).content_sha256 in hashes


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"architecture": "lama"}, r"model\.random\.architecture=lama.*Did you mean llama"),
        ({"hiden_size": 3}, r"model\.random\.hiden_size=3.*hidden_size"),
        ({"vocab_size": 100}, r"model\.random\.vocab_size=100"),
        ({"seed": -1}, r"model\.random\.seed=-1"),
        ({"seed": "x"}, r"model\.random\.seed=x"),
        ({"hidden_size": "wide"}, r"model\.random="),
        ({"num_key_value_heads": 32}, r"model\.random\.num_key_value_heads=32"),
    ],
)
def test_random_mistakes_are_named(values, key):
    with pytest.raises(InputError, match=key):
        open_model(random_config(**values))


def test_random_model_says_that_it_is_one(caplog):
    open_model(random_config())
    assert "scores mean nothing" in caplog.text


# ---- settings of every source --------------------------------------------------------------------------------------


def test_window_setting_wins_over_the_config():
    assert open_model(dataclasses.replace(random_config(), window=77)).window == 77
    with pytest.raises(InputError, match=r"model\.window"):
        _ = open_model(dataclasses.replace(random_config(), window=0)).window


def test_a_model_without_a_stated_window_needs_one():
    source = open_model(random_config())
    source.__dict__["config"] = SimpleNamespace(get_text_config=object)
    with pytest.raises(InputError, match=r"model\.window"):
        _ = source.window


def test_chat_template_setting_replaces_the_tokenizers():
    source = open_model(dataclasses.replace(random_config(), chat_template="{{ messages[0].content }}"))
    assert source.tokenizer.chat_template == "{{ messages[0].content }}"


def test_source_and_path_are_checked():
    with pytest.raises(InputError, match=r"model\.source"):
        open_model(ModelConfig(name="x", source="disk"))
    for source in ("hub", "folder", "gguf"):
        with pytest.raises(InputError, match=r"model\.path"):
            open_model(ModelConfig(name="x", source=source))


def test_display_name():
    assert display_name(ModelConfig(name="gguf", source="gguf", path="/a/b-q4.gguf")) == "b-q4"
    assert display_name(ModelConfig(name="hub", source="hub", path="owner/name")) == "name"
    assert display_name(ModelConfig(name="folder", source="folder", path="/a/model-1.5/")) == "model-1.5"
    assert display_name(ModelConfig(name="mine", source="folder", path="/a/b")) == "mine"


# ---- folder --------------------------------------------------------------------------------------------------------


def test_folder_round_trip(folder):
    source = open_model(folder_config(folder))
    expected = logits(open_model(random_config()).load("cpu", torch.float32))
    assert torch.equal(logits(source.load("cpu", torch.float32)), expected)
    assert source.tokenizer.encode("hé") == open_model(random_config()).tokenizer.encode("hé")
    assert source.checkpoint_dtype is torch.float32


def test_content_hash_is_of_content(folder, tmp_path):
    source = open_model(folder_config(folder))
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, moved)
    assert open_model(folder_config(moved)).content_sha256 == source.content_sha256
    (moved / "README.md").write_text("not part of the model")
    assert open_model(folder_config(moved)).content_sha256 == source.content_sha256
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        changed = tmp_path / "changed" / name
        shutil.copytree(folder, changed)
        data = bytearray((changed / name).read_bytes())
        data[-1:] = b" " if name != "model.safetensors" else bytes([data[-1] ^ 1])
        if name.endswith(".json"):
            data = bytearray((folder / name).read_bytes() + b"\n ")
        (changed / name).write_bytes(bytes(data))
        assert open_model(folder_config(changed)).content_sha256 != source.content_sha256, name


def test_hash_memory_is_used_and_survives_damage(folder, monkeypatch):
    from kvbench.models import hashing

    digest = open_model(folder_config(folder)).content_sha256
    memory = hashing.cache_root() / "hashes.json"
    assert memory.is_file()
    calls = []
    real = hashing._hash_bytes
    monkeypatch.setattr(hashing, "_hash_bytes", lambda path: calls.append(path) or real(path))
    assert open_model(folder_config(folder)).content_sha256 == digest and not calls
    for damage in ("{", "[]", '{"a": 1}', json.dumps({os.path.realpath(folder / "config.json"): [1, 2]})):
        memory.write_text(damage)
        assert open_model(folder_config(folder)).content_sha256 == digest
    assert len(calls) >= 4
    # the same size and content, but another time: hashed again
    os.utime(folder / "config.json", ns=(1, 1))
    calls.clear()
    assert open_model(folder_config(folder)).content_sha256 == digest and len(calls) == 1


def test_missing_parts_are_named(folder, tmp_path):
    with pytest.raises(InputError, match=r"model\.path.*does not exist"):
        open_model(folder_config(tmp_path / "nowhere"))
    for part, said in (
        ("config.json", "config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no weights"),
    ):
        broken = tmp_path / f"without-{part}"
        shutil.copytree(folder, broken)
        (broken / part).unlink()
        with pytest.raises(InputError, match=rf"model\.path.*{said}"):
            open_model(folder_config(broken))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="model-00002-of-00002"):
        open_model(folder_config(folder))


def test_pickles_are_refused_unless_allowed(folder):
    from safetensors.torch import load_file

    expected = logits(open_model(folder_config(folder)).load("cpu", torch.float32))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.allow_pickle"):
        open_model(folder_config(folder))
    allowed = open_model(folder_config(folder, allow_pickle=True))
    assert torch.equal(logits(allowed.load("cpu", torch.float32)), expected)


@pytest.mark.parametrize("damage", ["missing", "shape", "cut", "empty"])
def test_damaged_weights_are_refused(folder, damage):
    """transformers fills what a checkpoint lacks with random numbers: that must never pass for the model."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if "up_proj" in name)
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    if damage in ("cut", "empty"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(InputError, match=r"model\.path.*" + ("lacks weights.*up_proj" if damage == "missing" else "")):
        open_model(folder_config(folder)).load("cpu", torch.float32)


def test_remote_code_is_refused_unless_allowed(folder):
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    stored.update(model_type="brand_new", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    file.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"model\.trust_remote_code"):
        open_model(folder_config(folder))
    del stored["auto_map"]
    file.write_text(json.dumps(stored))
    with pytest.raises(InputError, match="brand_new"):
        open_model(folder_config(folder))
    for text in ("{", "[]", '{"model_type": "llama", "hidden_size": "wide"}'):
        file.write_text(text)
        with pytest.raises(InputError, match=r"config\.json"):
            open_model(folder_config(folder))


# ---- end ids -------------------------------------------------------------------------------------------------------


def test_eos_ids_join_all_sources(folder):
    tokenizer = open_model(folder_config(folder)).tokenizer
    end, turn = tokenizer.convert_tokens_to_ids([EOS, TURN_END])
    for stored, ids in ((7, {7}), ([7, 9], {7, 9}), (None, set())):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
        assert open_model(folder_config(folder)).eos_ids() == {end, turn, *ids}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert turn not in open_model(folder_config(folder, chat_template=template)).eos_ids()


# ---- hub -----------------------------------------------------------------------------------------------------------


def test_hub_offline_names_key_and_way_out(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    monkeypatch.chdir(tmp_path)
    for error, said in ((LocalEntryNotFoundError("x"), "model=folder"), (OSError("x"), "cannot be reached")):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", _raiser(error))
        with pytest.raises(InputError, match=rf"model\.path=owner/name.*{said}"):
            open_model(ModelConfig(name="x", path="owner/name"))
    error = RevisionNotFoundError.__new__(RevisionNotFoundError)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raiser(error))
    with pytest.raises(InputError, match=r"model\.revision=v9"):
        open_model(ModelConfig(name="x", path="owner/name", revision="v9"))
    with pytest.raises(InputError, match="model=folder"):
        open_model(ModelConfig(name="x", path=str(tmp_path)))


def test_hub_snapshot_is_hashed_like_a_folder(monkeypatch, folder):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda path, **kwargs: asked.append(kwargs["allow_patterns"]) or folder
    )
    source = open_model(ModelConfig(name="hub", path="owner/name"))
    assert not any("safetensors" in pattern for pattern in asked[0])  # opening downloads no weights
    assert source.content_sha256 == open_model(folder_config(folder)).content_sha256
    assert source.name == "name" and logits(source.load("cpu", torch.float32)).isfinite().all()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"model\.allow_pickle"):
        _ = open_model(ModelConfig(name="hub", path="owner/name")).content_sha256


def _raiser(error):
    def fail(*args, **kwargs):
        raise error

    return fail
