"""Where the host waits: for rows of a selection, or for the step under way, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from herald.engine.decoder import Decoder
from herald.engine.request import Request
from herald.engine.retriever import Retriever

# The longest wait: an abort or a new request waits for its end.
PATIENCE = 0.02
# How often a step under way is asked whether it is done.
POLL_SECONDS = 2e-4


def wait_for_rows(running: Sequence[Request], decoder: Decoder, retriever: Retriever | None) -> bool:
    """Wait until rows of a request arrive, or the first step under way is done, or `PATIENCE` is over.

    Returns:
        False, at once, if no request waits for rows.
    """
    waits, under_way = decoder.planner.waits_for_rows, decoder.under_way
    selecting = [request for request in running if waits(request)]
    if not selecting or retriever is None:
        return False
    arrived, deadline = retriever.arrived, time.perf_counter() + PATIENCE
    arrived.clear()
    while all(waits(request) for request in selecting):
        while not arrived.wait(POLL_SECONDS):
            if time.perf_counter() > deadline or (under_way and under_way[0].report.done()):
                return True
        arrived.clear()
    return True
