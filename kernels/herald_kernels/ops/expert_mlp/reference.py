"""Torch reference of `expert_mlp`: expert after expert."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from herald_kernels.ops.gelu_mul.reference import gelu_mul
from herald_kernels.ops.silu_mul.reference import silu_mul


def expert_mlp(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    activation: str = "silu",
) -> None:
    """See `herald_kernels.expert_mlp`."""
    gate = silu_mul if activation == "silu" else gelu_mul
    results = hidden.new_zeros(*ids.shape, hidden.shape[1])
    # Looking which tokens an expert has makes the host wait, which a recording does not allow: on a device
    # every expert takes all of them.
    selects = hidden.device.type == "cpu"
    for expert in range(down.shape[0]):
        mine = ids == expert
        if selects:
            token, place = mine.nonzero(as_tuple=True)
            if token.numel():
                gated = gate(F.linear(hidden[token], gate_up[expert]))
                results[token, place] = F.linear(gated, down[expert])
        else:
            whole = F.linear(gate(F.linear(hidden, gate_up[expert])), down[expert])
            results = torch.where(mine.unsqueeze(-1), whole.unsqueeze(1), results)
    total = (results.float() * weights.unsqueeze(-1)).sum(1)
    out.copy_(out.float() + total)
