"""Running one cell of the experiment on token ids, straight through the product's own modules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.budget import Budget
from kvbench.config import conf_dir
from kvbench.engine import Engine, StopRule
from kvbench.engine.rotation import discover
from kvbench.methods import Method, build
from kvbench.methods.codebook import Codebooks
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.hcattention import HCAttention
from kvbench.methods.head_classes import HeadClasses
from kvbench.methods.kvzip import KVzip
from kvbench.methods.setup import Setup
from kvbench.models.byte_tokenizer import build_byte_tokenizer
from kvbench.prompts import PromptEncoder
from kvbench.protocols import ContextRun, Start, Switches, plan, start

VARIANTS = ("snapkv_niah", "snapkv_command_r", "snapkv_kvcf")  # other settings of a method that is listed anyway
METHODS = sorted(p.stem for p in Path(conf_dir(), "method").glob("*.yaml") if p.stem not in VARIANTS)
EVICTING = [name for name in METHODS if name not in ("full", "kivi2", "kivi4", "hcattention")]
APPROXIMATE = ["hcattention"]  # never computes with the keys themselves, however short the text
PROTOCOLS = ["blind", "aware", "swapped"]


@cache
def method(name: str, *overrides: str) -> Method:
    """A method as ``conf/method`` composes it, its window cut to 8 for tiny contexts unless told otherwise."""
    return build(method_config(name, *overrides), instantiate)


@cache
def method_config(name: str, *overrides: str) -> dict:
    """The resolved configuration of a method."""
    windowed = "window:" in Path(conf_dir(), "method", f"{name}.yaml").read_text()
    small = ["method.window=8"] if windowed and not any("window" in o for o in overrides) else []
    if name.startswith("kivi"):  # tiny heads have 16 dimensions
        small = ["method.codec.group=16", *small]
    if name == "hcattention":
        small = ["method.codec.groups=4", "method.codec.centroids=64"]
    if name == "lagkv":
        small = ["method.lag=8"]
    if name == "kvzip":
        small = ["method.repeat_chunk=32", "method.sinks=2"]
    if name == "duoattention":
        small = ["method.sinks=2", "method.recent=6"]
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        config = compose("config", [f"method={name}", *small, *overrides])
    return OmegaConf.to_container(config.method, resolve=True)


def begin(
    engine: Engine,
    method: Method,
    context: list[int],
    question: list[int],
    switches: Switches,
    budget: object,
    other: list[int] | None = None,
    compact: bool = False,
    run: ContextRun | None = None,
    room: int = 16,
    shared: bool = True,
) -> Start:
    """Everything up to the logits of the first answer token."""
    method = fitted(method, engine)
    run = run or ContextRun(engine, tuple(context), method.needs, shared=shared)
    planned = plan(switches, len(context), question, other, Budget.parse(budget))
    rotation = discover(engine) if compact else None
    return start(run, method, planned, question, room, rotation)


def fitted(method: Method, engine: Engine) -> Method:
    """The method with made-up head classes or codebooks where it would measure them."""
    if isinstance(method.codec, HCAttention):
        return with_codebooks(method, engine)
    if isinstance(method.scorer, KVzip):
        return replace(
            method, scorer=replace(method.scorer, setup=Setup(engine, PromptEncoder(build_byte_tokenizer()), "tiny"))
        )
    if isinstance(method.scorer, ExpectedAttention):
        return replace(method, scorer=replace(method.scorer, rotation=discover(engine)))
    return with_classes(method, engine) if isinstance(method.allocator, HeadClasses) else method


@cache
def with_codebooks(method: Method, engine: Engine) -> Method:
    """Centroids are the keys of some text: deterministic, and of the keys' own size."""
    codec = method.codec
    assert isinstance(codec, HCAttention)
    capture = engine.prefill(text(codec.centroids, 77))
    whole = [layer for layer in capture.layers if layer.options.sliding_window is None]
    books = {la.index: la.keys.float().unflatten(2, (codec.groups, -1)).transpose(1, 2).contiguous() for la in whole}
    return replace(method, codec=replace(codec, books=Codebooks(books, {})))


@cache
def with_classes(method: Method, engine: Engine) -> Method:
    assert isinstance(method.allocator, HeadClasses)
    layers = [layer for layer in engine.prefill([1]).layers if layer.options.sliding_window is None]
    rows = tuple(tuple((7 * i + 3 * h) % 5 / 5 for h in range(len(layer.keys))) for i, layer in enumerate(layers))
    return replace(method, allocator=replace(method.allocator, importance=rows))


def answer(engine: Engine, started: Start, new: int = 12) -> list[int]:
    """Greedy tokens that follow."""
    (generated,) = engine.decode([started.cache], started.logits[None], StopRule(frozenset(), new))
    assert generated.finite
    return list(generated.ids)


def text(length: int, seed: int, vocabulary: int = 128) -> list[int]:
    """Token ids that look random and are not."""
    return [(seed * 31 + i * i * 7 + i * 13 + (i >> 2)) % vocabulary for i in range(length)]
