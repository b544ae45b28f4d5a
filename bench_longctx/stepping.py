"""Steps of an engine in a measurement: a request that fails ends it, aloud."""

from __future__ import annotations

from herald.engine.engine import Engine
from herald.engine.request import Phase, Request


def step(engine: Engine, requests: list[Request]) -> None:
    """Make one step.

    Raises:
        HeraldError: that of a request that failed; what waits for its blocks would wait for ever.
        RuntimeError: all ``requests`` have ended already, so that nothing will come of another step.
    """
    if all(request.phase is Phase.FINISHED for request in requests):
        raise RuntimeError(f"{len(requests)} requests ended before they were measured")
    for request in engine.step():
        if request.error is not None:
            raise request.error
