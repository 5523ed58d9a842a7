"""What ``python -m kvbench.run --help`` prints: every key, every group with its options, examples, exit codes."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

from omegaconf import OmegaConf

from kvbench import groups

USAGE = """\
usage: python -m kvbench.run [-m] [--config-dir DIR] [group=option ...] [key=value ...]

Runs a long-context model on a task with its KV cache compressed, and writes what that costs: score, bytes, time.
With -m every value may be a list (budget=64,128): all combinations are checked first, then run. Cells with the same
model and task share a sample's prefill and decode.
What has been computed before is not computed again."""

GROUP_HELP = {
    "model": "what reads and answers",
    "method": "what compresses the cache",
    "method/scorer": "what a method's scores are, in place of its own",
    "method/allocator": "how its budget is shared out among layers and heads",
    "method/codec": "how what it keeps is stored",
    "method/decode": "what it evicts at every decode step",
    "protocol": "whether the compression has seen the question",
    "task": "what is asked",
    "tracker": "where else records are sent",
    "paper": "the settings of a paper (+paper=...)",
}

# One line per key, in the order of conf/config.yaml; the tests compare this list with the schema.
KEY_HELP = {
    "budget": "stored entries per KV head (128), a share of the tokens in scope (0.25), or full",
    "budget_bytes": "instead of a budget: the largest that fits so many device bytes, sample by sample",
    "match": "the same with the bytes that this method (kivi2, kivi4, hcattention) holds on the sample",
    "budget_scope": "context: question entries are kept on top; prompt: the budget counts everything",
    "question_evictable": "true (with budget_scope=prompt): question entries compete like all others",
    "first_token": "compressed | full: the first answer token comes from this cache (full: uncompressed)",
    "truncation": "document: only the document is cut, to the exact length; official: LongBench's own cut",
    "positions": "original: kept keys keep their rotation; compact: positions within the cache",
    "limit": "only the first n samples; null: all",
    "seed": "of everything drawn at random",
    "device": "auto | cuda | cuda:N | mps | cpu",
    "dtype": "auto | float32 | bfloat16 | float16",
    "max_new_tokens": "longest answer in tokens; null: the task's own",
    "max_prompt_tokens": "longest prompt in tokens; null: the model's window less the answer",
    "runs": "root folder of all results",
    "experiment": "folder below it, for runs that belong together",
    "fail_fast": "true: stop at the first cell that fails",
    "dump_prompts": "true: write what the model saw",
}
MORE_KEYS = {
    "model.path": "hub id, folder or .gguf file (model=hub, folder, gguf)",
    "method.NAME": "a method's own value (method.window=16): see conf/method/",
    "task.path": "the task's data on disk: file or folder",
    "task.NAME": "a task's own value (task.length=4096): see conf/task/",
}

FLAGS = {
    "-m, --multirun": "run all combinations of the comma-separated values",
    "--config-dir DIR": "a folder with your own method/, task/, model/ YAML files",
    "--cfg job": "print the composed config instead of running (--resolve: with its references followed)",
    "--hydra-help": "more flags, those of Hydra, which reads this command line",
    "-h, --help": "this text",
    "--version": "kvbench's version",
}

ENDING = """\
examples:
  python -m kvbench.run method=snapkv protocol=blind budget=128
  python -m kvbench.run -m method=snapkv,streamingllm protocol=blind,aware budget=64,128,256
  python -m kvbench.run model=gguf model.path=model.gguf task=longbench/qasper task.path=longbench/ limit=5

exit codes: 0 all well; 1 something failed while running; 2 wrong input, found before anything expensive;
            130 and 143 stopped by a signal (the same command again goes on where it stopped)"""


def text(folders: Sequence[str]) -> str:
    """The help text, with the options found in ``folders``, of which the first has config.yaml."""
    defaults = shipped_defaults(os.path.join(folders[0], "config.yaml"))
    parts = [USAGE, "", "groups (option in use without a choice):"]
    for group, names in groups.options(folders).items():
        chosen = f" ({defaults[group]})" if group in defaults else ""
        parts.append(f"  {group}{chosen}: {GROUP_HELP.get(group, 'a group of your own')}")
        parts.append(_wrapped(", ".join(groups.listing(names)), "      "))
    parts += ["", "keys (default):"]
    for key, line in KEY_HELP.items():
        parts.append(_entry(f"{key} ({defaults[key]})" if key in defaults else key, line))
    parts += [_entry(key, line) for key, line in MORE_KEYS.items()]
    parts += ["", "flags:", *(_entry(flag, line) for flag, line in FLAGS.items()), "", ENDING]
    return "\n".join(parts)


def _entry(name: str, line: str) -> str:
    return f"  {name:<34}{line}"


def _wrapped(line: str, indent: str) -> str:
    return textwrap.fill(line, 110, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def shipped_defaults(config_file: str) -> dict[str, str]:
    """group or key -> its default, as config.yaml has it."""
    config = OmegaConf.to_container(OmegaConf.load(config_file))
    assert isinstance(config, dict)
    chosen = {k: str(v) for entry in config["defaults"] if isinstance(entry, dict) for k, v in entry.items()}
    plain = {str(k): _yaml_word(v) for k, v in config.items() if k not in ("defaults", "hydra")}
    return {**chosen, **plain}


def _yaml_word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
