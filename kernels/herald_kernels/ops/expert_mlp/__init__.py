"""The chosen experts' MLPs, weighted and summed."""

from __future__ import annotations

from typing import Literal

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride

ACTIVATIONS = ("silu", "gelu_tanh")


def expert_mlp(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    activation: Literal["silu", "gelu_tanh"] = "silu",
) -> None:
    """Add ``sum_k weights[t, k] * mlp(ids[t, k], hidden[t])`` to ``out[t]``.

    Each MLP is gated: ``down(activation(gate(x)) * up(x))``.

    Products, gate and each expert's result are rounded to the dtype as in torch; the sum runs in float32, in
    the order of k, and is rounded once with what ``out`` held. A token's result depends on its own inputs
    and on the shape of the call.

    Args:
        hidden: [T, D], unit stride in the last dimension.
        ids: int32 [T, K], in [0, E); contiguous. An expert may have any number of tokens, none too.
        weights: float32 [T, K], contiguous.
        gate_up: [E, 2 * I, D] of hidden's dtype, gate then up, contiguous.
        down: [E, D, I] likewise.
        out: [T, D] of hidden's dtype, unit stride in the last dimension, no part of ``hidden``; changed.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    num_experts, width, size = down.shape
    if gate_up.shape != (num_experts, 2 * size, width) or hidden.shape[1] != width:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} and hidden {tuple(hidden.shape)} must "
            "be [E, 2 * I, D], [E, D, I] and [T, D]"
        )
    if ids.shape != weights.shape or ids.shape[:1] != hidden.shape[:1] or out.shape != hidden.shape:
        raise ValueError(
            f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must be one shape [T, K], out "
            f"{tuple(out.shape)} that of hidden {tuple(hidden.shape)}"
        )
    kinds = {hidden.dtype, gate_up.dtype, down.dtype, out.dtype}
    if len(kinds) > 1 or (ids.dtype, weights.dtype) != (torch.int32, torch.float32):
        raise ValueError(
            f"hidden, gate_up, down and out must have one dtype, not {sorted(map(str, kinds))}; ids must be "
            f"int32 and weights float32, not {ids.dtype} and {weights.dtype}"
        )
    for name, tensor in {"ids": ids, "weights": weights, "gate_up": gate_up, "down": down}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    need_unit_stride(hidden=hidden, out=out)
    if ids.numel():
        implementation("expert_mlp", hidden.device.type)(hidden, ids, weights, gate_up, down, out, activation)
