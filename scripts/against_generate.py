"""``method=full`` against ``transformers.generate`` on the same prompts: are the tokens equal, and what does it cost?

    python scripts/against_generate.py [repeats=3] [protocols=blind,aware] KEY=VALUE ...

The remaining arguments are those of ``python -m kvbench.run`` (model, task, limit, dtype ...). For every sample both
sides get the same token ids and the same stop rule. Prefill is the time to the first token (for kvbench: prefill,
compression and feeding), decode the time of all further tokens; the two sides take turns, and medians are compared.
Exit code 1 if any sample's tokens differ.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from kvbench.cell import Cell, Preparation
from kvbench.compose import cells, read
from kvbench.engine import Engine, StopRule
from kvbench.engine.attention import NAME
from kvbench.experiment import Models, log_to_terminal
from kvbench.protocols import ContextRun, Switches, plan, start, synchronise


@torch.inference_mode()
def generate(engine: Engine, ids: list[int], stop: StopRule) -> list[int]:
    """transformers' own greedy answer, its stop token included."""
    tokens = torch.tensor([ids], device=engine.device)
    out = engine.model.generate(  # type: ignore[operator]
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=stop.max_new_tokens,
        min_new_tokens=stop.min_new_tokens,
        do_sample=False,
        eos_token_id=sorted(stop.ids) or None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def ours(
    engine: Engine, cell: Cell, protocol: str, context: list[int], question: list[int], stop: StopRule
) -> list[int]:
    """The same through kvbench: capture, compression (of nothing), feeding, decoding."""
    planned = plan(Switches(protocol), len(context), question, None, cell.budget)
    run = ContextRun(engine, tuple(context), 0)
    started = start(run, cell.method, planned, question, stop.max_new_tokens)
    run.release()
    (generated,) = engine.decode([started.cache], started.logits[None], stop)
    return list(generated.ids)


def timed(engine: Engine, call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    synchronise(engine.device)
    began = time.perf_counter()
    tokens = call()
    synchronise(engine.device)
    return time.perf_counter() - began, tokens


def main(argv: list[str]) -> int:
    log_to_terminal()
    own = dict(argument.split("=", 1) for argument in argv if argument.startswith(("repeats=", "protocols=")))
    repeats, protocols = int(own.get("repeats", "1")), own.get("protocols", "blind,aware").split(",")
    rest = [argument for argument in argv if argument.split("=")[0] not in own]
    (run,) = cells(read([*rest, "method=full"])).values()
    cell = Preparation().cell(run)
    engine = Models().engine(cell)
    newline = cell.encoder.newline_ids() if cell.task.stop_at_newline else frozenset()
    different, seconds = [], {side: {"prefill": [], "decode": []} for side in ("generate", *protocols)}
    for sample in cell.samples:
        chat = cell.encoder.effective_chat(cell.task.chat)
        prompt = cell.encoder.encode(sample, chat, cell.max_prompt_tokens(sample), run.truncation)
        context, question = list(prompt.context_ids), list(prompt.question_ids)
        least = 1 if cell.task.stop_at_newline else 0
        stop = StopRule(cell.source.eos_ids() | newline, cell.max_new_tokens(sample), least)
        one = StopRule(frozenset(), 1)

        def reference(rule: StopRule, ids: list[int] = context + question) -> list[int]:
            engine.model.set_attn_implementation("sdpa")  # type: ignore[operator]
            try:
                return generate(engine, ids, rule)
            finally:
                engine.model.set_attn_implementation(NAME)  # type: ignore[operator]

        sides = {"generate": reference} | {
            protocol: lambda rule, p=protocol, c=context, q=question: ours(engine, cell, p, c, q, rule)
            for protocol in protocols
        }
        answers: dict[str, list[int]] = {}
        for _ in range(repeats):
            for side, call in sides.items():
                first, _tokens = timed(engine, lambda c=call, rule=one: c(rule))
                whole, answers[side] = timed(engine, lambda c=call, rule=stop: c(rule))
                seconds[side]["prefill"].append(first)
                if len(answers[side]) > 1:
                    seconds[side]["decode"].append((whole - first) / (len(answers[side]) - 1))
        unequal = [protocol for protocol in protocols if answers[protocol] != answers["generate"]]
        different += [(sample.id, protocol) for protocol in unequal]
        print(
            f"{sample.id}: {len(context) + len(question)} prompt tokens, {len(answers['generate'])} new, "
            + (f"DIFFERENT ({', '.join(unequal)})" if unequal else "equal"),
            flush=True,
        )
    print(f"{cell.task.name}: {len(cell.samples) * len(protocols) - len(different)} equal, {len(different)} different")
    for phase in ("prefill", "decode"):
        base = statistics.median(seconds["generate"][phase] or [float("nan")])
        for protocol in protocols:
            mine = statistics.median(seconds[protocol][phase] or [float("nan")])
            print(f"{phase:8} {protocol:7} {mine:.4f} s, generate {base:.4f} s, ratio {mine / base:.3f}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
