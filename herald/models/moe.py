"""The MLP of a layer with experts: its weights and their names, and its forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from herald.models.config import ModelConfig
from herald.models.moe_config import MoeConfig
from herald_kernels import expert_mlp, route_experts, silu_mul

# These stay in float32 whatever the model's dtype: a rounded score may choose another expert.
FLOAT32 = ("router", "router_bias", "expert_scale")


@dataclass
class ExpertWeights:
    """Experts of one layer; as parameters the first dimensions of ``gate_up`` and ``down`` are joined."""

    router: torch.Tensor  # [num_experts, hidden], float32 unless the model's dtype holds it exactly
    gate_up: torch.Tensor  # [num_experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [num_experts, hidden, intermediate]
    router_bias: torch.Tensor | None = None  # [num_experts] float32
    expert_scale: torch.Tensor | None = None  # [num_experts] float32, on the weight of each
    shared_gate_up: torch.Tensor | None = None  # [2 * shared intermediate, hidden]
    shared_down: torch.Tensor | None = None  # [hidden, shared intermediate]


# Parameter -> field of `ExpertWeights`. The MLP of a dense layer has the plain names.
FIELDS = {
    "router": "router",
    "router_bias": "router_bias",
    "expert_scale": "expert_scale",
    "expert_gate_up": "gate_up",
    "expert_down": "down",
    "shared_gate_up": "shared_gate_up",
    "shared_down": "shared_down",
}


Shapes = dict[str, tuple[int, ...]]


def mlp_names(prefix: str, hidden: int, intermediate: int) -> tuple[Shapes, Shapes]:
    """(gate and up, down) of one SwiGLU: names below ``prefix`` and shapes."""
    gate_up: Shapes = {f"{prefix}.{part}_proj.weight": (intermediate, hidden) for part in ("gate", "up")}
    return gate_up, {f"{prefix}.down_proj.weight": (hidden, intermediate)}


def expert_names(prefix: str, hidden: int, config: MoeConfig) -> dict[str, Shapes]:
    """Parameters of routed and shared experts, whose names stand below ``prefix``; not the router's."""
    parts = [
        mlp_names(f"{prefix}.experts.{expert}", hidden, config.intermediate_size)
        for expert in range(config.num_experts)
    ]
    found: dict[str, Shapes] = {
        "expert_gate_up": {name: shape for gate_up, _ in parts for name, shape in gate_up.items()},
        "expert_down": {name: shape for _, down in parts for name, shape in down.items()},
    }
    if config.num_shared_experts:
        shared = config.num_shared_experts * config.intermediate_size
        gate_up, down = mlp_names(f"{prefix}.shared_experts", hidden, shared)
        found |= {"shared_gate_up": gate_up, "shared_down": down}
    return found


def expert_weights(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype
) -> ExpertWeights:
    """Weights of a layer from its parameters, by the names in `FIELDS`."""
    assert config.moe is not None
    weights = ExpertWeights(**{FIELDS[name]: tensor for name, tensor in tensors.items()})
    experts, intermediate = config.moe.num_experts, config.moe.intermediate_size
    weights.gate_up = weights.gate_up.view(experts, 2 * intermediate, config.hidden_size)
    weights.down = weights.down.view(experts, config.hidden_size, intermediate)
    narrow = weights.router.to(dtype)
    if torch.equal(narrow.to(weights.router.dtype), weights.router):
        weights.router = narrow  # half the bytes, the same products
    return weights


def add_experts(
    hidden: torch.Tensor,
    normed: torch.Tensor,
    weights: ExpertWeights,
    config: MoeConfig,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add to ``hidden`` what shared and chosen experts make of ``normed``, both [T, hidden]; returns it.

    ``routed`` [T, hidden] is what the router reads, None for ``normed``.
    """
    ids, shares = route_experts(
        normed if routed is None else routed,
        weights.router,
        weights.router_bias,
        config.experts_per_token,
        score=config.score,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        normalise=config.normalise,
        scale=config.scale,
        expert_scale=weights.expert_scale,
    )
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        hidden.addmm_(silu_mul(F.linear(normed, weights.shared_gate_up)), weights.shared_down.T)
    expert_mlp(normed, ids, shares, weights.gate_up, weights.down, hidden, config.activation)
    return hidden
