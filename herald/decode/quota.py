"""How many positions each step of a block commits at least."""

from __future__ import annotations

from herald.config import check


def quota(block_length: int, steps: int = 0) -> list[int]:
    """Split ``block_length`` positions over ``steps``, the earlier steps taking the remainder.

    Args:
        steps: denoising steps a block may take, 0 for one a position. Those beyond ``block_length`` would
            commit nothing and are left out, whatever their number.

    Returns:
        ``min(steps, block_length)`` counts (``block_length`` of them for 0) that add up to ``block_length``.
    """
    check(block_length >= 1, "block_length", block_length, "use 1 or more")
    check(steps >= 0, "denoising_steps", steps, "use 0 for one step a position")
    steps = min(steps or block_length, block_length)
    share, rest = divmod(block_length, steps)
    return [share + (step < rest) for step in range(steps)]
