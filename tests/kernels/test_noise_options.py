"""What a canvas and layers with a window ask of the operations, against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from herald_kernels import (
    entropy_softmax,
    expert_mlp,
    gelu_mul,
    prefill_attention,
    qk_norm_rope,
    resident_attention,
    rms_norm,
    route_experts,
)
from tests.kernels import naive
from tests.kernels.support import INTERPRETER, Draw, Target, relative_error

INF, NAN = float("inf"), float("nan")
KV_HEADS = 2


class Rings:
    """Lanes over sets, or with a window over rings; what no lane may read is NaN.

    Args:
        starts: first positions of the lanes, each behind its parent where it has one.
        causal: of the lanes.
        window: rows of a ring, 0 for sets of as many rows as there are positions before the lane.
    """

    def __init__(
        self,
        target: Target,
        block: int,
        group: int,
        starts: list[int],
        parents: list[int],
        causal: list[int],
        window: int,
        dim: int = 16,
    ) -> None:
        draw = Draw(target, block + 7 * len(starts) + window)
        device, count = target.device, len(starts)
        self.window, self.dim, self.block, self.scale = window, dim, block, dim**-0.5
        self.starts, self.parents, self.flags = starts, parents, causal
        self.q = draw.normal(count, block, KV_HEADS * group, dim)
        self.rows = draw.normal(count, KV_HEADS, block, 2 * dim)
        # what each lane's request has before its oldest lane of this call: position -> row
        self.before = [starts[i if parents[i] < 0 else parents[i]] for i in range(count)]
        self.past = [draw.normal(KV_HEADS, before, 2 * dim) for before in self.before]
        lengths = [min(before, window) if window else before for before in self.before]
        arena = torch.full((KV_HEADS, sum(lengths) + 3 * count + 5, 2 * dim), NAN)
        self.arena = arena.to(device, target.dtype)
        self.row_start, at = [], 2
        for lane, length in enumerate(lengths):
            self.row_start.append(at)
            for position in range(self.before[lane] - length, self.before[lane]):
                row = position % window if window else position
                self.arena[:, at + row] = self.past[lane][:, position]
            at += length + 3
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)[:, None].repeat(1, KV_HEADS)
        self.longest = window or max(lengths)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.q.device
        return resident_attention(
            self.q,
            self.rows,
            self.arena,
            torch.tensor(self.row_start, device=device),
            self.lengths,
            torch.tensor(self.parents, dtype=torch.int32, device=device),
            self.scale,
            self.longest,
            causal=torch.tensor(self.flags, dtype=torch.int32, device=device),
            window=self.window,
            position=torch.tensor(self.starts, device=device) if self.window else None,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        lse = torch.zeros(self.q.shape[:3], dtype=torch.float64, device=self.q.device)
        group = self.q.shape[2] // KV_HEADS
        for lane, i in ((lane, i) for lane in range(len(self.starts)) for i in range(self.block)):
            start, causal = self.starts[lane], self.flags[lane]
            least = start + (i if causal else 0) - self.window if self.window else 0
            own = [j for j in range(self.block) if not causal or max(least - start, 0) <= j <= i]
            parent = self.parents[lane]
            of_parent = (
                [j for j in range(self.block) if self.starts[parent] + j >= least] if parent >= 0 else []
            )
            past = list(range(max(least, 0), self.before[lane]))
            for head in range(self.q.shape[2]):
                kv = head // group
                seen = [self.past[lane][kv][past], self.rows[lane, kv][own]]
                if parent >= 0:
                    seen.append(self.rows[parent, kv][of_parent])
                rows = torch.cat(seen)
                query = self.q[lane, i, head][None]
                made = naive.attention(query, rows[:, : self.dim], rows[:, self.dim :], self.scale)
                out[lane, i, head], lse[lane, i, head] = made[0][0], made[1][0]
        return out, lse


LANES = [
    # starts, parents, causal: a final lane and what begins behind it, drafts, lanes alone, short prompts
    ([40, 48, 0, 8, 3, 100], [-1, 0, -1, 2, -1, -1], [1, 0, 1, 0, 0, 1]),
    ([200, 208, 300, 308], [-1, 0, -1, 2], [1, 0, 0, 0]),
]


@pytest.mark.parametrize("window", [0, 5, 7, 8, 13, 64], ids="window {}".format)
@pytest.mark.parametrize("lanes", LANES, ids=["many", "long"])
@pytest.mark.parametrize("group", [1, 3])
def test_lanes_see_what_they_may(
    target: Target, lanes: tuple[list[int], list[int], list[int]], window: int, group: int
) -> None:
    rings = Rings(target, 8, group, *lanes, window)
    out, lse = rings.run()
    expected_out, expected_lse = rings.expected()
    assert relative_error(out, expected_out) < target.bound
    assert relative_error(lse, expected_lse) < 1e-5


def test_blocks_longer_than_a_tile(target: Target) -> None:
    """Tiles of which some queries see nothing, in calls that are cut into pieces."""
    rings = Rings(target, 64, 2, [300, 364], [-1, 0], [1, 1], 150, dim=32)
    out, lse = rings.run()
    expected_out, expected_lse = rings.expected()
    assert relative_error(out, expected_out) < target.bound
    assert relative_error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize(
    ("queries", "before", "window"), [(1, 0, 1), (37, 0, 5), (40, 31, 31), (70, 9, 64), (150, 100, 33)]
)
def test_a_prompt_sees_its_window(target: Target, queries: int, before: int, window: int) -> None:
    draw = Draw(target, queries + window)
    q, rows = draw.normal(queries, 4, 32), draw.normal(2, before + queries, 64)
    out = prefill_attention(q, rows, before, 1, 0.2, window)
    for i in range(queries):
        position = before + i
        seen = rows[:, max(position - window, 0) : position + 1]
        for head in range(4):
            rows_of = seen[head // 2]
            expected = naive.attention(q[i, head][None], rows_of[:, :32], rows_of[:, 32:], 0.2)[0][0]
            assert relative_error(out[i, head], expected) < 3 * target.bound


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("half", [16, 4, 3])
def test_values_are_normed_and_may_be_the_keys(target: Target, shared: bool, half: int) -> None:
    draw, heads, dim = Draw(target, half), 3, 32
    qkv = draw.normal(6, (heads + (1 if shared else 2) * KV_HEADS) * dim)
    weight, angle = draw.normal(dim), draw.normal(6, half).float()
    q_out, rows_out = draw.normal(6, heads, dim), draw.normal(2, KV_HEADS, 3, 2 * dim)
    qk_norm_rope(
        qkv,
        weight,
        weight,
        angle.cos(),
        angle.sin(),
        q_out,
        rows_out,
        heads,
        KV_HEADS,
        1e-6,
        norm_values=True,
    )
    parts = qkv.unflatten(1, (-1, dim))
    keys = parts[:, heads : heads + KV_HEADS]
    given = keys if shared else parts[:, heads + KV_HEADS :]
    wide = given.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    found = rows_out.transpose(1, 2).flatten(0, 1)
    assert relative_error(found[..., dim:], expected) < 2 * target.bound
    turned = naive.norm_rope(keys[4, 1], weight, angle[4].cos(), angle[4].sin(), 1e-6)
    assert relative_error(found[4, 1, :dim], turned) < 3 * target.bound


def test_a_norm_without_weights(target: Target) -> None:
    hidden = 3 * Draw(target, 1).normal(5, 100)
    wide = hidden.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert relative_error(rms_norm(hidden, None, 1e-6), expected) < target.bound


@pytest.mark.parametrize("width", [1, 40, 3000])
def test_gelu_mul_matches_float64(target: Target, width: int) -> None:
    gate_up = 4 * Draw(target, width).normal(6, 2 * width)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = F.gelu(gate, approximate="tanh") * up
    assert relative_error(gelu_mul(gate_up), expected) < 2 * target.bound


def test_gelu_mul_of_large_gates(target: Target) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=target.device)
    assert gelu_mul(gate_up).tolist() == [[0.0, 0.0, 400.0, 2e4]]


@pytest.mark.parametrize("tokens", [1, 23])
def test_experts_with_gelu_and_scales(target: Target, tokens: int) -> None:
    draw = Draw(target, tokens)
    hidden, router = draw.normal(tokens, 48), draw.normal(8, 48) / 4
    gate_up, down = draw.normal(8, 64, 48) / 7, draw.normal(8, 48, 32) / 6
    scale = draw.normal(8).float().abs() + 0.5
    ids, plain = route_experts(hidden, router, None, 2, score="softmax")
    same, shares = route_experts(hidden, router, None, 2, score="softmax", expert_scale=scale)
    assert torch.equal(ids, same) and torch.allclose(shares, plain * scale[ids.long()], rtol=1e-6)
    out = torch.zeros_like(hidden)
    expert_mlp(hidden, ids, shares, gate_up, down, out, "gelu_tanh")
    for token in range(tokens):
        expected = torch.zeros(48, dtype=torch.float64, device=target.device)
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ hidden[token].double()).chunk(2)
            expected += share * (down[expert].double() @ (F.gelu(gate, approximate="tanh") * up))
        assert relative_error(out[token], expected) < 3 * target.bound


def vocabulary(target: Target) -> int:
    return 20_001 if target is INTERPRETER else 262_144


@pytest.mark.parametrize("vocab_size", [1, 7, 4096, 9001, 0])
def test_entropy_softmax_matches_float64(target: Target, vocab_size: int) -> None:
    draw = Draw(target, vocab_size)
    logits = 6 * draw.normal(5, vocab_size or vocabulary(target))
    temperature = torch.tensor([0.4, 0.8, 1.0, 0.05, 3.0], device=target.device)
    token, entropy, shares = entropy_softmax(logits, temperature, target.dtype)
    exact = (logits.double() / temperature[:, None].double()).log_softmax(-1)
    assert torch.equal(token, logits.double().argmax(-1)) or target.dtype != torch.float32
    assert torch.equal(logits.gather(1, token[:, None])[:, 0], logits.amax(-1))
    assert shares.dtype == target.dtype and entropy.dtype == torch.float32
    assert (entropy.double() + (exact.exp() * exact).sum(-1)).abs().max() < 2e-4
    # logits over a temperature of 0.05 reach several hundred, where a float32 is 2e-5 off
    assert relative_error(shares, exact.exp()) < max(target.bound, 4e-5)


def test_entropies_of_certain_banned_and_broken_rows(target: Target) -> None:
    size = 9000
    logits = torch.full((5, size), -INF, device=target.device, dtype=target.dtype)
    logits[0, 8_500] = -3.0
    logits[1, [17, 8_999]] = 2.0
    logits[2:] = 1.0
    logits[3, 4_000], logits[4, 8_700] = NAN, INF
    ones = torch.full((5,), 0.5, device=target.device)
    token, entropy, shares = entropy_softmax(logits, ones, torch.float32)
    assert token[:3].tolist() == [8_500, 17, 0] and int(token.max()) < size
    assert entropy[:3].tolist() == pytest.approx([0.0, math.log(2), math.log(size)], abs=1e-4)
    assert not entropy[3:].isfinite().any()
    assert shares[1, [17, 8_999]].tolist() == pytest.approx([0.5, 0.5])


def test_options_that_do_not_fit_are_refused() -> None:
    q, rows = torch.zeros(2, 4, 2, 16), torch.zeros(2, 2, 4, 32)
    ids, lengths, arena = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2).int(), torch.zeros(2, 8, 32)
    given = (q, rows, arena, ids, lengths, ids.int() - 1, 1.0)
    with pytest.raises(ValueError, match="window=3 needs the first position"):
        resident_attention(*given, 3, window=3)
    with pytest.raises(ValueError, match="max_length of at most the window, not 4"):
        resident_attention(*given, 4, window=3, position=ids)
    with pytest.raises(ValueError, match=r"causal \(1,\)"):
        resident_attention(*given, 4, causal=ids[:1].int())
    with pytest.raises(ValueError, match="window=-1"):
        prefill_attention(q[0], rows[0], 0, 1, 1.0, -1)
    with pytest.raises(ValueError, match="activation='relu'"):
        expert_mlp(
            torch.zeros(1, 8), torch.zeros(1, 1).int(), torch.zeros(1, 1), torch.zeros(2, 8, 8),
            torch.zeros(2, 8, 4), torch.zeros(1, 8), "relu",  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"expert_scale \(3,\)"):
        scale = torch.zeros(3)
        route_experts(torch.zeros(1, 8), torch.zeros(4, 8), None, 1, score="softmax", expert_scale=scale)
    with pytest.raises(ValueError, match=r"temperature \(2,\)"):
        entropy_softmax(torch.zeros(3, 8), torch.ones(2), torch.float32)
    with pytest.raises(ValueError, match="even width"):
        gelu_mul(torch.zeros(2, 7))
