"""`AsyncEngine` and `AsyncLLM`: many consumers, one thread, nothing left behind."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from itertools import pairwise
from typing import Any

import pytest

from herald import LLM, AsyncLLM, EngineConfig, OffloadConfig, SamplingParams
from herald.engine.async_engine import AsyncEngine
from herald.engine.engine import Engine
from herald.engine.request import Request
from herald.engine.reserve import reserve
from herald.errors import EngineStopped, InvalidOption, PromptTooLong, QueueFull
from herald.outputs import RequestOutput
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import leaks, random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, confidence_threshold=None, denoising_steps=8)

Started = Callable[..., AsyncEngine]


@pytest.fixture
def start(make_engine: MakeEngine) -> Iterator[Started]:
    """``start(engine, ...)``: an async engine that is closed after the test."""
    made: list[AsyncEngine] = []

    def begin(engine: Engine | None = None, **options: Any) -> AsyncEngine:
        made.append(AsyncEngine(engine or make_engine("sdar_b8", SPARSE), **options))
        return made[-1]

    yield begin
    for each in made:
        each.close_now()


def together(*tasks: Coroutine[Any, Any, Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*tasks)

    return asyncio.run(asyncio.wait_for(gather(), 60))


async def last(engine: AsyncEngine, prompt: Any, params: SamplingParams = PARAMS) -> RequestOutput:
    async for output in engine.generate(prompt, params):
        if output.finished:
            return output
    raise AssertionError("the iterator ended before the request")


async def settled(engine: AsyncEngine, seconds: float = 60.0) -> None:
    """Wait until the engine has nothing to do."""
    deadline = time.monotonic() + seconds
    while engine.engine.has_work or engine.stats().num_waiting:
        assert time.monotonic() < deadline, engine.describe()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_answers_are_those_of_the_plain_loop(
    make_engine: MakeEngine, start: Started, offload: OffloadConfig
) -> None:
    prompts = [random_prompt(length, length) for length in (5, 130, 40, 8, 333, 70, 16, 90, 25, 250)]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True, temperature=float(i % 2), seed=i)
        for i in range(len(prompts))
    ]
    expected = tokens(run(make_engine("sdar_b8", offload), prompts, params))
    engine = start(make_engine("sdar_b8", offload, max_num_seqs=3))
    outputs = together(*(last(engine, p, q) for p, q in zip(prompts, params)))
    assert [list(o.token_ids) for o in outputs] == expected
    assert [o.prompt_token_ids for o in outputs] == [tuple(p) for p in prompts]
    assert all(o.metrics.output_tokens == len(o.token_ids) for o in outputs)
    assert not leaks(engine.engine)


def test_outputs_grow_block_by_block(start: Started) -> None:
    async def watch() -> list[RequestOutput]:
        return [output async for output in start().generate(random_prompt(20, 1), PARAMS)]

    outputs = asyncio.run(watch())
    assert len(outputs) > 2
    for before, after in pairwise(outputs):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].finish_reason == "length"


def test_the_text_is_that_of_llm() -> None:
    prompt = "Two words: alpha and"
    many = [SamplingParams(max_tokens=48, stop=stop, ignore_eos=True) for stop in ((), ("e", "\n"))]
    with LLM("tiny", device="cpu") as llm:
        expected = [output.outputs[0].text for output in llm.generate([prompt] * 2, many)]

    async def texts() -> list[list[str]]:
        async with AsyncLLM("tiny", device="cpu") as llm:
            return [[o.outputs[0].text async for o in llm.generate(prompt, params)] for params in many]

    found = asyncio.run(texts())
    assert [each[-1] for each in found] == expected and all(expected)
    for each in found:
        assert all(after.startswith(before) for before, after in pairwise(each))


def test_what_cannot_run_is_refused_before_it_queues(start: Started) -> None:
    engine = start()
    limit = engine.engine.max_model_len

    async def refused(prompt: Any, params: SamplingParams, kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match):
            await last(engine, prompt, params)

    def broken(tokenizer: object) -> list[int]:
        raise InvalidOption("the template refuses", "write it anew")

    together(
        refused([1] * limit, PARAMS, PromptTooLong, f"limit of {limit:,} positions"),
        refused([], PARAMS, InvalidOption, "no tokens"),
        refused([10**9], PARAMS, InvalidOption, "vocabulary"),
        refused("text", PARAMS, InvalidOption, "no tokenizer"),
        refused(broken, PARAMS, InvalidOption, "template"),
        refused([1], SamplingParams(stop="x"), InvalidOption, "tokenizer"),
    )
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_a_full_queue_is_refused_with_a_time_to_wait(make_engine: MakeEngine, start: Started) -> None:
    engine = start(make_engine("sdar_b8", SPARSE, max_num_seqs=2), max_waiting=1)

    async def fill() -> None:
        generations = await engine.submit([[1, 2]] * 3, [LONG] * 3)
        with pytest.raises(QueueFull, match="3 requests wait or run, of 3 that may") as caught:
            await engine.submit([[1]], [PARAMS])
        assert 1 <= caught.value.retry_after <= 60
        generations[0].close()
        deadline = time.monotonic() + 60
        while True:
            try:
                (again,) = await engine.submit([[1]], [PARAMS])
                break
            except QueueFull:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        for generation in (*generations, again):
            generation.close()
        await settled(engine)

    asyncio.run(fill())
    assert not leaks(engine.engine)


def test_all_prompts_of_a_call_or_none(make_engine: MakeEngine, start: Started) -> None:
    engine = start(make_engine("sdar_b8", SPARSE, max_num_seqs=2), max_waiting=1)

    async def call() -> None:
        with pytest.raises(QueueFull):
            await engine.submit([[1]] * 4, [PARAMS] * 4)
        with pytest.raises(InvalidOption):
            await engine.submit([[1], []], [PARAMS] * 2)
        assert len(await engine.submit([[1]] * 3, [PARAMS] * 3)) == 3

    asyncio.run(call())


def test_abort_ends_a_request_in_every_phase(start: Started) -> None:
    engine = start()

    async def aborted(request_id: str, seconds: float) -> RequestOutput:
        (generation,) = await engine.submit([random_prompt(1500, 1)], [LONG], request_id)
        await asyncio.sleep(seconds)
        assert engine.abort(request_id)
        return await generation.last()

    outputs = together(*(aborted(f"r{i}", 0.01 * i) for i in range(12)))
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert not engine.abort("r0") and not engine.abort("nobody")
    assert not leaks(engine.engine)


def test_an_id_may_be_used_again_at_once(start: Started) -> None:
    engine = start()

    async def again() -> None:
        for _ in range(60):
            (generation,) = await engine.submit([[1, 2, 3]], [LONG], "same")
            with pytest.raises(InvalidOption, match="in use"):
                await engine.submit([[1, 2, 3]], [LONG], "same")
            generation.close()
        output = await last(engine, [1, 2, 3])
        assert output.finished

    asyncio.run(again())


def test_an_id_in_use_is_refused_while_prompts_are_encoded(start: Started) -> None:
    """Of two that come together one is refused, and the engine goes on."""
    engine = start()

    async def both() -> None:
        first, second = await asyncio.gather(
            engine.submit([[1, 2, 3], [4, 5]], [PARAMS] * 2, "same"),
            engine.submit([[6]], [PARAMS], "same-1"),
            return_exceptions=True,
        )
        assert isinstance(first, list) and isinstance(second, InvalidOption)
        for generation in first:
            generation.close()
        with pytest.raises(InvalidOption):
            await engine.submit([[10**9]], [PARAMS], "wrong")
        (again,) = await engine.submit([[1, 2, 3]], [PARAMS], "wrong")
        again.close()
        assert (await last(engine, [1, 2, 3])).finished and engine.health().alive

    asyncio.run(both())


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_consumers_that_leave_at_random_moments_leave_nothing(start: Started, count: int) -> None:
    engine = start(max_waiting=count)
    rng = random.Random(count)
    expected = asyncio.run(last(engine, random_prompt(300, 9)))
    threads = 0

    async def leave(number: int) -> None:
        prompt = random_prompt(rng.randrange(1, 700), number)
        task = asyncio.ensure_future(last(engine, prompt, LONG))
        await asyncio.sleep(rng.random() * 0.4)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def all_of_them() -> RequestOutput:
        nonlocal threads
        for begin in range(0, count, 50):
            await asyncio.gather(*(leave(begin + i) for i in range(50)))
            threads = threads or threading.active_count()  # pools have started all of theirs
        output = await last(engine, random_prompt(300, 9))
        await settled(engine)
        return output

    output = asyncio.run(all_of_them())
    assert output.token_ids == expected.token_ids
    assert not leaks(engine.engine) and not engine._open and not engine.engine._requests
    tables = engine.engine.decoder._tables.values()
    assert all(len(table._free) == engine.engine.config.max_num_seqs for table in tables)
    assert threading.active_count() <= threads


def test_a_consumer_that_goes_away_frees_its_lane_before_the_next_step(
    start: Started, make_engine: MakeEngine
) -> None:
    plain = make_engine("sdar_b8", SPARSE)
    reserve(plain, 4096)
    engine = start(plain)

    async def leave() -> None:
        (generation,) = await engine.submit([random_prompt(100, 1)], [LONG])
        await anext(generation)
        (other,) = await engine.submit([random_prompt(30, 2)], [LONG])
        await anext(other)
        generation.close()
        steps = engine.stats().steps
        while generation.request in engine.engine.scheduler.running:
            await asyncio.sleep(0.001)
        assert engine.stats().steps <= steps + 2, "the step under way, and the one that ends it"
        other.close()

    asyncio.run(leave())


def test_what_is_given_up_before_the_engine_takes_it_in_is_nobodys(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client leaves, and comes back with the same id, within one step."""
    engine = start()
    go, step = threading.Event(), engine.engine.step

    def held(*arguments: Any) -> list[Request]:
        go.wait(30)
        return step(*arguments)

    monkeypatch.setattr(engine.engine, "step", held)

    async def again() -> None:
        (running,) = await engine.submit([[1, 2]], [PARAMS])
        while not engine.engine.has_work:
            await asyncio.sleep(0.001)
        for _ in range(3):
            (given_up,) = await engine.submit([[1, 2, 3]], [LONG], "same")
            given_up.close()
        (aborted,) = await engine.submit([[1, 2, 3]], [LONG], "other")
        assert engine.abort("other")
        (kept,) = await engine.submit([[1, 2, 3]], [PARAMS], "same")
        go.set()
        assert (await kept.last()).finish_reason == (await running.last()).finish_reason == "length"
        assert (await aborted.last()).finish_reason == "abort"

    asyncio.run(asyncio.wait_for(again(), 60))
    assert engine.health().alive and not leaks(engine.engine)


