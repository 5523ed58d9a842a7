"""Product quantisation of keys: codebooks, the codes they give, and the files they are kept in.

A key of ``dim`` channels is cut into ``groups`` neighbouring sub-vectors of ``dim / groups`` channels, and each is
replaced by the number of its nearest centroid (HCAttention, arXiv 2507.19823, section 3.1). Numbers go up to 65535:
they are held as the bits of an int16, because few operations of torch know uint16.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kvbench.engine.cache import as_bytes
from kvbench.errors import InputError
from kvbench.results.files import parse_strict, strict_json, sync_folder

if TYPE_CHECKING:
    from kvbench.methods.setup import LayerShape, Setup

log = logging.getLogger(__name__)

KEY = "method.codec.codebook"
FIX = "Leave it out to fit codebooks for this model."
FORMAT = 1  # of the files; raise it when their meaning changes
SCOPES = ("head", "layer")
METADATA = "kvbench_codebook"  # the entry of a file's header that holds its provenance
DISTANCES_AT_ONCE = 1 << 27  # fp32 distances to centroids held at once (512 MiB)
INDICES_AT_ONCE = 1 << 25  # table indices held at once (int32: 128 MiB)


@dataclass(frozen=True)
class LayerCodebook:
    """The centroids of some heads of one layer: fp32 [sets, groups, centroids, dim / groups].

    ``sets`` is the number of KV heads or, where they share their codebooks, 1.
    """

    centroids: torch.Tensor

    @property
    def groups(self) -> int:
        return self.centroids.shape[1]

    def nearest(self, keys: torch.Tensor) -> torch.Tensor:
        """Codes int16 [n, kv_heads, groups] of keys [kv_heads, n, dim]; of equally near centroids the first."""
        sets, groups, count, width = self.centroids.shape
        heads, n, _ = keys.shape
        codes = torch.empty(n, heads, groups, dtype=torch.int16, device=keys.device)
        # Keys may lie far from the origin in some channels: seen from the centroids' mean, distances keep their digits.
        middle = self.centroids.mean(2, keepdim=True)  # [sets, groups, 1, width]
        centred = (self.centroids - middle).flatten(0, 1)
        half_norms = centred.square().sum(-1)[:, None] / 2  # [sets * groups, 1, centroids]
        step = max(1, DISTANCES_AT_ONCE // (heads * groups * count))
        for start in range(0, n, step):
            piece = keys[:, start : start + step].float()
            # heads that share a codebook become rows of one product: [sets, groups, heads / sets * tokens, width]
            rows = (piece.reshape(sets, -1, groups, width).transpose(1, 2) - middle).flatten(0, 1)
            # half the squared distance, less the key's own half norm, which is the same for all centroids
            distances = torch.baddbmm(half_norms, rows, centred.mT, alpha=-1)
            found = distances.argmin(-1).view(sets, groups, heads // sets, -1)
            found = found.permute(3, 0, 2, 1).reshape(-1, heads, groups)  # [tokens, kv_heads, groups]
            codes[start : start + step] = found.to(torch.int32).to(torch.int16)
        return codes

    def rebuild(self, codes: torch.Tensor) -> torch.Tensor:
        """The keys fp32 [kv_heads, n, dim] that codes [n, kv_heads, groups] stand for."""
        heads = codes.shape[1]
        owner = torch.arange(heads, device=codes.device)[:, None] % self.centroids.shape[0]
        group = torch.arange(self.groups, device=codes.device)
        return self.centroids[owner, group, as_numbers(codes).long()].flatten(-2).transpose(0, 1)

    def tables(self, query: torch.Tensor) -> torch.Tensor:
        """T[i, k] = q_i . C[i, k] (section 3.2): fp32 [kv_heads, groups, centroids, m]; query [kv_heads, m, dim]."""
        sets, groups, _, width = self.centroids.shape
        heads, m, _ = query.shape
        rows = query.float().reshape(sets, heads // sets * m, groups, width).permute(0, 2, 3, 1)
        products = (self.centroids @ rows).unflatten(-1, (heads // sets, m))  # [sets, groups, centroids, heads/sets, m]
        return products.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def scores(self, query: torch.Tensor, codes: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """z_j = sum_i T[i, P[j, i]] (eq. 3): what queries and coded keys give, not scaled.

        query [kv_heads, m, dim]; codes int16 [rows, groups] of keys of the heads ``head``, int64 [rows]. Returns fp32
        [rows, m]: every row's products with the queries of its own head.
        """
        table = self.tables(query)
        heads, groups, count, m = table.shape
        table = table.reshape(-1, m)
        first = torch.arange(heads * groups, dtype=torch.int32, device=codes.device).view(heads, groups) * count
        out = torch.empty(codes.shape[0], m, dtype=torch.float32, device=codes.device)
        step = max(1, INDICES_AT_ONCE // groups)
        for start in range(0, codes.shape[0], step):
            index = as_numbers(codes[start : start + step]) + first[head[start : start + step]]
            out[start : start + step] = F.embedding_bag(index, table, mode="sum")
        return out


def as_numbers(codes: torch.Tensor) -> torch.Tensor:
    """int32 numbers of centroids, 0..65535, from int16 codes."""
    return codes.to(torch.int32) & 0xFFFF


class Codebooks:
    """The codebooks of every compressed layer of a model, and how they came about.

    ``layers`` are fp32 [sets, groups, centroids, dim / groups] by the layer's number; each moves to the device that
    first asks for it. Caches share them, so their bytes are counted once, here, and not in any cache.
    """

    def __init__(self, layers: dict[int, torch.Tensor], provenance: dict[str, Any], sha256: str | None = None) -> None:
        self._layers, self.provenance = dict(layers), provenance
        self.sha256 = content_sha256(layers) if sha256 is None else sha256

    def of(self, layer: int, heads: Sequence[int], device: torch.device) -> LayerCodebook:
        """The codebooks of these KV heads of a layer."""
        centroids = self._layers[layer] = self._layers[layer].to(device)
        if centroids.shape[0] == 1:
            return LayerCodebook(centroids)
        first, last = heads[0], heads[-1]
        if list(heads) == list(range(first, last + 1)):  # a view: all heads, or one where their counts differ
            return LayerCodebook(centroids[first : last + 1])
        return LayerCodebook(centroids[torch.tensor(list(heads), device=device)])

    @property
    def nbytes(self) -> int:
        return sum(tensor.element_size() * tensor.numel() for tensor in self._layers.values())

    def store(self, file: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {f"layer.{index}": tensor.cpu().contiguous() for index, tensor in self._layers.items()}
        header = strict_json({**self.provenance, "format": FORMAT, "sha256": self.sha256}).decode()
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem[:16]}-")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata={METADATA: header})
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(file.parent)


def content_sha256(layers: dict[int, torch.Tensor]) -> str:
    """A hash of the centroids and of the layers they belong to."""
    digest = hashlib.sha256()
    for index, tensor in sorted(layers.items()):
        digest.update(f"{index}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(as_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()


def read(file: Path) -> Codebooks:
    """The codebooks in a file; OSError or ValueError where it is none, or not what was stored."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            header = (content.metadata() or {}).get(METADATA)
            if header is None:
                raise ValueError("it is not a file of kvbench's codebooks")
            layers = {int(name.removeprefix("layer.")): content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    provenance = parse_strict(header.encode())
    if not isinstance(provenance, dict) or provenance.pop("format", None) != FORMAT:
        raise ValueError("it was written by another version of kvbench")
    stored = provenance.pop("sha256", None)
    if stored != content_sha256(layers):
        raise ValueError("its centroids are not those that were stored")
    return Codebooks(layers, provenance, stored)


def misfit(books: Codebooks, setup: Setup, groups: int, centroids: int, scope: str) -> str:
    """Why these codebooks are not for this model and these settings; empty if they are."""
    if books.provenance.get("model_sha256") != setup.model_sha256:
        name = books.provenance.get("model_sha256")
        return f"it was fitted for another model (content {str(name)[:16]}, this one is {setup.model_sha256[:16]})."
    wanted = {"groups": groups, "centroids": centroids, "scope": scope}
    for setting, value in wanted.items():
        if books.provenance.get(setting) != value:
            return f"it was fitted with {setting}={books.provenance.get(setting)}, not {value}."
    shapes = {index: expected(shape, groups, centroids, scope) for index, shape in compressed(setup).items()}
    if set(shapes) != set(books._layers):
        return f"it is for layers {sorted(books._layers)}, the model compresses {sorted(shapes)}."
    for index, shape in shapes.items():
        found = books._layers[index]
        if tuple(found.shape) != shape or found.dtype != torch.float32:
            return f"layer {index} is {found.dtype} {tuple(found.shape)}, expected {torch.float32} {shape}."
    return ""


def compressed(setup: Setup) -> dict[int, LayerShape]:
    """The layers whose keys are coded, by their number."""
    return {index: shape for index, shape in enumerate(setup.layers) if not shape.sliding}


def expected(layer: LayerShape, groups: int, centroids: int, scope: str) -> tuple[int, int, int, int]:
    return layer.kv_heads if scope == "head" else 1, groups, centroids, layer.key_dim // groups


def load(path: str, setup: Setup, groups: int, centroids: int, scope: str) -> Codebooks:
    """The codebooks of a file that the user names; InputError where it does not hold what is wanted."""
    file = Path(path).expanduser()
    try:
        books = read(file)
    except FileNotFoundError as error:
        raise InputError(KEY, path, "there is no such file.", FIX) from error
    except (OSError, ValueError) as error:
        raise InputError(KEY, path, f"cannot be read: {error}.", FIX) from error
    reason = misfit(books, setup, groups, centroids, scope)
    if reason:
        raise InputError(KEY, path, reason, FIX)
    return books
