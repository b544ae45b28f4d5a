"""How much of a prompt runs between two decode steps: a budget of tokens, with a deficit carried over.

The rule is that of deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) between two queues: every
iteration earns the budget less the positions of the blocks that decode, prefill spends what is there and
keeps the rest for the next iteration. The prompt at the head goes first, and nobody passes it.
"""

from __future__ import annotations

from herald.models import ModelConfig

# Tokens of prefill beside a full batch, where the user names no budget.
PREFILL_TOKENS = 512


class PrefillBudget:
    """Token-layers that prefill may run in an iteration.

    A unit costs its positions, and more the longer the context its attention reads: `unit_cost`. What an
    iteration runs beside decoding costs less than what it earns and one unit, which is the most that can be
    left over.

    Args:
        config: of the model.
        tokens: prompt tokens and positions of blocks in an iteration; 0 for the blocks of ``max_num_seqs``
            requests and some prompt tokens.

    Attributes:
        deficit: token-layers that earlier iterations left.
    """

    def __init__(self, config: ModelConfig, tokens: int, max_num_seqs: int) -> None:
        self.tokens = tokens or PREFILL_TOKENS + max_num_seqs * config.block_length
        self.deficit = 0
        self._layers = config.num_layers
        self._free_rows = free_rows(config)
        self._left = 0
        self._alone = False

    def unit_cost(self, positions: int, context: int) -> int:
        """Cost of ``positions`` in one layer, in token-layers of a short prompt.

        Args:
            context: positions that they attend to.
        """
        return max(int(positions * (1 + context / self._free_rows)), 1)

    def begin(self, active: int) -> None:
        """An iteration begins.

        Args:
            active: positions of the blocks that decode in it; 0 when nobody decodes.
        """
        self._alone = active == 0
        self._left = max(self.tokens - active, 1) * self._layers + self.deficit

    def take(self, cost: int) -> bool:
        """Whether a unit of that cost may run in this iteration; where nobody decodes, one always may."""
        if cost > self._left and not self._alone:
            return False
        self._alone = False
        self._left -= cost
        return True

    def end(self, waits: bool) -> None:
        """The iteration is over.

        Args:
            waits: a prompt has units that found no room beside requests that decode; otherwise nothing is
                carried over.
        """
        self.deficit = max(self._left, 0) if waits else 0


def free_rows(config: ModelConfig) -> float:
    """Rows of context whose attention costs a position as many operations as its matrix products."""
    heads = config.num_heads + config.num_kv_heads
    products = config.hidden_size * config.head_dim * (heads + config.num_kv_heads + config.num_heads)
    moe = config.moe
    inner = config.intermediate_size
    if moe is not None:
        inner = moe.intermediate_size * (moe.experts_per_token + moe.num_shared_experts)
    products += 3 * config.hidden_size * inner
    return 2 * products / (4 * config.num_heads * config.head_dim)