def test_a_long_prompt_does_not_hold_the_loop_up(start: Started, make_engine: MakeEngine) -> None:
    engine = start(make_engine("sdar_b8", SPARSE))

    def slow_ids(tokenizer: object) -> list[int]:
        time.sleep(0.3)
        return [1, 2, 3]

    async def both() -> None:
        slow = asyncio.ensure_future(last(engine, slow_ids))
        start_time = time.perf_counter()
        await last(engine, [1, 2, 3])
        assert not slow.done() or time.perf_counter() - start_time < 0.3
        await slow

    asyncio.run(both())


def test_a_failed_step_ends_everything_with_its_reason(
    start: Started, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(make_engine("sdar_b8", DENSE))

    def fail(progress: object = None) -> list[Request]:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.engine, "step", fail)

    async def ask() -> None:
        with pytest.raises(EngineStopped, match="the device is lost"):
            await last(engine, [1, 2])
        with pytest.raises(EngineStopped, match="the device is lost"):
            await last(engine, [1, 2])

    asyncio.run(ask())
    health = engine.health()
    assert not health.alive and isinstance(health.error, RuntimeError)


def test_an_error_of_one_request_is_its_own(
    start: Started, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from herald.errors import HeraldError

    plain = make_engine("sdar_b8", DENSE)
    expected = tokens(run(make_engine("sdar_b8", DENSE), [[5] * 9], PARAMS))[0]
    start_prefill = Engine._start_prefill

    def fail(self: Engine, request: Request) -> None:
        if request.prompt_ids == [7]:
            raise MemoryError("no room")
        start_prefill(self, request)

    monkeypatch.setattr(Engine, "_start_prefill", fail)
    engine = start(plain)

    async def broken() -> None:
        with pytest.raises(HeraldError, match="no room"):
            await last(engine, [7])

    async def whole() -> None:
        assert list((await last(engine, [5] * 9)).token_ids) == expected

    together(broken(), whole(), broken())
    assert engine.health().alive and not leaks(engine.engine)


def test_close_ends_what_runs_with_a_typed_error(make_engine: MakeEngine) -> None:
    before = threading.active_count()
    engine = AsyncEngine(make_engine("sdar_b8", SPARSE))

    async def closing() -> None:
        task = asyncio.ensure_future(last(engine, random_prompt(50, 1), LONG))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineStopped, match="closed"):
            await task
        with pytest.raises(EngineStopped, match="closed"):
            await last(engine, [1])
        await engine.close()

    asyncio.run(closing())
    assert threading.active_count() <= before


