"""Each operation from its definition, in float64 and with loops, independent of both implementations."""

from __future__ import annotations

import math

import torch


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of q [R, D] to keys and values [n, D]: (out [R, D], log-sum-exp [R])."""
    scores = q.double() @ keys.double().T * scale
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[:, None]) @ values.double(), lse


def resident_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    arena: torch.Tensor,
    row_start: torch.Tensor,
    length: torch.Tensor,
    parent: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One lane and one query head at a time, over the concatenation of all it may see."""
    num_lanes, _, num_heads, head_dim = q.shape
    group = num_heads // arena.shape[0]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)
    for lane in range(num_lanes):
        for head in range(num_heads):
            kv = head // group
            start = int(row_start[lane])
            seen = [arena[kv, start : start + int(length[lane, kv])], rows[lane, kv]]
            if int(parent[lane]) >= 0:
                seen.append(rows[int(parent[lane]), kv])
            all_rows = torch.cat(seen)
            result = attention(q[lane, :, head], all_rows[:, :head_dim], all_rows[:, head_dim:], scale)
            out[lane, :, head], lse[lane, :, head] = result
    return out, lse


def prefill_attention(
    q: torch.Tensor, rows: torch.Tensor, q_start: int, block_length: int, scale: float
) -> torch.Tensor:
    """One query at a time, over the rows before the end of its block."""
    num_queries, num_heads, head_dim = q.shape
    group = num_heads // rows.shape[0]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for i in range(num_queries):
        end = (q_start + i) // block_length * block_length + block_length
        for head in range(num_heads):
            seen = rows[head // group, :end]
            out[i, head] = attention(q[i, head][None], seen[:, :head_dim], seen[:, head_dim:], scale)[0][0]
    return out


def score_rows(
    q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, operator: str
) -> torch.Tensor:
    """All scores of a KV head in one matrix."""
    num_kv_heads, _, width = rows.shape
    group = q.shape[1] // num_kv_heads
    scores = []
    for head in range(num_kv_heads):
        queries = q[:, head * group : (head + 1) * group].reshape(-1, width // 2).double()
        offset = lse[:, head * group : (head + 1) * group].reshape(-1).double()
        values = rows[head, :, : width // 2].double() @ queries.T * scale - offset
        scores.append(values.max(-1).values if operator == "max" else values.exp().sum(-1).log())
    return torch.stack(scores)


def norm_rope(
    head: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm, then the phase, of one head [D] of one token; cos and sin are [R/2]."""
    value = head.double()
    if weight is not None:
        value = value / torch.sqrt((value * value).mean() + eps) * weight.double()
    rotated = value.clone()
    half = cos.shape[0]
    for i in range(half):
        c, s = float(cos[i]), float(sin[i])
        rotated[i] = value[i] * c - value[i + half] * s
        rotated[i + half] = value[i + half] * c + value[i] * s
    return rotated


def commit_lane(
    masked: list[bool],
    confidence: list[float],
    quota: int,
    threshold: float,
    window: list[int] | None = None,
) -> tuple[list[int], int]:
    """Positions that one lane commits, and its status."""
    open_positions = [i for i, is_masked in enumerate(masked) if is_masked]
    if any(math.isnan(confidence[i]) for i in open_positions):
        return [], -1
    asked = open_positions
    if window is not None and open_positions:
        asked = [i for i in open_positions if window[i] == window[open_positions[0]]]
    wanted = min(quota, len(asked))
    over = [i for i in asked if confidence[i] > threshold]
    best_first = sorted(asked, key=lambda i: (-confidence[i], i))
    chosen = over if len(over) >= wanted else best_first[:wanted]
    return sorted(chosen), len(open_positions) - len(chosen)


def route_token(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[list[int], list[float]]:
    """Experts and weights of one token [D], best first."""
    logits = weight.double() @ hidden.double()
    scores = (logits.softmax(-1) if score == "softmax" else logits.sigmoid()).tolist()
    worth = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
    size = len(scores) // num_groups
    allowed = list(range(len(scores)))
    if num_groups > 1:
        of_group = [sum(sorted(worth[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        best = sorted(range(num_groups), key=lambda g: (-of_group[g], g))[:top_groups]
        allowed = [e for e in allowed if e // size in best]
    chosen = sorted(allowed, key=lambda e: (-worth[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) if normalise else 1.0
    return chosen, [scores[e] / total * scale for e in chosen]


def expert_mlp_token(
    hidden: torch.Tensor,
    ids: list[int],
    weights: list[float],
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over the experts of one token [D], in float64."""
    total = torch.zeros(hidden.shape[0], dtype=torch.float64, device=hidden.device)
    for expert, weight in zip(ids, weights, strict=True):
        gate, up = (gate_up[expert].double() @ hidden.double()).chunk(2)
        total += weight * (down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return total


def edit_lane(
    tokens: list[int],
    masked: list[bool],
    candidate: list[int],
    confidence: list[float],
    head: int,
    threshold: float,
    mask_id: int,
) -> list[int]:
    """Committed positions of one lane from ``head`` on that another token replaces."""
    return [
        i
        for i in range(head, len(tokens))
        if not masked[i] and candidate[i] not in (tokens[i], mask_id) and confidence[i] > threshold
    ]
