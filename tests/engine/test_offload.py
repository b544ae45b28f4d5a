"""Properties of the offload loop: what is resident is right, and nothing depends on luck."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from herald.config import OffloadConfig
from herald.engine.request import Phase, Request
from herald.engine.resident import ResidentSet, set_size, staging_rows
from herald.errors import (
    HostPoolTooSmall,
    InvalidOption,
    NonFiniteLogits,
    PromptTooLong,
    RetrievalFailed,
    TransferCorrupted,
)
from herald.kvstore import KeyIndex
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import check_resident_rows, leaks, random_prompt, run, tokens

SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
SPARSE = OffloadConfig(kv_budget=0.2, **SMALL)
PARAMS = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
@pytest.mark.parametrize("lookahead_step", [1, 2, 99])
def test_resident_rows_equal_the_pool(make_engine: MakeEngine, bits: int, lookahead_step: int) -> None:
    """After every step of a sparse run each slot holds exactly the row it says it holds."""
    offload = OffloadConfig(kv_budget=0.2, index_bits=bits, lookahead_step=lookahead_step, **SMALL)
    engine = make_engine("sdar_b8", offload)
    compared: list[int] = []
    prompts = [random_prompt(n, n) for n in (3, 61, 150, 333)]
    requests = run(engine, prompts, PARAMS, lambda live: compared.append(check_resident_rows(engine, live)))
    assert sum(compared) > 10_000
    long = requests[3].counters
    assert long.rows_moved > 0
    assert (long.lookaheads > 0) == (lookahead_step < 4)
    assert long.boundary_selections > 0 or lookahead_step < 4


@pytest.mark.parametrize("on_late", ["wait", "proceed"])
def test_slow_selection(make_engine: MakeEngine, on_late: str) -> None:
    """A selection that is late either stalls (and is counted) or is applied when it lands."""
    offload = OffloadConfig(kv_budget=0.2, on_late=on_late, **SMALL)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.03))
    compared: list[int] = []
    (request,) = run(
        engine,
        [random_prompt(300, 5)],
        PARAMS,
        lambda live: compared.append(check_resident_rows(engine, live) if len(compared) % 11 == 10 else 0),
    )
    assert len(request.output_ids) == 44
    assert sum(compared) > 100
    if on_late == "wait":
        assert request.counters.exposed_seconds > 0.03
        assert request.counters.late_selections == 0
    else:
        assert request.counters.late_selections > 0


def test_proceed_catches_up(make_engine: MakeEngine) -> None:
    """With on_late="proceed" a late set is applied within the block, and rows still match the pool."""
    offload = OffloadConfig(kv_budget=0.2, on_late="proceed", lookahead_step=3, **SMALL)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.01))
    applied: list[int] = []

    def watch(live) -> None:
        time.sleep(0.02)
        check_resident_rows(engine, live)
        applied.extend(r.block for r in live if r.selected_block == r.block)

    slow = SamplingParams(max_tokens=60, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
    run(engine, [random_prompt(300, 6)], slow, watch)
    assert len(set(applied)) >= 4


@pytest.mark.parametrize("difference_only", [True, False])
def test_late_selections_fit_the_staging_rows(make_engine: MakeEngine, difference_only: bool) -> None:
    """Whatever a late selection brings stays within its own request's rows."""
    offload = OffloadConfig(
        kv_budget=0.3,
        sink_rows=0,
        recent_rows=1,
        min_resident_rows=16,
        on_late="proceed",
        lookahead_step=50,
        difference_only=difference_only,
    )
    params = SamplingParams(max_tokens=24, block_length=4, ignore_eos=True, confidence_threshold=None)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.002))
    for seed in range(12):
        run(
            engine,
            [random_prompt(4, seed), random_prompt(9, seed)],
            params,
            lambda live: check_resident_rows(engine, live) and None,
        )


def test_everything_selected_equals_dense(make_engine: MakeEngine) -> None:
    """Budget 1.0, every row travelling each block through index, pool and staging: dense tokens."""
    prompts = [random_prompt(n, n) for n in (1, 7, 8, 9, 63, 64, 65, 127, 128, 200)]
    expected = tokens(run(make_engine("sdar_b8"), prompts, PARAMS))
    for bits in (16, 8, 4, 1):
        offload = OffloadConfig(kv_budget=1.0, difference_only=False, index_bits=bits, **SMALL)
        found = tokens(run(make_engine("sdar_b8", offload), prompts, PARAMS))
        assert found == expected, bits


