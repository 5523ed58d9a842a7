"""Passkey retrieval: one or several keys in filler text, the prompt exactly as long as asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from kvbench.errors import InputError
from kvbench.suggest import one_of
from kvbench.tasks.fitting import Needle, fit
from kvbench.tasks.haystack import Haystack, pydoc_haystack, sentences, stratified_depth
from kvbench.tasks.made import at_least, depth_in_range, made_task, no_path, wording
from kvbench.tasks.sample import Sample, Task

FILLERS = ("grass", "pydoc")


def build(
    *,
    encoder: Any,
    seed: int = 0,
    name: str = "passkey",
    path: str | None = None,
    length: int = 1024,
    samples: int = 20,
    keys: int = 1,
    depth: float | None = None,
    filler: str = "grass",
    digits: int = 5,
    answer_prefix: bool = True,
    chat: bool = True,
) -> Task:
    """``samples`` prompts of exactly ``length`` tokens (``encoder.count``, template included).

    ``depth`` is where the asked key stands (0..1); None spreads it evenly over the samples, whatever their number.
    With ``keys`` > 1 the keys have names, the question names one, and the others are spread around it. Sample i
    depends on the seed and i only, so more samples leave the first ones as they are.
    """
    no_path("passkey", path)
    at_least("task.length", length, 1)
    at_least("task.samples", samples, 1)
    at_least("task.digits", digits, 1)
    at_least("task.keys", keys, 1, min(len(wording("passkey.yaml")["names"]), 9 * 10 ** (digits - 1)))
    if filler not in FILLERS:
        raise InputError("task.filler", filler, "there is no such filler.", one_of(filler, FILLERS))
    if depth is not None:
        depth = depth_in_range("task.depth", depth)
    make = _Maker(encoder, chat, seed, length, keys, depth, filler, digits, answer_prefix)
    made = tuple(make.sample(index) for index in range(samples))
    return made_task(name, "passkey", made, max_new_tokens=digits + 11, chat=chat)


@dataclass(frozen=True)
class _Maker:
    """The parameters that all samples share."""

    encoder: Any
    chat: bool
    seed: int
    length: int
    keys: int
    depth: float | None
    filler: str
    digits: int
    answer_prefix: bool

    def sample(self, index: int) -> Sample:
        """Sample ``index``; nothing of it depends on the samples before it."""
        rng = random.Random(f"passkey {self.seed} {index}")
        # all different, or another name's key would count as right; no leading zero, which a model would drop
        keys = [str(key) for key in rng.sample(range(10 ** (self.digits - 1), 10**self.digits), self.keys)]
        names = rng.sample(wording("passkey.yaml")["names"], self.keys)
        depth = stratified_depth(self.seed, index) if self.depth is None else self.depth
        # the asked key is the first; the others stand at equal distances from it, around the end
        depths = [depth, *((depth + j / self.keys) % 1.0 for j in range(1, self.keys))]
        texts = [self._form("needle").format(key=key, name=name) + " " for key, name in zip(keys, names, strict=True)]
        bare = self._asking(index, keys[0], names)
        hay = _grass() if self.filler == "grass" else pydoc_haystack()
        document, reached = fit(
            hay,
            [Needle(text, depth) for text, depth in zip(texts, depths, strict=True)],
            start=0 if self.filler == "grass" else rng.randrange(len(hay.units)),
            length=self.length,
            count=lambda text: self.encoder.count(replace(bare, context=text), self.chat),
        )
        return replace(bare, context=document, info={"depth": reached[0], **bare.info})

    def _form(self, part: str) -> str:
        return wording("passkey.yaml")["one_key" if self.keys == 1 else "several_keys"][part]

    def _asking(self, index: int, key: str, names: list[str]) -> Sample:
        """The sample without its document: it asks for the first name; ``swapped`` asks for the second."""

        def ask(name: str) -> tuple[str, str]:
            prefix = self._form("answer_prefix").format(name=name) if self.answer_prefix else ""
            return "\n\n" + self._form("question").format(name=name), prefix

        question, prefix = ask(names[0])
        # with one key there is nothing else to ask for; a question about the text must not hint at the key
        other, other_prefix = (
            ask(names[1]) if self.keys > 1 else ("\n\n" + wording("passkey.yaml")["other_question"], "")
        )
        return Sample(
            id=f"passkey-{self.length}-s{self.seed}-{index:04d}",
            instruction=wording("passkey.yaml")["instruction"],
            context="",
            question=question,
            answer_prefix=prefix,
            answers=(key,),
            other_question=other,
            other_answer_prefix=other_prefix,
            info={"length": self.length, "keys": self.keys, "filler": self.filler},
        )


def _grass() -> Haystack:
    """One line, repeated: the filler of the task's first version. Its sentences are the units, so that the key stands
    within three tokens of its depth."""
    *others, last = sentences(wording("passkey.yaml")["filler"])
    return Haystack((*(sentence + " " for sentence in others), last + "\n"))
