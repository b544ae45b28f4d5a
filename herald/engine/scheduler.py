"""Policy: who is admitted, who prefills, who decodes in the next step."""

from __future__ import annotations

import itertools
from collections import deque

from herald.config import EngineConfig
from herald.engine.request import Phase, Request


class Scheduler:
    """First come, first served: one request prefills at a time, the others decode beside it.

    Args:
        config: limits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._turns: dict[int, int] = {}
        self._count = itertools.count(1)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def next_to_admit(self) -> Request | None:
        """The request at the head of the queue, when a place is free."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        return self.waiting[0]

    def admitted(self, request: Request) -> None:
        """The head of the queue has its memory and begins to prefill."""
        assert self.waiting[0] is request
        self.waiting.popleft()
        request.phase = Phase.PREFILL
        self.running.append(request)

    def prefilling(self) -> Request | None:
        """The oldest request whose prompt is not done."""
        return next((r for r in self.running if r.phase is Phase.PREFILL), None)

    @property
    def active_positions(self) -> int:
        """Positions of the blocks that decode."""
        return sum(r.block_length for r in self.running if r.phase is Phase.DECODE)

    def decoding(self) -> list[list[Request]]:
        """Requests that decode, one list per block length, the longest without a turn first."""
        groups: dict[int, list[Request]] = {}
        for request in self.running:
            if request.phase is Phase.DECODE:
                groups.setdefault(request.block_length, []).append(request)
        return sorted(groups.values(), key=lambda group: self._turns.get(group[0].block_length, 0))

    def is_all(self, groups: list[list[Request]]) -> bool:
        """Whether the one group of `decoding` is all there is: nobody prefills, and nobody waits."""
        return not self.waiting and len(groups) == 1 and len(groups[0]) == len(self.running)

    def had_turn(self, block_length: int) -> None:
        """A step of the requests of that block length was launched."""
        self._turns[block_length] = next(self._count)

    def remove(self, request: Request) -> None:
        """Forget a request that finished, failed or was aborted."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED
