"""What a step commits of a block on a canvas: candidates, how they rank, and which of them are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from herald.decode.sampling import draw
from herald.sampling_params import SamplingParams

Rank = Literal["confidence", "entropy", "margin"]

NO_FLOOR = float("-inf")
# Rows of logits that are widened at once.
CHUNK_ROWS = 64


@dataclass(frozen=True)
class Take:
    """The masked positions that one step commits: the best of them, as long as they reach a floor.

    Attributes:
        look: positions looked at, in order of rank.
        least: of them, how many are taken whatever their value.
        floor: value that the others must reach, one for each place of the order, or one for all. The first
            that does not ends the run.
        first_only: only the block's first position is looked at.
    """

    look: int
    least: int
    floor: float | tuple[float, ...] = NO_FLOOR
    first_only: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether the number is known before the logits are."""
        return self.look == self.least


@dataclass(frozen=True)
class Candidates:
    """A token for every position and its value. Tensors of one length.

    Attributes:
        tokens: int64.
        value: float32, what ranks the positions, the largest first; NaN where a logit is NaN or +inf.
    """

    tokens: torch.Tensor
    value: torch.Tensor


def candidates(
    logits: torch.Tensor,
    rank: Rank,
    mask_token_id: int,
    params: SamplingParams,
    generator: torch.Generator | None,
) -> Candidates:
    """The likeliest or drawn token of every position.

    The mask token is never a candidate; it does count in the probabilities, which are those of the whole
    vocabulary at temperature 1.

    Args:
        logits: [T, vocab_size], any float dtype.
        rank: ``"confidence"``, the candidate's probability p; ``"entropy"``, the sum of q log(q + 1e-10) over
            the vocabulary; ``"margin"``, the largest probability less the second largest.
        generator: of the request, on the device of ``logits``.
    """
    tokens, values = [], []
    for part in logits.split(CHUNK_ROWS):
        wide = part.float()
        norm = wide.logsumexp(-1)
        value = None if rank == "confidence" else _spread(wide, rank)
        allowed = wide.clone()
        allowed[:, mask_token_id] = float("-inf")
        token = allowed.argmax(-1) if params.temperature == 0 else draw(allowed, params, generator)[0]
        if value is None:
            value = (wide.gather(1, token[:, None])[:, 0] - norm).exp()
        tokens.append(token)
        values.append(value.masked_fill(~norm.isfinite(), float("nan")))
    return Candidates(torch.cat(tokens), torch.cat(values))


def _spread(wide: torch.Tensor, rank: Rank) -> torch.Tensor:
    probability = wide.softmax(-1)
    if rank == "entropy":
        return (probability * (probability + 1e-10).log()).sum(-1)
    first, second = probability.topk(2, dim=-1).values.unbind(-1)
    return first - second


def taken(value: torch.Tensor, masked: torch.Tensor, take: Take) -> torch.Tensor:
    """Which positions of a block a step commits: bool [B], all of them masked ones.

    Equal values: the lower position goes first. Nothing waits for the device.

    Args:
        value: float32 [B]. masked: bool [B].
    """
    place = torch.arange(value.numel(), device=value.device)
    open_ = masked & (place == 0) if take.first_only else masked
    ordered, position = value.masked_fill(~open_, float("-inf")).sort(descending=True, stable=True)
    reaches = ordered >= _floors(take, value)
    run = ((place < take.look) & (reaches | (place < take.least))).long().cumprod(0).bool()
    return torch.zeros_like(masked).scatter(0, position, run) & open_


def _floors(take: Take, value: torch.Tensor) -> torch.Tensor:
    if isinstance(take.floor, float):
        return torch.full_like(value, take.floor)
    host = torch.tensor(take.floor, dtype=value.dtype)
    host = F.pad(host, (0, value.numel() - host.numel()), value=float("inf"))
    return host.pin_memory().to(value.device, non_blocking=True) if value.is_cuda else host
