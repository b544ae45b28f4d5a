"""A step in which every request only denoises: the next one is the same but for its quotas."""

from __future__ import annotations

import numpy as np

from herald.engine.program import StepProgram
from herald.engine.request import Request


class PlainStep:
    """The last step of some requests, kept to be sent again.

    Args:
        requests: that took part, in order.
        program: that ran it.
        numbers: its packed integers, which `set_quotas` changes.
    """

    def __init__(self, requests: list[Request], program: StepProgram, numbers: np.ndarray) -> None:
        self.requests = requests
        self.program = program
        self.numbers = numbers
        self._at = program.shape.quotas_at
        self._quotas: list[int] = numbers[self._at : self._at + len(requests)].tolist()

    def fits(self, requests: list[Request]) -> bool:
        """Whether the next step of ``requests`` is this one again, with other quotas."""
        if len(requests) != len(self.requests):
            return False
        for mine, request in zip(self.requests, requests, strict=True):
            if mine is not request or not request.is_plain:
                return False
        return True

    def set_quotas(self) -> bool:
        """Take the quotas of the requests' next step; whether one of them differs from the step before."""
        quotas = [request.step_quota for request in self.requests]
        if quotas == self._quotas:
            return False
        self._quotas = quotas
        self.numbers[self._at : self._at + len(quotas)] = quotas
        return True
