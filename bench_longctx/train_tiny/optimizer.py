"""Muon for the weight matrices, AdamW's update for embeddings and norms.

Muon (K. Jordan et al., 2024): momentum, then the nearest semi-orthogonal matrix by a Newton-Schulz iteration.
Matrices of one shape are stacked, so that a step costs a few dozen kernels for the whole model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of each matrix's singular value decomposition; g [n, rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdam:
    """One optimiser over a model's parameters.

    muon_lr: step of a matrix, in spectral norm (scaled by sqrt(rows / columns) if that is above 1). adam_lr:
    step of embeddings and norms. `step(scale)` multiplies both, for a schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float,
        adam_lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
    ):
        self.muon_lr, self.adam_lr, self.momentum, self.betas = muon_lr, adam_lr, momentum, betas
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.vectors: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                self.groups.setdefault(tuple(p.shape), []).append(p)
            else:
                self.vectors.append(p)
        self.buffers = {
            shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.groups.items()
        }
        self.first = [torch.zeros_like(p) for p in self.vectors]
        self.second = [torch.zeros_like(p) for p in self.vectors]
        self.steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all parameters from their gradients and clear those."""
        self.steps += 1
        for shape, params in self.groups.items():
            grads = torch.stack([p.grad for p in params])
            buffer = self.buffers[shape]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp_(buffer, self.momentum)).to(buffer.dtype)
            rate = self.muon_lr * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_add_(params, list(update.unbind()), alpha=-rate)
        grads = [p.grad for p in self.vectors]
        beta1, beta2 = self.betas
        torch._foreach_lerp_(self.first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - beta2)
        root = torch._foreach_div(self.second, 1 - beta2**self.steps)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, 1e-8)
        torch._foreach_addcdiv_(
            self.vectors, self.first, root, -self.adam_lr * scale / (1 - beta1**self.steps)
        )
        for p in (*self.vectors, *(p for params in self.groups.values() for p in params)):
            p.grad = None

    def reset(self) -> None:
        """Forget all gradients seen so far."""
        self.steps = 0
        for t in (*self.buffers.values(), *self.first, *self.second):
            t.zero_()

    def state(self) -> dict[str, Tensor]:
        """The state as named tensors; momentum of the matrices in bf16."""
        out = {"momentum." + "x".join(map(str, shape)): b.bfloat16() for shape, b in self.buffers.items()}
        for i, (m, v) in enumerate(zip(self.first, self.second, strict=True)):
            out[f"first.{i}"], out[f"second.{i}"] = m, v
        return out

    def load(self, state: dict[str, Tensor], steps: int) -> None:
        """Continue from `state`."""
        self.steps = steps
        for shape, b in self.buffers.items():
            b.copy_(state["momentum." + "x".join(map(str, shape))])
        for i, (m, v) in enumerate(zip(self.first, self.second, strict=True)):
            m.copy_(state[f"first.{i}"])
            v.copy_(state[f"second.{i}"])