def test_sparse_differs_from_dense_when_starved(make_engine: MakeEngine) -> None:
    """The budget is real: with very few rows a random model's tokens change."""
    prompts = [random_prompt(400, n) for n in range(4)]
    starved = OffloadConfig(kv_budget=0.01, sink_rows=0, recent_rows=8, min_resident_rows=1)
    dense = tokens(run(make_engine("sdar_b8"), prompts, PARAMS))
    assert tokens(run(make_engine("sdar_b8", starved), prompts, PARAMS)) != dense


def test_two_hundred_races(make_engine: MakeEngine) -> None:
    """Random sleeps in the selector's and the transfer's threads never change a token."""
    prompts = [random_prompt(n, n) for n in (90, 170)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=None, denoising_steps=2)
    engine = make_engine("sdar_b8", SPARSE)
    rng = random.Random(0)

    def nap() -> None:
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.002)

    expected = tokens(run(engine, prompts, params))
    assert engine.retriever is not None and engine.memory.store is not None
    engine.retriever.delay = nap
    engine.memory.store.transfer.delay = nap
    for trial in range(200):
        assert tokens(run(engine, prompts, params)) == expected, trial


def test_batch_does_not_matter(make_engine: MakeEngine) -> None:
    prompts = [random_prompt(n, n) for n in (5, 40, 130, 222, 301)]
    alone = [tokens(run(make_engine("sdar_b8", SPARSE), [p], PARAMS))[0] for p in prompts]
    together = tokens(run(make_engine("sdar_b8", SPARSE, max_num_seqs=3), prompts, PARAMS))
    assert together == alone


def test_sampling_is_reproducible(make_engine: MakeEngine) -> None:
    warm = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, seed=7, ignore_eos=True)
    prompts = [random_prompt(100, 1), random_prompt(60, 2)]
    first = tokens(run(make_engine("sdar_b8", SPARSE), prompts, warm))
    second = tokens(run(make_engine("sdar_b8", SPARSE), prompts[::-1], warm))[::-1]
    other = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, seed=8, ignore_eos=True)
    assert first == second
    assert tokens(run(make_engine("sdar_b8", SPARSE), prompts, other)) != first


