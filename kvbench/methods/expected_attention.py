"""Expected Attention (arXiv 2510.00636): entries that queries still to come are likely to attend to are kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvbench.checks import check_flag, check_number, check_whole
from kvbench.engine.capture import LayerCapture, Needs
from kvbench.engine.rotation import Rotation
from kvbench.errors import InputError

if TYPE_CHECKING:
    from kvbench.methods.setup import Setup

KEY = "method.scorer"


@dataclass(frozen=True)
class ExpectedAttention:
    """The attention that a normally distributed query at one of the next ``future`` positions pays, times |value|.

    The mean and covariance are those of the text's own queries before rotary embedding, the first ``sinks`` left out
    (section 3): with the embedding averaged over the next positions, the mean of a query head is m and its covariance
    C, and a key k gets the logit m.k / sqrt(dim) + k.C k / (2 dim). The softmax over all keys but the sinks is
    averaged over the query heads of the KV head, and multiplied, plus ``epsilon``, with the norm of the value
    (``value_norm``). ``covariance=false`` leaves the second term out. Sinks are put above all others.

    Deviations: none from the published code's scores. Queries are observed after rotary embedding and turned back,
    which is why a model whose rotation changes with the length of its text is refused. In the aware and swapped
    protocols a question's queries count among the text's, and the next positions are those after it.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    rotation: Rotation | None = field(default=None, repr=False, compare=False)  # set by ``prepared``

    def __post_init__(self) -> None:
        check_whole(f"{KEY}.future", self.future, 1)
        check_whole(f"{KEY}.sinks", self.sinks, 0)
        check_flag(f"{KEY}.covariance", self.covariance)
        check_flag(f"{KEY}.value_norm", self.value_norm)
        check_number(f"{KEY}.epsilon", self.epsilon, 0)

    @property
    def needs(self) -> Needs:
        return Needs(moments=frozenset({self.sinks}), rotation=self.rotation)

    def prepared(self, setup: Setup) -> ExpectedAttention:
        """With the model's rotation; InputError where queries cannot be turned back."""
        try:
            return replace(self, rotation=setup.rotation)
        except InputError as error:
            reason = f"reads queries without their position: {error.reason}"
            raise InputError("method.scorer", "ExpectedAttention", reason, "Use another method.") from error

    def __call__(self, layer: LayerCapture) -> torch.Tensor:
        """fp32 [kv_heads, n]."""
        assert self.rotation is not None
        kv_heads, n, dim = layer.keys.shape
        keys, values = layer.keys[:, self.sinks :].float(), layer.values[:, self.sinks :].float()
        if keys.shape[1] == 0:
            return torch.ones(kv_heads, n, device=layer.keys.device)
        queries = layer.moments[self.sinks]
        mean, covariance = queries.mean, queries.covariance()
        turn = self.rotation.layers[layer.index]
        if turn is not None:
            mean = turn.mean_turn(mean, n, self.future)
            covariance = turn.mean_turn(covariance, n, self.future).transpose(1, 2)
            covariance = turn.mean_turn(covariance, n, self.future)
        mean = mean.view(kv_heads, -1, dim)  # [kv_heads, group, dim]
        logits = mean @ keys.transpose(1, 2) * layer.options.scaling  # [kv_heads, group, n - sinks]
        if self.covariance:
            spread = covariance.view(kv_heads, -1, dim, dim) @ keys[:, None].transpose(2, 3)
            logits = logits + (spread * keys[:, None].transpose(2, 3)).sum(2) * (layer.options.scaling**2 / 2)
        scores = logits.softmax(-1).mean(1)
        if self.value_norm:
            scores = (scores + self.epsilon) * values.norm(dim=-1)
        sinks = (scores.max() + 1).expand(kv_heads, min(self.sinks, n))
        return torch.cat([sinks, scores], dim=1)
