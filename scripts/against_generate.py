"""``method=full`` against ``transformers.generate`` on the same prompts: are the tokens equal, and what does it cost?

    python scripts/against_generate.py [repeats=3] [steps=32] [protocols=blind,aware] KEY=VALUE ...

The remaining arguments are those of ``python -m kvbench.run`` (model, task, limit, dtype ...). For every sample both
sides get the same token ids and the same stop rule, and their answers are compared. With ``repeats`` above 0 both are
timed as well, in turns, over ``steps`` tokens that nothing stops: prefill is the time to the first token (for kvbench:
prefill, compression and feeding), decode the mean time of each further token. Medians are printed with their ratio.
Exit code 1 if any sample's tokens differ.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.cell import Cell, Preparation
from kvbench.compose import cells, read
from kvbench.engine import Engine, StopRule
from kvbench.engine.attention import NAME
from kvbench.experiment import Models, log_to_terminal
from kvbench.protocols import ContextRun, Switches, plan, start, synchronise


@dataclass(frozen=True)
class Answer:
    """Tokens, and the seconds to the first of them and for each further one."""

    ids: list[int]
    prefill_s: float
    decode_s: float


def reference(engine: Engine, ids: list[int], stop: StopRule) -> Answer:
    """transformers' own greedy answer."""
    tokens = torch.tensor([ids], device=engine.device)
    times: list[float] = []

    def tick(*_: Any, **__: Any) -> torch.Tensor:
        """A stopping criterion that never stops, called after every token."""
        synchronise(engine.device)
        times.append(time.perf_counter())
        return torch.zeros(1, dtype=torch.bool, device=engine.device)

    engine.model.set_attn_implementation("sdpa")
    try:
        synchronise(engine.device)
        began = time.perf_counter()
        out = engine.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=stop.max_new_tokens,
            min_new_tokens=stop.min_new_tokens,
            do_sample=False,
            eos_token_id=sorted(stop.ids) or None,
            pad_token_id=0,
            stopping_criteria=[tick],
        )
    finally:
        engine.model.set_attn_implementation(NAME)
    return Answer(out[0, len(ids) :].tolist(), times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1))


def ours(engine: Engine, cell: Cell, protocol: str, context: list[int], question: list[int], stop: StopRule) -> Answer:
    """The same through kvbench: capture, compression (of nothing), feeding, decoding."""
    planned = plan(Switches(protocol), len(context), question, None, cell.budget)
    run = ContextRun(engine, tuple(context), cell.method.needs)
    began = run.now()
    started = start(run, cell.method, planned, question, stop.max_new_tokens)
    run.release()
    prefilled = run.now()
    (generated,) = engine.decode([started.cache], started.logits[None], stop)
    steps = max(1, len(generated.ids) - 1)
    return Answer(list(generated.ids), prefilled - began, (run.now() - prefilled) / steps)


def main(argv: list[str]) -> int:
    log_to_terminal()
    own = dict(argument.split("=", 1) for argument in argv if argument.startswith(("repeats=", "protocols=", "steps=")))
    protocols = own.get("protocols", "blind,aware").split(",")
    rest = [argument for argument in argv if argument.split("=")[0] not in own]
    (run,) = cells(read([*rest, "method=full"])).values()
    cell = Preparation().cell(run)
    engine = Models().engine(cell)
    timing = StopRule(frozenset(), int(own.get("steps", "32")))
    newline = cell.encoder.newline_ids() if cell.task.stop_at_newline else frozenset()
    different = 0
    answers: dict[str, list[Answer]] = {side: [] for side in ("generate", *protocols)}
    for sample in cell.samples:
        chat = cell.encoder.effective_chat(cell.task.chat)
        prompt = cell.encoder.encode(sample, chat, cell.max_prompt_tokens(sample), run.truncation)
        context, question = list(prompt.context_ids), list(prompt.question_ids)
        least = 1 if cell.task.stop_at_newline else 0
        stop = StopRule(cell.source.eos_ids() | newline, cell.max_new_tokens(sample), least)
        sides: dict[str, Callable[[StopRule], Answer]] = {
            "generate": lambda rule, ids=context + question: reference(engine, ids, rule)
        }
        for protocol in protocols:
            sides[protocol] = lambda rule, p=protocol, c=context, q=question: ours(engine, cell, p, c, q, rule)
        found = {side: call(stop).ids for side, call in sides.items()}
        unequal = [protocol for protocol in protocols if found[protocol] != found["generate"]]
        different += len(unequal)
        verdict = f"DIFFERENT ({', '.join(unequal)})" if unequal else "equal"
        length = len(context) + len(question)
        print(f"{sample.id}: {length} prompt tokens, {len(found['generate'])} new, {verdict}", flush=True)
        for _ in range(int(own.get("repeats", "3"))):
            for side, call in sides.items():
                answers[side].append(call(timing))
    print(f"{cell.task.name}: {len(cell.samples) * len(protocols) - different} equal, {different} different")
    for phase in ("prefill_s", "decode_s"):
        medians = {
            side: statistics.median(getattr(a, phase) for a in timed) for side, timed in answers.items() if timed
        }
        for protocol in protocols if medians else []:
            ratio = medians[protocol] / medians["generate"]
            print(f"{phase} {protocol}: {medians[protocol]:.4f}, generate {medians['generate']:.4f}, ratio {ratio:.3f}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
