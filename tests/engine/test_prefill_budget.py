"""Prefill beside running requests: what an iteration may cost, what is carried over, what never changes."""

from __future__ import annotations

import dataclasses

import pytest

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.engine.prefill import PrefillTask
from herald.engine.prefill_budget import PREFILL_TOKENS, PrefillBudget, free_rows
from herald.engine.request import Phase
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True, confidence_threshold=None, denoising_steps=4)


def iterations(budget: PrefillBudget, active: int, units: list[int]) -> list[int]:
    """Units of the given costs, run in order, that each iteration takes."""
    taken, queue = [], list(units)
    while queue:
        budget.begin(active)
        count = 0
        while queue and budget.take(queue[0]):
            queue.pop(0)
            count += 1
        budget.end(waits=active > 0 and bool(queue))
        taken.append(count)
        assert len(taken) < 1000
    return taken


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine("sdar_b8", DENSE)


def test_the_default_leaves_room_beside_a_full_batch(engine: Engine) -> None:
    config = engine.model.config
    assert PrefillBudget(config, 0, 20).tokens - 20 * config.block_length == PREFILL_TOKENS


def test_what_is_left_is_carried_over(engine: Engine) -> None:
    budget = PrefillBudget(engine.model.config, 30, 8)
    layers = engine.model.config.num_layers
    # 30 - 8 tokens an iteration: a unit of 33 has to wait for every other one
    assert iterations(budget, 8, [33 * layers] * 4) == [0, 1, 1, 0, 1, 1]
    assert budget.deficit == 0, "an empty queue keeps nothing"


def test_an_oversized_unit_runs_when_nobody_decodes(engine: Engine) -> None:
    budget = PrefillBudget(engine.model.config, 30, 8)
    assert iterations(budget, 0, [10**9, 10**9]) == [1, 1]
    assert budget.deficit == 0


def test_more_blocks_than_the_budget_do_not_starve_prefill(engine: Engine) -> None:
    budget = PrefillBudget(engine.model.config, 30, 8)
    layers = engine.model.config.num_layers
    assert sum(iterations(budget, 4000, [5 * layers])) == 1


def test_attention_to_a_long_context_costs(engine: Engine) -> None:
    budget, rows = PrefillBudget(engine.model.config, 512, 8), free_rows(engine.model.config)
    assert budget.unit_cost(64, 64) == int(64 * (1 + 64 / rows))
    assert budget.unit_cost(100, int(3 * rows)) == pytest.approx(400, abs=2)
    assert budget.unit_cost(0, 0) == 1, "a lane alone is a unit too"


@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_an_iteration_costs_what_it_earns_and_a_unit_at_most(
    make_engine: MakeEngine, offload: OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tokens(run(make_engine("sdar_b8", offload, prefill_chunk=64), [random_prompt(900, 2)], PARAMS))
    engine = make_engine("sdar_b8", offload, tokens_per_step=40, prefill_chunk=64)
    costs: list[int] = []
    unit = PrefillTask.run_unit

    def counted(task: PrefillTask) -> None:
        costs.append(engine.budget.unit_cost(*task.next_unit))
        unit(task)

    monkeypatch.setattr(PrefillTask, "run_unit", counted)
    running = engine.add_request(random_prompt(20, 1), dataclasses.replace(PARAMS, max_tokens=2000))
    while running.phase is not Phase.DECODE:
        engine.step()
    late = engine.add_request(random_prompt(900, 2), PARAMS)
    limit = 40 * engine.model.config.num_layers + engine.budget.unit_cost(64, 900)
    between = 0
    while late.phase is not Phase.DECODE:
        costs.clear()
        engine.step()
        between += 1
        assert sum(costs) <= limit
    assert between > 5, "the prompt was not spread over steps"
    engine.abort(running.request_id)
    while late.phase is not Phase.FINISHED:
        engine.step()
    assert [late.output_ids] == alone, "how a prefill is spread must not change its tokens"


def test_a_prompt_alone_does_not_hold_a_step_up_for_long(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", SPARSE, tokens_per_step=48, prefill_chunk=64)
    request = engine.add_request(random_prompt(1500, 2), PARAMS)
    steps = 0
    while request.phase is not Phase.DECODE:
        engine.step()
        steps += 1
    assert steps > 10, "a caller could not have added or aborted anything"


def test_a_request_may_have_its_own_kv_budget(make_engine: MakeEngine) -> None:
    prompts = [random_prompt(200, 3), random_prompt(200, 4)]
    small = dataclasses.replace(SPARSE, kv_budget=0.12)
    expected = [
        tokens(run(make_engine("sdar_b8", offload), [prompt], PARAMS))[0]
        for offload, prompt in ((SPARSE, prompts[0]), (small, prompts[1]))
    ]
    own = [PARAMS, dataclasses.replace(PARAMS, kv_budget=0.12)]
    requests = run(make_engine("sdar_b8", SPARSE), prompts, own)
    assert tokens(requests) == expected
    assert requests[1].counters.resident_bytes < requests[0].counters.resident_bytes
    with pytest.raises(InvalidOption, match="kv_budget=0.12 has no meaning without offload"):
        run(make_engine("sdar_b8", DENSE), prompts[:1], own[1])


def test_other_budgets_are_refused() -> None:
    for value in (-1, 0.5):
        with pytest.raises(InvalidOption, match="tokens_per_step"):
            EngineConfig(tokens_per_step=value)  # type: ignore[arg-type]
