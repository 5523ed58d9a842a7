"""What lies in a model folder: which files make the model, and what is missing, said before anything loads."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import InputError

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
# One of these alone is enough for AutoTokenizer; the rest only refine it.
_TOKENIZER_CORES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json",
)  # fmt: skip
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def check_folder(folder: Path, key: str = "model.path") -> None:
    """Raise InputError by name if config.json or the tokenizer is missing."""
    if not folder.is_dir():
        reason = "is a file, not a folder." if folder.exists() else "does not exist."
        fix = "For a GGUF file use model=gguf." if folder.suffix == ".gguf" else "Give a folder that holds config.json."
        raise InputError(key, folder, reason, fix)
    if not (folder / "config.json").is_file():
        raise InputError(key, folder, "holds no config.json.", "Give the folder that save_pretrained wrote.")
    if not any((folder / name).is_file() for name in _TOKENIZER_CORES):
        raise InputError(
            key, folder, "holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json ...).",
            "Save it there: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
        )  # fmt: skip


def weight_files(folder: Path, allow_pickle: bool, key: str = "model.path") -> list[str]:
    """Names of the weight files that from_pretrained will read, index included; every shard is there."""
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLE, PICKLE_INDEX)):
        if (folder / single).is_file():
            names = [single]
        elif (folder / index).is_file():
            names = [index, *_shards(folder / index, key)]
        else:
            continue
        if single == PICKLE and not allow_pickle:
            raise InputError(
                "model.allow_pickle", "false", f"{folder} has only pickled weights ({names[0]}), which can run code.",
                "Set model.allow_pickle=true if you trust their author, or convert them to safetensors.",
            )  # fmt: skip
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(key, folder, f"lacks weight files: {', '.join(missing)}.", "Finish the download.")
        return names
    raise InputError(key, folder, f"holds no weights ({SAFETENSORS} or {SAFETENSORS_INDEX}).", "Finish the download.")


def identity_files(folder: Path, weights: list[str], code: bool) -> list[str]:
    """All files whose bytes can change the model's answers; with remote code allowed, the code too."""
    names = [name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if (folder / name).is_file()]
    patterns = ("*.tiktoken", "additional_chat_templates/*", *(("**/*.py",) if code else ()))
    for pattern in patterns:
        names += [path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file()]
    return [*names, *weights]


def _shards(index: Path, key: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(key, index, "is not a readable index of weight files.", "Download it again.") from error
