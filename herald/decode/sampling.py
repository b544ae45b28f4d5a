"""Draws a candidate token for every position, with the confidence that ranks it."""

from __future__ import annotations

import torch

from herald.sampling_params import SamplingParams

# smaller ones act the same: every other logit is then out of reach
MIN_TEMPERATURE = 1e-6


def request_generator(device: torch.device | str, seed: int) -> torch.Generator:
    """A generator on ``device`` that follows all 63 bits of ``seed``, as torch's own on a CPU does not.

    Args:
        seed: 0 to 2**63 - 1. Below 2**32 it is torch's ``manual_seed(seed)`` on every device.
    """
    generator = torch.Generator(device)
    return generator.manual_seed(_fold(seed) if generator.device.type == "cpu" else int(seed))


def _fold(seed: int) -> int:
    """``seed`` in the 32 bits that torch's CPU generator reads; it drops the upper ones without a word.

    Seeds that share one half never meet; two others do with a chance of 2**-32. The upper half is mixed by
    the finaliser of MurmurHash3 (Appleby), a permutation of 32 bits that keeps 0.
    """
    low, high = int(seed) & 0xFFFFFFFF, int(seed) >> 32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        high = (high ^ (high >> shift)) * factor & 0xFFFFFFFF
    return low ^ high ^ (high >> 16)


def draw(
    logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of one request's positions.

    Greedy takes the largest logit, the lowest id on ties. Otherwise temperature, then ``top_k``, then
    ``top_p`` shape the distribution that is drawn from; the noise is a function of ``generator`` and
    the shape of ``logits`` only, so a request draws the same tokens in any batch.

    Args:
        logits: [T, vocab_size], any float dtype.
        generator: on the device of ``logits``; unused when greedy.

    Returns:
        ``tokens`` [T] int64 and ``confidence`` [T] float32: softmax probability of each token over the
        whole vocabulary at temperature 1, whatever the filters. It is NaN where a logit is NaN or +inf.
    """
    wide = logits.float()
    tokens = wide.argmax(dim=-1) if params.temperature == 0 else _sample(wide, params, generator)
    chosen = wide.gather(-1, tokens[:, None])[:, 0]
    norm = wide.logsumexp(dim=-1)
    return tokens, (chosen - norm).exp().masked_fill(~norm.isfinite(), float("nan"))


def _sample(wide: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> torch.Tensor:
    # the largest logit becomes 0 first: dividing by a small temperature then cannot overflow upwards
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / max(params.temperature, MIN_TEMPERATURE)
    scaled = _filter(scaled, params.top_k, params.top_p)
    # arg-max of p / Exp(1) draws from p (the exponential form of the Gumbel trick), without a host sync
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    return (scaled.softmax(dim=-1) / noise).argmax(dim=-1)


def _filter(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """-inf outside the ``top_k`` largest, then outside the smallest set of them with mass ``top_p``."""
    vocab_size = scaled.shape[-1]
    if not 0 < top_k < vocab_size and top_p >= 1.0:
        return scaled
    # stable: equal logits rank by token id
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < vocab_size:
        ordered[..., top_k:] = float("-inf")
    if top_p < 1.0:
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        outside = before >= top_p
        outside[..., 0] = False  # the smallest set holds one token, also where float32 takes top_p for 0
        ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, ids, ordered)
