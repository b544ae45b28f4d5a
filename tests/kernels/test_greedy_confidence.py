"""`greedy_confidence`: the arg-max, its probability, and logits that are not numbers."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import greedy_confidence
from tests.kernels.support import CPU_FP32, INTERPRETER, Draw, Target, relative_error

INF, NAN = float("inf"), float("nan")


def vocabulary(target: Target) -> int:
    return 20_001 if target is INTERPRETER else 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 4096, 5001, 0])
def test_matches_softmax(target: Target, vocab_size: int, dtype: torch.dtype) -> None:
    logits = 3 * Draw(target, vocab_size).normal(5, vocab_size or vocabulary(target)).to(dtype)
    token, confidence = greedy_confidence(logits)
    wide = logits.double()
    top = wide.max(-1, keepdim=True).values
    assert token.dtype == torch.int64
    for row in range(5):
        assert int(token[row]) == wide[row].tolist().index(float(top[row]))
    assert relative_error(confidence, 1 / (wide - top).exp().sum(-1)) < 1e-5


def test_the_lowest_of_equal_ids_wins(target: Target) -> None:
    logits = Draw(target, 1).integers(0, 2, 6, 10_000).to(target.dtype)
    logits[:, ::3] = 5.0
    logits[2, :9_000] = 0.0
    # A power of two apart, where a kernel may keep them in one accumulator.
    logits[3] = 0.0
    logits[3, [77, 77 + 4096, 77 + 8192]] = 5.0
    token, _ = greedy_confidence(logits)
    assert token.tolist() == [0, 0, 9_000, 77, 0, 0]


def test_minus_infinity_is_a_banned_token(target: Target) -> None:
    logits = torch.full((2, 9000), -INF, device=target.device, dtype=target.dtype)
    logits[0, 8_500] = -3.0
    logits[1, [17, 8_999]] = 2.0
    token, confidence = greedy_confidence(logits)
    assert token.tolist() == [8_500, 17]
    assert confidence.tolist() == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("wrong", [NAN, INF])
@pytest.mark.parametrize("position", [0, 4_999, 8_999])
def test_what_is_not_a_number_gives_nan(target: Target, wrong: float, position: int) -> None:
    logits = Draw(target, 2).normal(3, 9_000)
    logits[1, position] = wrong
    token, confidence = greedy_confidence(logits)
    assert confidence.isnan().tolist() == [False, True, False]
    assert 0 <= int(token[1]) < 9_000


def test_nothing_but_minus_infinity_gives_nan(target: Target) -> None:
    token, confidence = greedy_confidence(torch.full((1, 50), -INF, device=target.device))
    assert confidence.isnan().all()
    assert 0 <= int(token[0]) < 50


def test_rows_do_not_see_each_other(target: Target) -> None:
    logits = Draw(target, 3).normal(9, 5_003)
    token, confidence = greedy_confidence(logits)
    for row in range(9):
        one_token, one_confidence = greedy_confidence(logits[row : row + 1])
        assert torch.equal(one_token, token[row : row + 1])
        assert torch.equal(one_confidence, confidence[row : row + 1])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Draw(CPU_FP32, 4).normal(7, 100)
    _, whole = greedy_confidence(logits)
    monkeypatch.setattr("herald_kernels.ops.greedy_confidence.reference.CHUNK_VALUES", 250)
    assert torch.equal(greedy_confidence(logits)[1], whole)
