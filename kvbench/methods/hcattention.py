"""HCAttention (arXiv 2507.19823): coded keys on the device, values on the host, and few values read per query.

Keys are product-quantised (section 3.1): 16 bits per group of channels are all that the device holds of an entry. A
query's scores are sums of table entries (eq. 3); of their softmax the smallest set of tokens that reaches ``tau`` is
selected (eq. 4), its weights go to the host, and the weighted sum of the values, which never leave it, comes back
(eq. 5). With 128 channels, 64 or 32 groups take 25 % or 12.5 % of the device bytes of a 16-bit cache. Every entry is
coded, a new token's own as well: there is no window at full precision.

There is no published code, and the paper leaves open what follows. Each is a setting, and part of every record.

- Its words are "eviction", but not whether the choice outlives the query: ``lifetime``. ``per_query`` drops nothing,
  ``permanent`` drops for good what no query of a pass (no token, no query head of the KV head) selected.
- Whether the selected weights are rescaled (eq. 5): ``renormalise``.
- Whether heads share codebooks: ``scope``. ``head`` has one per layer, KV head and group, ``layer`` one per layer and
  group.
- Which texts codebooks are fitted to: ``fit`` (``kvbench.methods.codebook_texts``).
- Groups are neighbouring channels, of keys after rotary embedding.

Deviations: prefill is exact (the paper's appendix B approximates it for millions of tokens); the host reads a value
once per pass and KV head, for all queries that selected it, and sums in fp32. Where the model's softmax has a sink
(which the paper's models have not), ``tau`` is a share of what is left for tokens, and rescaled weights add up to that.
Sliding-window layers are not compressed, as for every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvbench.checks import check_choice, check_flag, check_whole
from kvbench.engine.cache import LayerCache
from kvbench.errors import InputError
from kvbench.methods.codebook import SCOPES, Codebooks, compressed, load
from kvbench.methods.codebook_fit import fitted
from kvbench.methods.codebook_texts import FitSettings, as_settings
from kvbench.methods.hcattention_layer import Choice, HCLayer

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup

KEY = "method.codec"
LIFETIMES = ("per_query", "permanent")


@dataclass(frozen=True)
class HCAttention:
    """The codec with the paper's 12.5 % setting as its default (64 groups: 25 %).

    ``codebook`` is a file of fitted codebooks to use instead of fitting them to the model.
    """

    groups: int = 32
    centroids: int = 8192
    tau: float = 0.9
    lifetime: str = "per_query"  # per_query | permanent
    renormalise: bool = True
    scope: str = "head"  # head | layer
    fit: FitSettings = field(default_factory=FitSettings)
    codebook: str | None = None
    books: Codebooks | None = field(default=None, repr=False, compare=False)  # set by ``prepared``

    def __post_init__(self) -> None:
        check_whole(f"{KEY}.groups", self.groups, 1)
        check_whole(f"{KEY}.centroids", self.centroids, 2, 1 << 16)  # codes have 16 bits
        number = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool)
        if not number or not 0 < self.tau <= 1:
            fix = "Allowed: above 0, up to 1 (all tokens)."
            raise InputError(f"{KEY}.tau", self.tau, "is not a share of the attention.", fix)
        check_choice(f"{KEY}.lifetime", self.lifetime, LIFETIMES)
        check_flag(f"{KEY}.renormalise", self.renormalise)
        check_choice(f"{KEY}.scope", self.scope, SCOPES)
        object.__setattr__(self, "fit", as_settings(self.fit))
        if self.codebook is not None and (not isinstance(self.codebook, str) or not self.codebook):
            fix = "Leave it out to fit codebooks for this model."
            raise InputError(f"{KEY}.codebook", self.codebook, "is not the name of a file.", fix)

    @property
    def label(self) -> str:
        return f"hc-g{self.groups}"

    def prepared(self, setup: Setup) -> HCAttention:
        """With codebooks for the model, read or fitted; InputError where it or the file does not fit the settings."""
        dims = sorted({layer.key_dim for layer in compressed(setup).values()})
        allowed = [groups for groups in range(1, min(dims, default=0) + 1) if all(dim % groups == 0 for dim in dims)]
        if dims and self.groups not in allowed:
            reason = (
                f"keys have {' and '.join(map(str, dims))} channels in this model, which such groups do not divide."
            )
            raise InputError(f"{KEY}.groups", self.groups, reason, f"Allowed: {', '.join(map(str, allowed))}.")
        settings = (setup, self.groups, self.centroids, self.scope)
        books = fitted(*settings, self.fit) if self.codebook is None else load(self.codebook, *settings)
        return replace(self, books=books)

    def facts(self) -> dict[str, Any]:
        """What every record says: each choice that the paper leaves open, and the codebooks used."""
        names = ("groups", "centroids", "tau", "lifetime", "renormalise", "scope")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.books is None:
            return facts
        about = self.books.provenance
        return facts | {
            "fit": about.get("fit", {}),
            "fit_data": about.get("data", {}).get("name"),
            "fit_data_sha256": about.get("data", {}).get("sha256"),
            "codebook_sha256": self.books.sha256,
            "codebook_bytes": self.books.nbytes,
        }

    def __call__(
        self, layer: int, heads: Sequence[int], keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> LayerCache:
        """The cache of a layer from its entries [kv_heads, n, dim], sorted by position; ``room`` tokens will follow."""
        if self.books is None:
            raise RuntimeError("HCAttention codes nothing before prepared(setup)")
        choice = Choice(self.tau, self.renormalise, self.lifetime == "permanent")
        return HCLayer(self.books.of(layer, heads, keys.device), choice, keys, values, room)
