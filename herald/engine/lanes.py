"""Lanes: the one shape of a forward.

A lane is B consecutive positions of one request. It attends to the request's resident set, to itself
(bidirectionally) and to its parent lane. See `docs/architecture.md` for what this one rule covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from herald.engine.resident import ResidentSet


@dataclass
class Lane:
    """One lane of a forward.

    Attributes:
        resident: the set it attends to.
        tokens: int64 [B] on the device.
        first_position: position of its first token.
        parent: index of the parent lane in the same forward, -1 for none.
        logits: compute the head for it.
        final: its KV is final and is to be kept.
        capture: keep its queries and log-sum-exps for a selection.
    """

    resident: ResidentSet
    tokens: torch.Tensor
    first_position: int
    parent: int = -1
    logits: bool = False
    final: bool = False
    capture: bool = False


@dataclass
class Capture:
    """Queries of one lane in every layer, on their way to the CPU.

    Attributes:
        queries: float32 [layers, B, heads, head_dim] in host memory once ``ready``.
        lse: float32 [layers, B, heads].
        ready: event after which host memory holds them (None on a CPU).
    """

    queries: torch.Tensor
    lse: torch.Tensor
    ready: torch.cuda.Event | None


@dataclass
class ForwardResult:
    """What a forward gives back, by lane index.

    Attributes:
        logits: [B, vocab] of lanes that asked for it.
        final_rows: [layers, kv_heads, B, 2 * head_dim] of final lanes.
        captures: of lanes that asked for it.
    """

    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    final_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    captures: dict[int, Capture] = field(default_factory=dict)


@dataclass
class LaneTensors:
    """Device tensors that describe a list of lanes to the kernels. N lanes of B positions."""

    tokens: torch.Tensor  # [N * B] int64
    positions: torch.Tensor  # [N * B] int64
    row_start: torch.Tensor  # [N] int64
    length: torch.Tensor  # [N, kv_heads] int32
    parent: torch.Tensor  # [N] int32
    max_length: int

    @classmethod
    def build(cls, lanes: list[Lane], num_kv_heads: int, device: torch.device) -> LaneTensors:
        block = lanes[0].tokens.numel()
        lengths = [lane.resident.length for lane in lanes]
        # One copy for all small integers of the step: [4, N].
        packed = torch.tensor(
            [
                [lane.resident.row_start for lane in lanes],
                lengths,
                [lane.parent for lane in lanes],
                [lane.first_position for lane in lanes],
            ],
            dtype=torch.int64,
        ).to(device)
        offsets = torch.arange(block, device=device)
        return cls(
            tokens=torch.cat([lane.tokens for lane in lanes]),
            positions=(packed[3].unsqueeze(1) + offsets).reshape(-1),
            row_start=packed[0],
            length=packed[1].to(torch.int32).unsqueeze(1).repeat(1, num_kv_heads),
            parent=packed[2].to(torch.int32),
            max_length=max(lengths),
        )
