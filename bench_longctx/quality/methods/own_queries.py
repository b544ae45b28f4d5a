"""Selection by every masked position of the block itself, at the moments the engine knows.

`own_step0` waits until a block is finished and selects with its successor's all-masked queries: what MAGE's
timing gives, and nothing is hidden. `lookahead_1` and `lookahead_k` ask for the next block's queries during
the current one, over the draft of what is still masked, in step 1 or in a step that is given; a block that
ends sooner falls back to its boundary. `lookahead_late` does so as late as the machine's own times let it:
its scores are of a machine under the load that it has, and may differ from run to run.
`lookahead_refresh` selects once more within a block, from the queries of its step 1, for the steps from 2 on;
`lookahead_hold`, the engine's default, for a step that follows many commits, which waits for its rows, and
for a block whose look-ahead saw a wrong draft; `own_hold` does that without look-aheads.
"""

from __future__ import annotations

from bench_longctx.quality.methods.base import Method, Switches
from herald.config import OffloadConfig

# Later than any block's last step.
NEVER = 99


class OwnStepZero(Method):
    name = "own_step0"
    about = "all own queries at the block's boundary, exposed (MAGE's timing)"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(budget, switches, lookahead_step=NEVER)


class OwnHold(Method):
    name = "own_hold"
    about = "as own_step0, and what follows many commits waits for rows of its own queries (all exposed)"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        commits = OffloadConfig.refresh_commits
        return self.options(budget, switches, lookahead_step=NEVER, refresh_commits=commits)


class LookaheadOne(Method):
    name = "lookahead_1"
    about = "all queries of the next block over the draft of step 1"


class LookaheadK(Method):
    name = "lookahead_k"
    about = "the same over the draft of step --lookahead-step"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(budget, switches, lookahead_step=switches.lookahead_step)


class LookaheadLate(Method):
    name = "lookahead_late"
    about = "the same over the latest draft whose rows still arrive in time (of this machine)"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(budget, switches, lookahead="late")


class LookaheadRefresh(Method):
    name = "lookahead_refresh"
    about = "as lookahead_1, and anew within the block from the queries of its step 1"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(budget, switches, refresh_step=1, refresh_lag=1)


class LookaheadHold(Method):
    name = "lookahead_hold"
    about = "as lookahead_1, and what follows many commits waits for rows of its own queries (default)"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(budget, switches, refresh_commits=OffloadConfig.refresh_commits)
