"""conf/model: every preset is a ModelConfig, and the templates written here wrap a prompt as the papers did."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvbench.config import ModelConfig
from kvbench.errors import InputError
from kvbench.models import open_model
from kvbench.models.byte_tokenizer import BOS, EOS, build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from kvbench.tasks.sample import Sample

FOLDER = Path(__file__).parents[2] / "conf" / "model"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SAMPLE = Sample(id="s", context="Doc.", question=" Who?", answers=("x",))


def preset(name: str) -> ModelConfig:
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(FOLDER / f"{name}.yaml"))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def wrapped(name: str) -> str:
    settings = preset(name)
    tokenizer = build_byte_tokenizer(template=settings.chat_template)
    encoder = PromptEncoder(tokenizer, chat=settings.chat, template_kwargs=settings.template_kwargs)
    return encoder.encode(SAMPLE, True, 1000).text


@pytest.mark.parametrize("name", NAMES)
def test_presets_fit_the_schema(name):
    settings = preset(name)
    if settings.source == "random":
        assert open_model(settings).window == settings.window
    elif name in ("hub", "folder", "gguf"):
        with pytest.raises(InputError, match=r"model\.path"):
            open_model(settings)
    else:
        assert settings.name == name and settings.window and settings.path and "/" in settings.path
        assert not settings.allow_pickle and not settings.trust_remote_code


def test_the_default_says_that_it_is_random():
    assert preset("probe").name == "probe-random-stand-in"


def test_vicuna_template():
    text = wrapped("longchat-7b-v1.5-32k")
    assert text == (
        f"{BOS}A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: Doc. Who? ASSISTANT:"
    )


@pytest.mark.parametrize("name", ["llama-2-7b-chat", "lwm-text-chat-1m"])
def test_llama_2_template(name):
    assert wrapped(name) == f"{BOS}[INST]Doc. Who?[/INST]"


@pytest.mark.parametrize("name", ["longchat-7b-v1.5-32k", "llama-2-7b-chat", "lwm-text-chat-1m"])
def test_end_of_turn_is_found_in_written_templates(name):
    from kvbench.models.eos import template_end_of_turn

    tokenizer = build_byte_tokenizer(template=preset(name).chat_template)
    assert template_end_of_turn(tokenizer, {}) == tokenizer.convert_tokens_to_ids(EOS)


def test_qwen3_does_not_think():
    assert preset("qwen3-8b").template_kwargs == {"enable_thinking": False}
