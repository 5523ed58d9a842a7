"""Needle in a haystack: one fact in prose, over a grid of depths and exact prompt lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.errors import InputError
from kvbench.suggest import one_of
from kvbench.tasks.fitting import Needle, fit
from kvbench.tasks.haystack import Haystack, folder_haystack, pydoc_haystack
from kvbench.tasks.made import at_least, depth_in_range, listed, made_task, no_path, wording
from kvbench.tasks.sample import Sample, Task


def build(
    *,
    encoder: Any,
    seed: int = 0,
    name: str = "niah",
    path: str | None = None,
    length: int | Sequence[int] = 1024,
    depths: int | Sequence[float] = 10,
    repeats: int = 1,
    haystack: str = "pydoc",
    needles: str = "facts",
    answer_prefix: bool = True,
    chat: bool = True,
) -> Task:
    """One sample per length, depth and repeat, each prompt exactly ``length`` tokens long (template included).

    ``depths`` is a list of depths (0..1), or how many to spread evenly from the start to the end. ``haystack`` is
    ``pydoc`` (the prose in every CPython; its text depends on the version) or a folder of *.txt files. ``needles``
    names a set in niah.yaml. The needle stands at the sentence boundary nearest to its depth.
    """
    no_path("niah", path)
    at_least("task.repeats", repeats, 1)
    lengths = listed(length)
    for one in lengths:
        at_least("task.length", one, 1)
    places = _depths(depths)
    for key, values in (("task.length", lengths), ("task.depths", places)):
        if not values or len({f"{value:.4f}" for value in values}) < len(
            values
        ):  # equal ids would overwrite each other's records
            raise InputError(key, values, "the list is empty or names a value twice.")
    sets = wording("niah.yaml")["sets"]
    if needles not in sets:
        raise InputError("task.needles", needles, "there is no such set of needles.", one_of(needles, sets))
    hay = pydoc_haystack() if haystack == "pydoc" else folder_haystack(haystack)
    make = _Maker(encoder, chat, seed, hay, haystack, needles, answer_prefix)
    made = tuple(make.sample(n, depth, i) for i in range(repeats) for n in lengths for depth in places)
    if all(sample.error for sample in made):
        raise InputError("task.length", length, f"no sample can be made: {made[0].error}")
    return made_task(name, "contains", made, max_new_tokens=40, chat=chat)


def _depths(depths: int | Sequence[float]) -> list[float]:
    if isinstance(depths, int):
        at_least("task.depths", depths, 1)
        return [0.5] if depths == 1 else [i / (depths - 1) for i in range(depths)]
    return [depth_in_range("task.depths", depth) for depth in listed(depths)]


@dataclass(frozen=True)
class _Maker:
    """The parameters that all samples share."""

    encoder: Any
    chat: bool
    seed: int
    haystack: Haystack
    haystack_name: str
    needles: str
    answer_prefix: bool

    def sample(self, length: int, depth: float, repeat: int) -> Sample:
        """The sample of one grid point; its draw depends on the point and the seed only."""
        rng = random.Random(f"niah {self.seed} {length} {depth} {repeat}")
        fact = rng.choice(wording("niah.yaml")["sets"][self.needles])
        place, value = rng.choice(fact["places"]), rng.choice(fact["values"])
        statement = rng.choice(fact["statements"]).format(place=place, value=value)
        statement = statement[0].upper() + statement[1:]
        bare = Sample(
            id=f"niah-{length}-d{depth:.4f}-r{repeat}-s{self.seed}",
            instruction=wording("niah.yaml")["instruction"],
            context="",
            question="\n\n" + fact["question"].format(place=place),
            answer_prefix=fact["answer_prefix"].format(place=place) if self.answer_prefix else "",
            answers=(value,),
            other_question="\n\n" + wording("niah.yaml")["other_question"],
        )
        try:
            document, (reached,) = self._document(bare, statement, depth, length, rng)
        except InputError as error:
            return replace(bare, error=f"{error}")
        info = {"length": length, "depth": depth, "depth_reached": reached, "haystack": self.haystack_name}
        return replace(bare, context=document, info=info)

    def _document(
        self, bare: Sample, statement: str, depth: float, length: int, rng: random.Random
    ) -> tuple[str, list[float]]:
        return fit(
            self.haystack,
            [Needle(statement if statement.endswith("\n") else statement + " ", depth)],
            start=rng.randrange(len(self.haystack.units)),
            length=length,
            count=lambda text: self.encoder.count(replace(bare, context=text), self.chat),
        )
