"""The async engine and the server on a CUDA device."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress

import pytest
import torch

from herald import LLM, AsyncLLM, EngineConfig, OffloadConfig
from herald.engine.async_engine import AsyncEngine
from herald.engine.engine import Engine
from herald.engine.program import StepProgram
from herald.engine.reserve import reserve
from herald.engine.runner import LaneRunner
from herald.errors import StepFailed
from herald.models import load_model
from herald.outputs import RequestOutput
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.conftest import DENSE, GOLDEN
from tests.engine.support import leaks, random_prompt, run, tokens
from tests.engine.test_failures import PROMPTS, NoRoom, survive

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
from tests.serve.support import CONFIG, Running, raw_post, serving
from tests.serve.test_clients_that_leave import hang_up, until

pytestmark = pytest.mark.gpu

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, confidence_threshold=None, denoising_steps=8)


def make(**limits: int) -> Engine:
    model = load_model(GOLDEN / "sdar_b8", torch.device("cuda", 0), torch.float32)
    return Engine(model, Tokenizer(GOLDEN / "sdar_b8"), SPARSE, EngineConfig(**limits), seed=0, poison=True)


async def last(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    (generation,) = await engine.submit([prompt], [params])
    try:
        return await generation.last()
    finally:
        generation.close()


def test_answers_are_those_of_the_plain_loop() -> None:
    prompts = [random_prompt(length, length) for length in (5, 130, 40, 333, 70, 250)]
    plain = make()
    expected = tokens(run(plain, prompts, PARAMS))
    plain.close()
    engine = AsyncEngine(make(max_num_seqs=3, tokens_per_step=160))

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, prompt, PARAMS) for prompt in prompts))

    outputs = asyncio.run(ask())
    assert [list(output.token_ids) for output in outputs] == expected
    assert not leaks(engine.engine)
    engine.close_now()


def test_consumers_that_leave_at_random_moments_leave_nothing() -> None:
    inner = make()
    reserve(inner, 4 * 2048)
    engine = AsyncEngine(inner)
    rng = random.Random(0)
    expected = asyncio.run(last(engine, random_prompt(300, 9), PARAMS))
    memory = 0

    async def leave(number: int) -> None:
        task = asyncio.ensure_future(last(engine, random_prompt(rng.randrange(1, 500), number), LONG))
        await asyncio.sleep(rng.random() * 0.5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def all_of_them() -> RequestOutput:
        nonlocal memory
        for begin in range(0, 200, 20):
            await asyncio.gather(*(leave(begin + i) for i in range(20)))
            memory = memory or torch.cuda.memory_allocated()
        return await last(engine, random_prompt(300, 9), PARAMS)

    assert asyncio.run(all_of_them()).token_ids == expected.token_ids
    while inner.has_work:
        pass
    assert not leaks(inner) and not inner._requests
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= memory * 1.05 + 2**20
    engine.close_now()


def test_what_is_reserved_on_the_device_follows_its_memory() -> None:
    for offload in (OffloadConfig(), OffloadConfig(enabled=False)):
        model = load_model(GOLDEN / "sdar_b8", torch.device("cuda", 0), torch.float32)
        engine = Engine(model, Tokenizer(GOLDEN / "sdar_b8"), offload, EngineConfig(max_num_seqs=4), seed=0)
        reserved = reserve(engine, None)
        assert reserved >= engine.max_model_len
        store = engine.memory.store
        requests = [engine.add_request(random_prompt(50, i), PARAMS) for i in range(4)]
        engine.step()
        assert len(engine.scheduler.running) == len(requests) and engine.memory.store is store
        engine.close()


def test_the_server_on_a_device() -> None:
    def load() -> AsyncLLM:
        return AsyncLLM("tiny", "cuda", engine=EngineConfig(max_model_len=4096), reserve_tokens=None)

    with serving(CONFIG, load) as running:
        body = {"prompt": "The code is 4711. " * 100 + "Question: the code?\nAnswer:", "max_tokens": 32}
        status, whole = running.post("/v1/completions", body)
        assert status == 200
        status, text = running.post("/v1/completions", {**body, "stream": True})
        pieces = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        assert "".join(p["choices"][0]["text"] for p in pieces) == whole["choices"][0]["text"]
        _leave(running)
        running.wait_idle()
        assert "herald:rows_moved_total" in running.get("/metrics")[1]


def _leave(running: Running) -> None:
    """Clients that go away while their prompts run."""
    fields = {"max_tokens": 2000, "ignore_eos": True, "confidence_threshold": "off", "stream": True}
    connections = []
    for number in range(12):
        connection = running.connect()
        body = json.dumps({"prompt": "x" * 100 * (number + 1), **fields}).encode()
        connection.sendall(raw_post("/v1/completions", body))
        connections.append(connection)
    until(lambda: running.llm.stats().num_running >= 4)
    for connection in connections:
        hang_up(connection, rudely=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("offload", [OffloadConfig(kv_budget=0.2, min_resident_rows=64), DENSE])
def test_a_device_that_is_not_the_current_one(offload: OffloadConfig) -> None:
    """Another device is current in the threads that ask, and in those that this package starts."""
    options = {"offload": offload, "engine": EngineConfig(max_model_len=4096)}
    prompts = ["The code is 4711. " * count + "Question: the code?\nAnswer:" for count in (3, 60, 100)]
    params = SamplingParams(max_tokens=64, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
    torch.cuda.set_device(0)
    with LLM("tiny", "cuda:0", **options) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    with LLM("tiny", "cuda:1", **options) as llm:
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == expected
        assert torch.cuda.current_device() == 0
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == expected, (
            "shared pages"
        )
    with serving(CONFIG, lambda: AsyncLLM("tiny", "cuda:1", **options, reserve_tokens=None)) as running:
        for prompt, text in zip(prompts, expected, strict=True):
            body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "confidence_threshold": "off"}
            status, answer = running.post("/v1/completions", {**body, "denoising_steps": 4})
            assert status == 200 and answer["choices"][0]["text"] == text


def test_a_step_without_room_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    reserve(engine, 4 * 2048)
    for owner, name in ((LaneRunner, "program"), (StepProgram, "run")):
        with monkeypatch.context() as patch:
            assert StepFailed in survive(engine, NoRoom(patch, owner, name), PROMPTS, PARAMS)
    expected = tokens(run(engine, PROMPTS, PARAMS))
    engine.decoder.forget_programs()
    no_room = NoRoom(monkeypatch, StepProgram, "record")
    no_room.arm(1)
    request = engine.add_request(PROMPTS[1], PARAMS)
    while engine.has_work:
        engine.step()
    assert isinstance(request.error, StepFailed)
    assert tokens(run(engine, PROMPTS, PARAMS)) == expected and not leaks(engine)
    engine.close()
