"""Which experts each token passes, and the weight of each."""

from __future__ import annotations

from typing import Literal

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride

SCORES = ("softmax", "sigmoid")


def route_experts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"],
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score all experts in float32 and take the best ``top_k`` of each token, the lowest id on ties.

    The bias joins the choice, not the weight. With groups of ``E / num_groups`` consecutive experts, a token
    chooses among those of its ``top_groups`` best groups; a group is as good as the sum of its two best
    experts, and among equals the first is better. A weight is the score, divided by the sum of the token's
    chosen scores if ``normalise``, times ``scale``, and times its expert's entry of ``expert_scale``.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, for bias and groups.

    Args:
        hidden: [T, D], unit stride in the last dimension.
        weight: [E, D] of hidden's dtype, or float32; contiguous.
        bias: float32 [E], or None.
        top_k: at most the experts of ``top_groups`` groups.
        expert_scale: float32 [E], or None.

    Returns:
        ids int32 [T, top_k], best first, and weights float32 [T, top_k]. A NaN score is the worst; where one
        is chosen, and with softmax or ``normalise`` in its whole row, weights are NaN. Ids are valid always.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    num_experts = weight.shape[0]
    if weight.shape[1:] != hidden.shape[1:] or weight.dtype not in (hidden.dtype, torch.float32):
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not match hidden {tuple(hidden.shape)} "
            f"{hidden.dtype}"
        )
    for name, values in (("bias", bias), ("expert_scale", expert_scale)):
        if values is not None and (values.shape != (num_experts,) or values.dtype != torch.float32):
            raise ValueError(f"{name} {tuple(values.shape)} {values.dtype} must be float32 [{num_experts}]")
    if score not in SCORES:
        raise ValueError(f"score={score!r} is unknown; use one of {', '.join(SCORES)}")
    if num_groups < 1 or num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise ValueError(f"num_groups={num_groups} must cut {num_experts} experts into groups of 2 or more")
    room = num_experts // num_groups * min(top_groups, num_groups)
    if not 1 <= top_k <= room:
        raise ValueError(
            f"top_k={top_k} must be 1 to {room}, the experts of {top_groups} of {num_groups} groups"
        )
    need_unit_stride(hidden=hidden)
    ids, weights = implementation("route_experts", hidden.device.type)(
        hidden, weight, bias, top_k, score, num_groups, top_groups, normalise, scale, expert_scale
    )
    return ids, weights
