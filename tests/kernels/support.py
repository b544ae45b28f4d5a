"""What the tests of the kernels share: targets, the error measure and random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Target:
    """Where a test runs, and the bound on ||out - ref|| / ||ref|| against a float64 computation.

    Args:
        long: rows of the longest resident set a test should make there.
    """

    device: str
    dtype: torch.dtype
    backend: str
    bound: float
    long: int


CPU_FP32 = Target("cpu", torch.float32, "torch", 2e-6, 9001)
CPU_BF16 = Target("cpu", torch.bfloat16, "torch", 6e-3, 1025)
INTERPRETER = Target("cpu", torch.float32, "triton", 2e-6, 601)
CUDA_FP32 = Target("cuda", torch.float32, "triton", 1e-5, 40_001)
CUDA_BF16 = Target("cuda", torch.bfloat16, "triton", 6e-3, 40_001)


TORCH = [pytest.param(CPU_FP32, id="cpu-fp32"), pytest.param(CPU_BF16, id="cpu-bf16")]
TRITON_CPU = [pytest.param(INTERPRETER, id="interpreter", marks=pytest.mark.interpreter)]
CUDA = [
    pytest.param(CUDA_FP32, id="cuda-fp32", marks=pytest.mark.gpu),
    pytest.param(CUDA_BF16, id="cuda-bf16", marks=pytest.mark.gpu),
]
TRITON = TRITON_CPU + CUDA
EVERYWHERE = TORCH + TRITON


def on(targets: list[Any]) -> pytest.MarkDecorator:
    """Restrict a test to some targets."""
    return pytest.mark.parametrize("target", targets, indirect=True)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN (which no bound admits) where out holds one."""
    assert out.shape == expected.shape
    difference = out.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


class Draw:
    """Random tensors of a target from one seed, the same on every device."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal values in the target's dtype."""
        value = torch.randn(shape, generator=self.generator)
        return value.to(self.target.device, self.target.dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 values in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.target.device)

    def permutation(self, n: int) -> torch.Tensor:
        """A permutation of range(n)."""
        return torch.randperm(n, generator=self.generator).to(self.target.device)
