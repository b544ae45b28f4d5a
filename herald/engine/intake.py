"""What comes in with a request, before an engine makes it one of its own."""

from __future__ import annotations

from dataclasses import dataclass

from herald.decode import Policy, StopChecker
from herald.sampling_params import SamplingParams


@dataclass(frozen=True)
class Intake:
    """Fields of a `herald.engine.request.Request` that do not depend on the engine; see there.

    Attributes:
        params: settled by ``policy``.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    checker: StopChecker
    policy: Policy
    prompt: str | None
