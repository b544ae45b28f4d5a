"""How much memory requests need before they run."""

from __future__ import annotations

from collections.abc import Sequence

from herald.engine.memory import MemoryNeed
from herald.engine.request import Request
from herald.engine.shared_prefix import SharedPrefixes


def memory_needs(waiting: Sequence[Request], prefixes: SharedPrefixes) -> list[MemoryNeed]:
    """What an idle engine may grow to, the best first: enough for all waiting requests, or for one.

    Then the same without the pages that earlier requests left to share; those of loaded prefixes stay.
    """
    needs = [_need(requests, prefixes) for requests in (waiting, waiting[:1])]
    if len(prefixes.cache) and not prefixes.cache.num_pinned:
        needs += [need._replace(keep_prefixes=False) for need in needs]
    return needs


def _need(requests: Sequence[Request], prefixes: SharedPrefixes) -> MemoryNeed:
    """For all blocks the requests can use."""
    rows = sum(request.required_rows(request.offload) for request in requests)
    pages = prefixes.kept(requests) + sum(map(prefixes.needed, requests))
    return MemoryNeed(rows, pages, requests=len(requests))