def test_refuse_lets_what_runs_go_on(start: Started) -> None:
    engine = start()

    async def drain() -> None:
        task = asyncio.ensure_future(last(engine, random_prompt(50, 1)))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        engine.refuse(EngineStopped("shutting down", "ask another server"))
        with pytest.raises(EngineStopped, match="shutting down"):
            await last(engine, [1])
        assert (await task).finish_reason == "length"

    asyncio.run(drain())


def test_two_event_loops_share_an_engine(start: Started) -> None:
    engine = start()
    found: list[tuple[int, ...]] = []

    def ask() -> None:
        found.append(asyncio.run(last(engine, random_prompt(60, 3))).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]


def test_async_llm_has_the_options_of_llm() -> None:
    of_llm = inspect.signature(LLM).parameters
    assert list(inspect.signature(AsyncLLM).parameters)[: len(of_llm)] == list(of_llm)

    async def use() -> None:
        options: dict[str, Any] = {
            "device": "cpu",
            "offload": SPARSE,
            "engine": EngineConfig(max_model_len=512),
        }
        async with AsyncLLM("tiny", seed=1, reserve_tokens=600, max_waiting=3, **options) as llm:
            assert llm.max_model_len == 512 and llm.stats().host_pool_bytes > 0
            pool = llm.llm.engine.memory.store
            async with aclosing(llm.generate("Hello", SamplingParams(max_tokens=16))) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    assert output.prompt == "Hello"
            assert llm.llm.engine.memory.store is pool, "what was reserved is used"
            assert llm.health().alive and not llm.abort("nobody")
        with pytest.raises(EngineStopped):
            await anext(llm.generate("Hello"))  # type: ignore[arg-type]

    asyncio.run(use())
    with pytest.raises(InvalidOption, match="reserve_tokens"):
        AsyncLLM("tiny", device="cpu", reserve_tokens=-1)
    with pytest.raises(InvalidOption, match="max_waiting"):
        AsyncLLM("tiny", device="cpu", max_waiting=-1)
