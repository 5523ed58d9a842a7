"""GGUF files: dequantised once, then loaded from a copy that takes a second instead of half a minute."""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import re
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .copies import ensure_folder, is_complete
from .hashing import cache_root, sha256_file
from .memory import GIB, available_memory
from .source import ModelSource, read_weights
from .support import refuse

if TYPE_CHECKING:
    import torch

    from ..config import ModelConfig

log = logging.getLogger(__name__)
_MAGIC = b"GGUF"


class GgufSource(ModelSource):
    """``model.path`` is one GGUF file. Tokenizer, config and dequantised weights are cached by its content."""

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__(settings)
        self.file = Path(str(settings.path)).expanduser()
        _check_file(self.file)
        refuse(self.config, value=settings.path)

    @cached_property
    def content_sha256(self) -> str:
        return sha256_file(self.file)

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._description, local_files_only=True)

    def read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._description, local_files_only=True)

    def read_model(self, device: str, dtype: torch.dtype, attn_implementation: str) -> Any:
        target = self._copies / f"{self.content_sha256}-{str(dtype).removeprefix('torch.')}"
        if not is_complete(target):
            _need_libraries(self.file)
            self._check_room(dtype, target.parent)
            log.info("dequantising %s (once; kept in %s)", self.file.name, target)
        ensure_folder(target, lambda folder: self._dequantise(folder, dtype))
        return read_weights(
            target, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=True, local_files_only=True
        )

    @property
    def _copies(self) -> Path:
        return cache_root() / "dequantised"

    @cached_property
    def _description(self) -> Path:
        """A folder with the file's config and tokenizer, which take 20 s to read from a large vocabulary."""
        return ensure_folder(self._copies / f"{self.content_sha256}-description", self._describe)

    def _describe(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        _need_libraries(self.file)
        log.info("reading config and tokenizer of %s (once)", self.file.name)
        try:
            config = AutoConfig.from_pretrained(self.file.parent, gguf_file=self.file.name)
            tokenizer = AutoTokenizer.from_pretrained(self.file.parent, gguf_file=self.file.name)
        except Exception as error:  # a malformed or unknown file fails wherever the libraries first stumble
            raise InputError(
                "model.path", self.file, f"transformers cannot read this GGUF file: {error}.",
                "Use an architecture that its GGUF loader knows, or the original weights (model=folder).",
            ) from error  # fmt: skip
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _dequantise(self, folder: Path, dtype: torch.dtype) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.file.parent, gguf_file=self.file.name, dtype=dtype, **_unpacked()
        )
        config = copy.deepcopy(model.config)
        if hasattr(config, "quantization_config"):
            delattr(config, "quantization_config")
        # A model that came from a GGUF file refuses to be saved; a twin without weights of its own takes them over.
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(config, dtype=dtype)
        twin.load_state_dict(model.state_dict(), strict=True, assign=True)
        twin.tie_weights()
        twin.generation_config = model.generation_config
        twin.save_pretrained(folder)
        self.read_tokenizer().save_pretrained(folder)  # so that the copy is a model folder of its own
        del model, twin
        gc.collect()  # the copy is loaded next: two models at once may not fit

    def _check_room(self, dtype: torch.dtype, folder: Path) -> None:
        size, peak = dequantised_bytes(self.file, dtype.itemsize)
        free = available_memory()
        if free is not None and peak > free:
            raise InputError(
                "model.path", self.file, f"needs {peak / GIB:.1f} GiB of memory to be dequantised to "
                f"{str(dtype).removeprefix('torch.')}, has {free / GIB:.1f} GiB.",
                "Use a smaller model, a 16-bit dtype, or a machine with more memory.",
            )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(folder).free
        if size > disk:
            raise InputError(
                "KVBENCH_CACHE", folder, f"the dequantised copy needs {size / GIB:.1f} GiB, the disk has "
                f"{disk / GIB:.1f} GiB.", "Set KVBENCH_CACHE to a folder on a larger disk.",
            )  # fmt: skip


def dequantised_bytes(file: Path, itemsize: int) -> tuple[int, int]:
    """(bytes of all tensors of a GGUF file in ``itemsize`` bytes a number, peak bytes while they are unpacked)."""
    from gguf import GGUFReader

    counts = [int(tensor.n_elements) for tensor in GGUFReader(file).tensors]
    # The largest tensor is unpacked in float32, beside a converted copy of it.
    return sum(counts) * itemsize, sum(counts) * itemsize + 2 * 4 * max(counts, default=0)


def _check_file(file: Path) -> None:
    if not file.is_file():
        reason = "is a folder, not a GGUF file." if file.is_dir() else "does not exist."
        raise InputError("model.path", file, reason, "Give a .gguf file (for a folder: model=folder).")
    with open(file, "rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise InputError(
                "model.path", file, "is not a GGUF file.", "Give a .gguf file (for a folder: model=folder)."
            )
    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", file.name):
        raise InputError("model.path", file, "is one part of a split GGUF file.", "Join the parts into one file first.")


def _need_libraries(file: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            "model.path", file, f"reading a GGUF file needs {' and '.join(missing)}.", "pip install 'kvbench[gguf]'"
        )


def _unpacked() -> dict[str, Any]:
    """Newer transformers can keep weights packed; ours are always unpacked, so that they can be saved."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older releases always unpack
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
