"""When a set is too old for the step that comes: it was chosen for something else than is to be found now.

Both rules go by ``refresh_commits``, a share of a block's positions, and are for requests that decode with a
confidence threshold: those with a fixed number of commits a step do not wait for reports.
"""

from __future__ import annotations

from herald.engine.request import Request


def follows_many_commits(request: Request) -> bool:
    """Whether the next step of the block follows one that committed the share, and has not selected yet.

    What is sure at once makes other rows wanted at once, and the next step may be as sure without them.
    """
    few = _share(request)
    if few == 0 or request.step == 0 or request.selected_in == (request.block, request.step):
        return False
    return request.committed >= few


def draft_was_wrong(request: Request) -> bool:
    """Whether the look-ahead for the next block took half the share of the finished block for other tokens.

    Half of it: such a token is one that its queries missed, and one that misled them.
    """
    few, selection = _share(request), request.selection
    if few == 0 or selection is None or selection.block <= request.block or not selection.draft:
        return False
    pairs = zip(selection.draft, request.reported, strict=True)
    return 2 * sum(guess != token for guess, token in pairs) >= few


def draft_of(request: Request) -> list[int]:
    """What the masks of the next block take for the block's tokens in a look-ahead of the next step.

    Empty where the host does not know it. A token below 0 stands for a mask.
    """
    assert request.resident is not None
    if request.is_certain:
        return []
    if request.resident.config.lookahead_context == "block":
        return request.reported
    return [token if token >= 0 else -1 - token for token in request.reported]


def _share(request: Request) -> float:
    """Positions that count as many; 0 where nothing waits for rows of its own."""
    assert request.resident is not None
    config = request.resident.config
    if request.is_certain or config.on_late == "proceed":
        return 0.0
    return config.refresh_commits * request.block_length