def test_literal_mask_in_the_prompt_stays(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    mask = engine.model.config.mask_token_id
    prompt = [*random_prompt(48, 3), mask, 5, mask]
    seen: list[list[int]] = []

    def watch(live) -> None:
        seen.extend(
            engine.decoder.table(8).tokens[r.slot].tolist()[: r.prompt_in_block(r.block)]
            for r in live
            if r.block == r.prompt_blocks and r.slot >= 0
        )

    run(engine, [prompt], PARAMS, watch)
    assert seen and all(head == prompt[48:] for head in seen)


@pytest.mark.parametrize("folder", ["sdar_b4", "sdar_b8"])
def test_block_length_of_a_request(make_engine: MakeEngine, folder: str) -> None:
    """Requests of different block lengths share an engine."""
    prompts = [random_prompt(70, 1), random_prompt(90, 2)]
    params = [SamplingParams(max_tokens=24, block_length=b, ignore_eos=True) for b in (4, 16)]
    alone = [tokens(run(make_engine(folder), [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(make_engine(folder, OffloadConfig(kv_budget=1.0)), prompts, params)) == alone
    with pytest.raises(InvalidOption, match="page_size"):
        run(make_engine(folder, SPARSE), prompts[:1], SamplingParams(block_length=24))


@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_abort_at_every_step_leaks_nothing(make_engine: MakeEngine, offload: OffloadConfig) -> None:
    engine = make_engine("sdar_b8", offload, prefill_chunk=64, tokens_per_step=16)
    prompts = [random_prompt(n, n) for n in (150, 90)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, confidence_threshold=None, denoising_steps=3)
    expected = tokens(run(engine, prompts, params))
    for step in range(0, 40, 3):
        first = engine.add_request(prompts[0], params)
        second = engine.add_request(prompts[1], params)
        for _ in range(step):
            engine.step()
        engine.abort(first.request_id)
        while engine.has_work:
            engine.step()
        assert list(second.output_ids) == expected[1]
        assert first.finish_reason in ("abort", "length")
        assert not leaks(engine), step
    assert not engine.abort("nobody")


def test_abort_from_another_thread(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    request = engine.add_request(random_prompt(200, 1), SamplingParams(max_tokens=4000, ignore_eos=True))
    thread = threading.Timer(0.2, engine.abort, [request.request_id])
    thread.start()
    while request.phase is not Phase.FINISHED:
        engine.step()
    thread.join()
    assert request.finish_reason == "abort"
    assert not leaks(engine)


def test_corrupted_transfer_is_seen(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, verify_transfers=True, **SMALL))

    def corrupt(retriever, store) -> None:
        submit = store.transfer.submit

        def wrong(move, after=None):
            ticket = submit(move, after)
            ticket.wait_host()
            store.transfer.arena_rows[int(move.dst_rows[-1]), 0] += 1
            return ticket

        store.transfer.submit = wrong

    engine.on_retriever = corrupt
    with pytest.raises(TransferCorrupted):
        run(engine, [random_prompt(300, 5)], PARAMS)


def test_poison_would_be_seen(make_engine: MakeEngine) -> None:
    """The NaN check has teeth: an engine that reads one slot too far fails."""
    engine = make_engine("sdar_b8", SPARSE)

    def overrun(live) -> None:
        for request in live:
            if request.phase is Phase.DECODE and request.resident is not None:
                request.resident.length = request.resident.num_slots + 1

    with pytest.raises(NonFiniteLogits):
        run(engine, [random_prompt(300, 5)], SamplingParams(max_tokens=8, ignore_eos=True), overrun)


def test_error_of_one_request_leaves_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    prompts = [random_prompt(90, 1), random_prompt(170, 2)]
    expected = tokens(run(engine, prompts, PARAMS))
    requests = [engine.add_request(p, PARAMS) for p in prompts]
    engine.step()
    while requests[0].resident is None or requests[0].phase is not Phase.DECODE:
        engine.step()
    start = requests[0].resident.row_start
    engine.memory.arena.rows[:, :, start] = float("nan")
    while engine.has_work:
        engine.step()
    assert isinstance(requests[0].error, NonFiniteLogits)
    assert list(requests[1].output_ids) == expected[1]
    assert not leaks(engine)


def test_failed_transfer_ends_its_request_only(make_engine: MakeEngine) -> None:
    """An error in the transfer's thread becomes the error of the request it was for."""
    engine = make_engine("sdar_b8", SPARSE)
    prompts = [random_prompt(170, 2), random_prompt(300, 5)]
    expected = tokens(run(engine, prompts, PARAMS))
    assert engine.memory.store is not None
    transfer = engine.memory.store.transfer
    submit, calls = transfer.submit, []

    def broken(move, after=None):
        calls.append(len(move))
        if len(calls) == 3:
            raise OSError("the bus is gone")
        return submit(move, after)

    transfer.submit = broken
    requests = [engine.add_request(p, PARAMS) for p in prompts]
    while engine.has_work:
        engine.step()
    failed = [r for r in requests if r.error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].error, RetrievalFailed)
    assert isinstance(failed[0].error.__cause__, OSError)
    (other,) = (i for i, r in enumerate(requests) if r.error is None)
    assert list(requests[other].output_ids) == expected[other]
    assert not leaks(engine)


def test_refusals_name_a_value_that_works(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", OffloadConfig(host_memory_bytes=4 << 20), max_model_len=4096)
    with pytest.raises(PromptTooLong, match="at most 4,080 prompt tokens"):
        engine.add_request([1] * 4090, SamplingParams(max_tokens=16))
    engine.add_request([1] * 4080, SamplingParams(max_tokens=16))
    with pytest.raises(PromptTooLong, match="max_tokens below 4,096"):
        engine.add_request([1], SamplingParams(max_tokens=4096))
    with pytest.raises(InvalidOption, match="vocabulary"):
        engine.add_request([1, 9999], PARAMS)
    with pytest.raises(InvalidOption, match="no tokens"):
        engine.add_request([], PARAMS)


def test_pool_too_small_says_what_fits(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", OffloadConfig(host_memory_bytes=200_000))
    with pytest.raises(HostPoolTooSmall) as caught:
        engine.add_request(random_prompt(2000, 1), PARAMS)
    fits = int(caught.value.remedy.split("at most ")[1].split(" ")[0].replace(",", ""))
    assert fits > 100
    run(engine, [random_prompt(fits - PARAMS.max_tokens, 1)], PARAMS)


def test_more_requests_than_memory_wait_their_turn(make_engine: MakeEngine) -> None:
    offload = OffloadConfig(kv_budget=0.2, host_memory_bytes=400_000, **SMALL)
    engine = make_engine("sdar_b8", offload)
    prompts = [random_prompt(250, n) for n in range(6)]
    alone = [tokens(run(make_engine("sdar_b8", SPARSE), [p], PARAMS))[0] for p in prompts]
    assert tokens(run(engine, prompts, PARAMS)) == alone
    assert not leaks(engine)


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.1, 0.37, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("block", [4, 16, 64])
def test_set_sizes(budget: float, block: int) -> None:
    """The set grows by at most one row a position, and staging holds whatever can arrive."""
    for offload in (OffloadConfig(kv_budget=budget), OffloadConfig(kv_budget=budget, difference_only=False)):
        last = 0
        for prefix in range(0, 40 * block, block):
            size = set_size(offload, block, prefix)
            assert last <= size <= min(prefix, last + block)
            last = size
        most = staging_rows(offload, block, 0, 40 * block)
        slots, staging = ResidentSet.required_rows(offload, block, 0, 40 * block)
        assert staging == most <= slots


def test_overlap_is_real(make_engine: MakeEngine) -> None:
    """Selections run in their own thread while a step of the model runs."""
    engine = make_engine("sdar_b8", SPARSE)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.004))
    slow = SamplingParams(max_tokens=40, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
    run(engine, [random_prompt(400, 1)], slow)
    spans = engine.trace.spans()
    forwards = [(s.start, s.end) for s in spans if s.kind == "forward"]
    selections = [s for s in spans if s.kind == "selection"]
    assert len(selections) >= 3
    inside = sum(any(a < s.end and s.start < b for a, b in forwards) for s in selections)
    assert inside >= len(selections) // 2


def test_index_covers_every_layer_of_a_prompt(make_engine: MakeEngine) -> None:
    """The codes that prefill left are those of an index built from the pool at once."""
    engine = make_engine("sdar_b8", SPARSE)
    checked: list[int] = []

    def compare(live) -> None:
        store = engine.memory.store
        for request in live:
            if request.phase is not Phase.DECODE or store is None or engine.retriever is None:
                continue
            engine.retriever.drain()
            whole = request.prompt_blocks * 8 // 64
            fresh = KeyIndex(store.pool, 8)
            fresh.append_span(request.pages, 0, whole * 64)
            pages = request.pages[:whole]
            for built, expected in zip(store.index.arrays, fresh.arrays):
                assert np.array_equal(built[:, pages], expected[:, pages])
            assert (store.index.page_scales[:, pages] > 0).all()
            assert store.index.codes[:, pages].any(axis=(1, 2, 3, 4)).all()
            checked.append(whole)
            fresh.close()

    run(engine, [random_prompt(300, 5)], SamplingParams(max_tokens=10, ignore_eos=True), compare)
    assert checked and checked[0] == 4


def test_refresh_of_the_only_block(make_engine: MakeEngine) -> None:
    """A request that ends in its first block may refresh it: the staging rows are there."""
    offload = OffloadConfig(kv_budget=0.2, refresh_step=1, refresh_lag=1, **SMALL)
    engine = make_engine("sdar_b8", offload)
    params = SamplingParams(max_tokens=8, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
    (request,) = run(engine, [random_prompt(160, 3)], params)
    assert request.selected_block == request.block
    assert not leaks(engine)


def test_late_selections_land_between_refreshes(make_engine: MakeEngine) -> None:
    """With ``"proceed"`` and a refresh, a selection that missed its block's begin is still applied in it."""
    offload = OffloadConfig(kv_budget=0.2, on_late="proceed", refresh_step=1, refresh_lag=1, **SMALL)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.03))
    applied: set[int] = set()

    def watch(live: list[Request]) -> None:
        applied.update(r.selected_block for r in live)

    params = SamplingParams(max_tokens=64, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
    (request,) = run(engine, [random_prompt(160, 3)], params, watch)
    assert request.counters.late_selections > 0
    assert len(applied - {-1}) >= request.counters.blocks - 1


@pytest.mark.parametrize("kind", ["submit", "write_back"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "in its thread"])
def test_any_error_of_a_transfer_ends_its_request_only(
    make_engine: MakeEngine, kind: str, at: int, late: bool
) -> None:
    """Whatever fails, and whenever: nothing leaves `step`, nothing is kept, the engine goes on and closes."""
    engine = make_engine("sdar_b8", SPARSE, max_num_seqs=2)
    params = SamplingParams(max_tokens=24, ignore_eos=True, confidence_threshold=None, denoising_steps=3)
    prompts = [random_prompt(170, 2), random_prompt(300, 5)]
    expected = tokens(run(engine, prompts, params))
    assert engine.memory.store is not None
    transfer = engine.memory.store.transfer
    real, calls = getattr(transfer, kind), []

    def broken(*args, **options):
        calls.append(args)
        breaks = len(calls) == at + 1
        if breaks and not late:
            raise OSError("the bus is gone")
        ticket = real(*args, **options)
        if breaks:
            ticket.wait_host()
            ticket._ended.clear()
            threading.Timer(0.002, ticket.fail, [OSError("the bus is gone")]).start()
        return ticket

    setattr(transfer, kind, broken)
    requests = [engine.add_request(p, params) for p in prompts]
    while engine.has_work:
        engine.step()
    for request, wanted in zip(requests, expected, strict=True):
        assert list(request.output_ids) == wanted or isinstance(request.error, RetrievalFailed)
    assert sum(r.error is not None for r in requests) <= 1
    setattr(transfer, kind, real)
    assert tokens(run(engine, prompts, params)) == expected
    assert not leaks(engine)
    run(engine, [random_prompt(1200, 1)], params)  # the pool is made anew: no old error comes out
    engine.close()


def test_an_error_nobody_asked_for_ends_with_its_request(make_engine: MakeEngine) -> None:
    """A transfer that failed for an aborted request is no later request's error, nor that of `close`."""
    engine = make_engine("sdar_b8", SPARSE)
    fails = threading.Event()

    def hold(retriever, store) -> None:
        def broken() -> None:
            if threading.current_thread().name == "herald-transfer":
                fails.wait(10)
                raise OSError("the bus is gone")

        store.transfer.delay = broken

    engine.on_retriever = hold
    request = engine.add_request(random_prompt(300, 5), PARAMS)
    while request.selection is None or not request.selection.update.done():
        engine.step()
    ticket = request.selection.update.result().ticket
    fails.set()
    while ticket is not None and not ticket.failed:
        time.sleep(0.001)
    engine.abort(request.request_id)
    engine.step()
    assert ticket is not None and not leaks(engine)
    engine.close()


@pytest.mark.parametrize("fails", ["plan", "transfer"])
def test_rows_that_fail_on_the_way_have_arrived(fails: str, make_engine: MakeEngine) -> None:
    """Whoever waits for a selection wakes up, and meets the error when the rows are applied."""
    engine = make_engine("sdar_b8", SPARSE)
    request = engine.add_request(random_prompt(300, 3), PARAMS)
    while request.phase is not Phase.DECODE:
        engine.step()
    retriever = engine.retriever
    assert retriever is not None

    def broken(*args: object, **options: object) -> None:
        raise OSError("the bus is gone")

    owner = retriever.store.transfer if fails == "transfer" else retriever.store.selector
    setattr(owner, "submit" if fails == "transfer" else "plan_update", broken)
    while engine.has_work:
        engine.step()
    assert isinstance(request.error, RetrievalFailed)
    engine.close()
