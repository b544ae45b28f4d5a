"""`MoeConfig`: how the layers of a mixture of experts are shaped and how tokens choose among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from herald.config import check
from herald.models.fields import integer, number

Score = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu_tanh"]

# Names of all experts' tensors are listed before a file is read.
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class MoeConfig:
    """Experts of a model.

    Attributes:
        score: what the router makes of its logits. With ``"sigmoid"`` a bias of each expert joins the choice,
            not the weight (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        num_experts: routed experts of a layer.
        experts_per_token: of them, how many a token passes.
        intermediate_size: MLP size of one expert.
        num_shared_experts: experts that every token passes besides, stored as one MLP of their joint size.
        first_dense_layers: layers at the start that have a plain MLP.
        num_groups, top_groups: experts stand in groups, and a token chooses within its best groups only.
        normalise: weights of a token's experts are divided by their sum.
        scale: factor on these weights.
        activation: of the gate of every MLP.
    """

    score: Score
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    num_groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        experts = self.num_experts
        check(1 <= experts <= MAX_EXPERTS, "num_experts", experts, f"use 1 to {MAX_EXPERTS}")
        check(
            1 <= self.experts_per_token <= experts,
            "experts_per_token",
            self.experts_per_token,
            f"use 1 to num_experts={experts}",
        )
        check(self.intermediate_size >= 1, "moe_intermediate_size", self.intermediate_size, "use 1 or more")
        for field in ("num_shared_experts", "first_dense_layers"):
            check(getattr(self, field) >= 0, field, getattr(self, field), "use 0 or more")
        check(
            self.num_groups >= 1 and experts % self.num_groups == 0,
            "num_groups",
            self.num_groups,
            f"use a divisor of num_experts={experts}",
        )
        size = experts // self.num_groups
        check(
            self.num_groups == 1 or size >= 2,
            "num_groups",
            self.num_groups,
            "use groups of 2 experts or more",
        )
        check(
            1 <= self.top_groups <= self.num_groups and self.top_groups * size >= self.experts_per_token,
            "top_groups",
            self.top_groups,
            f"use 1 to num_groups={self.num_groups}, with room for {self.experts_per_token} experts",
        )


def read_moe(raw: Mapping[str, Any], score: Score, activation: Activation = "silu") -> MoeConfig:
    """The experts that a ``config.json`` describes.

    Raises:
        WeightsError: a field is missing or of the wrong kind.
        InvalidOption: a value is out of range.
    """
    grouped = score == "sigmoid"
    return MoeConfig(
        score=score,
        num_experts=integer(raw, "num_experts"),
        experts_per_token=integer(raw, "top_k_experts" if "top_k_experts" in raw else "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        num_shared_experts=integer(raw, "num_shared_experts", 0),
        first_dense_layers=integer(raw, "first_k_dense_replace", 0),
        num_groups=integer(raw, "n_group") if grouped else 1,
        top_groups=integer(raw, "topk_group") if grouped else 1,
        normalise=bool(raw.get("norm_topk_prob", grouped or activation != "silu")),
        scale=number(raw, "routed_scaling_factor") if grouped else 1.0,
        activation=activation,
    )
