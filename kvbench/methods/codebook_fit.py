"""Codebooks fitted to the keys that a model computes on a few texts, once, and kept.

As in HCAttention (arXiv 2507.19823, sections 3.1 and 4.1): MiniBatchKMeans over the keys of a few texts, three by
default. The paper names neither its texts nor whether heads share codebooks; both are settings here and part of every
record. Keys are taken after rotary embedding and any key norm, as they are stored.

Starts are drawn from the keys without repetition, and small clusters are not moved elsewhere (scikit-learn's own
default does): with about as many centroids as keys, as here, that loses more than it gains.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvbench.errors import InputError
from kvbench.methods.codebook import FORMAT, Codebooks, LayerCodebook, compressed, misfit, read
from kvbench.methods.codebook_texts import KEY, FitSettings, Texts, read_texts
from kvbench.models.hashing import cache_root, sha256_json
from kvbench.results.progress import Progress
from kvbench.tasks.sample import Sample

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0


def fitted(setup: Setup, groups: int, centroids: int, scope: str, fit: FitSettings) -> Codebooks:
    """Codebooks for the model, from the cache or fitted now and kept there.

    The cache is ``codebooks`` in ``$KVBENCH_CACHE``; a file is found by the model's content and dtype, the data's
    content and all settings. Its files can be given as ``method.codec.codebook``. Processes that want the same ones at
    the same time wait for the first.
    """
    texts = read_texts(fit)
    settings = {"groups": groups, "centroids": centroids, "scope": scope, "fit": asdict(fit) | {"data": fit.name}}
    dtype = str(setup.engine.model.dtype).removeprefix("torch.")
    identity = {**settings, "format": FORMAT, "model_sha256": setup.model_sha256, "dtype": dtype, "data": texts.sha256}
    file = cache_root() / "codebooks" / f"{sha256_json(identity)}.safetensors"
    with _only_one(file):
        try:
            books = read(file)
            reason = misfit(books, setup, groups, centroids, scope)
            if not reason:
                return books
            log.warning("%s is fitted anew: %s", file, reason)
        except FileNotFoundError:
            log.info("fitting codebooks to this model's keys (once; kept in %s)", file)
        except (OSError, ValueError) as error:
            log.warning("%s is fitted anew, it cannot be read: %s", file, error)
        about = {
            **settings,
            "model_sha256": setup.model_sha256,
            "dtype": dtype,
            "data": {"name": fit.name, "sha256": texts.sha256},
        }
        books = fit_codebooks(setup, groups, centroids, scope, fit, texts, about)
        try:
            books.store(file)
        except OSError as error:  # a cache that cannot be written costs time, not the run
            log.warning("the fitted codebooks were not kept: %s", error)
        return books


@contextmanager
def _only_one(file: Path) -> Iterator[None]:
    """Held by one process at a time; by none where the folder cannot be written."""
    from filelock import SoftFileLease, Timeout

    lease = SoftFileLease(file.with_suffix(".lock"), lease_duration=LEASE_SECONDS, heartbeat_interval=LEASE_SECONDS / 4)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lease.acquire(timeout=0.5, poll_interval=0.05)
        except Timeout:
            log.info("another process is fitting %s: waiting for it", file.name)
            lease.acquire()
    except OSError as error:
        log.warning("%s cannot be written: %s", file.parent, error)
        yield
        return
    try:
        yield
    finally:
        lease.release()


def fit_codebooks(
    setup: Setup, groups: int, centroids: int, scope: str, fit: FitSettings, texts: Texts, about: dict[str, Any]
) -> Codebooks:
    """Codebooks fitted now; ``about`` becomes part of their provenance."""
    import_sklearn()
    keys = collect_keys(setup, fit, texts.texts)
    layers: dict[int, torch.Tensor] = {}
    errors: dict[str, float] = {}
    fewest: dict[str, int] = {}
    vectors = 0
    sets = {index: layer.shape[0] if scope == "head" else 1 for index, layer in keys.items()}
    with Progress(sum(sets.values()) * groups, "codebooks", unit="codebook") as progress:
        for index, layer in keys.items():
            heads, tokens, dim = layer.shape
            vectors = heads // sets[index] * tokens
            # [sets, groups, vectors, dim / groups]
            parts = layer.float().reshape(sets[index], vectors, groups, dim // groups).transpose(1, 2).numpy()
            found, counts = [], []
            for part in parts.reshape(-1, vectors, dim // groups):
                book, distinct = cluster(part, centroids, fit)
                found.append(book)
                counts.append(distinct)
                progress.update(note=f"layer {index}")
            books = torch.from_numpy(np.stack(found)).view(sets[index], groups, centroids, dim // groups)
            layers[index], fewest[str(index)] = books, min(counts)
            errors[str(index)] = mean_squared_error(LayerCodebook(books), layer, setup.engine.device)
    if min(fewest.values(), default=centroids) < centroids:
        log.warning(
            "some codebooks hold only %d different centroids, not %d: there are no more different keys in the texts. "
            "Raise %s.tokens or %s.texts, or lower method.codec.centroids.",
            min(fewest.values()), centroids, KEY, KEY,
        )  # fmt: skip
    found_out = {
        "key_vectors": vectors,
        "fewest_different_centroids": fewest,
        "mean_squared_error": errors,
        "versions": {"scikit-learn": import_sklearn().__version__, "torch": torch.__version__},
    }
    return Codebooks(layers, {**about, **found_out})


def import_sklearn() -> Any:
    """scikit-learn, which only fitting needs."""
    try:
        import sklearn
        import sklearn.cluster
    except ImportError as error:
        raise InputError(
            "method.codec", "hcattention", "fitting its codebooks needs scikit-learn.",
            "pip install scikit-learn, or name fitted ones in method.codec.codebook.",
        ) from error  # fmt: skip
    return sklearn


def collect_keys(setup: Setup, fit: FitSettings, texts: Sequence[str]) -> dict[int, torch.Tensor]:
    """Keys [kv_heads, tokens of all texts, dim] of every compressed layer, in host memory, as the cache gets them."""
    limit = getattr(setup.engine.model.config.get_text_config(), "max_position_embeddings", None)
    most = min(fit.tokens, limit or fit.tokens)
    collected: dict[int, list[torch.Tensor]] = {index: [] for index in compressed(setup)}
    for text in texts:
        # no chat template; the prompt's first token is the tokenizer's own
        prompt = setup.encoder.encode(Sample("", text, "", ()), chat=False, limit=sys.maxsize)
        capture = setup.engine.prefill((*prompt.context_ids, *prompt.question_ids)[:most])
        for index, pieces in collected.items():
            pieces.append(capture.layers[index].keys.cpu())
    keys = {index: torch.cat(pieces, dim=1) for index, pieces in collected.items()}
    if not all(bool(torch.isfinite(layer).all()) for layer in keys.values()):
        raise InputError(
            "dtype", str(setup.engine.model.dtype), "the model's keys are not finite on the texts that codebooks are "
            "fitted to.", "Use another dtype.",
        )  # fmt: skip
    return keys


def cluster(vectors: np.ndarray, centroids: int, fit: FitSettings) -> tuple[np.ndarray, int]:
    """(centroids fp32 [centroids, width], how many of them differ) of fp32 vectors [n, width].

    Where there are no more different vectors than centroids, they are the centroids, repeated to fill the codebook.
    """
    shuffled = vectors[np.random.default_rng(fit.seed).permutation(len(vectors))]
    _, first = np.unique(shuffled, axis=0, return_index=True)
    different = shuffled[np.sort(first)]
    if len(different) <= centroids:
        return different[np.arange(centroids) % len(different)], len(different)
    # far from the origin distances would lose their digits
    middle = vectors.mean(0, dtype=np.float64).astype(np.float32)
    means = import_sklearn().cluster.MiniBatchKMeans(
        centroids,
        init=different[:centroids] - middle,
        n_init=1,
        max_iter=fit.iterations,
        batch_size=fit.batch_size,
        random_state=fit.seed,
        reassignment_ratio=0.0,
        compute_labels=False,
    )
    return means.fit(vectors - middle).cluster_centers_.astype(np.float32) + middle, centroids


def mean_squared_error(book: LayerCodebook, keys: torch.Tensor, device: torch.device) -> float:
    """Per channel, of keys [kv_heads, n, dim] against what their codes stand for."""
    book, keys = LayerCodebook(book.centroids.to(device)), keys.to(device)
    return float((book.rebuild(book.nearest(keys)) - keys.float()).square().mean())
