"""`LLM` under misuse: wrong arguments, shared use, errors in callbacks, dropped iterators, its end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from herald import LLM, EngineConfig, OffloadConfig, SamplingParams
from herald.errors import InvalidOption, PromptTooLong, UsageError
from herald.outputs import Progress
from tests.engine.support import random_prompt
from tests.support.golden import GOLDEN

FOLDER = GOLDEN / "sdar_b8"
OFFLOAD = OffloadConfig(kv_budget=0.3, min_resident_rows=24, recent_rows=8, sink_rows=2)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=72, ignore_eos=True)
PROMPTS = [random_prompt(length, length) for length in (50, 130, 7)]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(FOLDER, device="cpu", offload=OFFLOAD) as model:
        yield model


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens of `PROMPTS`, decoded one by one."""
    with LLM(FOLDER, device="cpu", offload=OFFLOAD, engine=EngineConfig(max_num_seqs=1)) as model:
        outputs = model.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
        return [output.token_ids for output in outputs]


def assert_idle(llm: LLM) -> None:
    """No request is known, every arena row is free, and every page that nobody may share."""
    engine = llm.engine
    assert not engine.has_work
    if engine.retriever is not None:
        engine.retriever.drain()
    if engine.memory.store is not None:
        allocator = engine.memory.store.pool.allocator
        assert allocator.num_free + len(engine.memory.prefixes) == allocator.num_pages
    assert engine.memory.arena.idle


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1, 2]),
        np.array([[1, 2]]),
        [np.array([1, 2])],
        [np.int64(1), np.int32(2)],
        torch.tensor([1, 2]),
        list(torch.tensor([1, 2])),
        (1, 2),
        range(1, 3),
        (each for each in (1, 2)),
        [(1, 2)],
    ],
)
def test_ids_come_in_any_sequence(llm: LLM, ids: Any) -> None:
    (output,) = llm.generate(prompt_token_ids=ids, sampling_params=SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == (1, 2) and all(type(each) is int for each in output.prompt_token_ids)


@pytest.mark.parametrize(
    "ids",
    ["abc", b"abc", 5, {"a": 1}, [1.5], [[1.5]], [True], [None], ["a"], [1, [2]], [[2], 1], [[[1]]],
     np.array([1.5]), [[]], [[1], []], [-1], [[10**30]]],
)  # fmt: skip
def test_other_ids_are_refused(llm: LLM, ids: Any) -> None:
    with pytest.raises(InvalidOption):
        llm.generate(prompt_token_ids=ids, sampling_params=PARAMS)
    assert_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompts": "a", "prompt_token_ids": [1]},
        {"prompts": "no tokenizer"},
        {"prompts": 5},
        {"prompt_token_ids": [1], "sampling_params": {"max_tokens": 3}},
        {"prompt_token_ids": [1], "sampling_params": 5},
        {"prompt_token_ids": [1], "sampling_params": [None]},
        {"prompt_token_ids": [1], "sampling_params": [PARAMS, PARAMS]},
        {"prompt_token_ids": [1], "sampling_params": SamplingParams(stop="x")},
        {"prompt_token_ids": [1], "progress": 5},
    ],
)
def test_wrong_arguments_are_typed_errors(llm: LLM, options: dict[str, Any]) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidOption) as caught:
            call(**options)
        assert caught.value.remedy
    assert_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": False},
        {"offload": {"kv_budget": 1.0}},
        {"offload": OffloadConfig(transfer="zero_copy")},
        {"engine": {}},
        {"device": None},
        {"device": "gpu"},
        {"dtype": ["float32"]},
        {"dtype": torch.float32},
        {"seed": -1},
        {"seed": "x"},
        {"block_length": None},
        {"mask_token_id": 1.5},
        {"model": None},
    ],
)
def test_wrong_options_of_a_model_are_typed_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(**{"model": FOLDER, "device": "cpu"} | options)
    assert caught.value.remedy


def test_an_unknown_choice_of_kernels_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERALD_KERNELS", "bogus")
    with pytest.raises(InvalidOption, match="HERALD_KERNELS='bogus'"):
        LLM(FOLDER, device="cpu")


def test_nothing_to_do_gives_nothing(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.generate(prompt_token_ids=[]) == []
    assert list(llm.stream(prompt_token_ids=[])) == []


def test_one_bad_prompt_leaves_none_behind(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(prompt_token_ids=[[1], [1] * 100_000], sampling_params=PARAMS)
    assert_idle(llm)


def test_an_iterator_nobody_asks_leaves_none_behind(llm: LLM) -> None:
    outputs = llm.stream(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    assert llm.engine.has_work
    del outputs
    gc.collect()
    assert_idle(llm)


def test_streams_and_generate_share_a_model(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    one = llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=PARAMS)
    two = llm.stream(prompt_token_ids=PROMPTS[1:], sampling_params=PARAMS)
    seen = [next(one), next(two)]
    # Long enough to bring both streams to their end.
    llm.generate(prompt_token_ids=[1], sampling_params=LONG)
    seen += [*one, *two]
    last = {output.prompt_token_ids: output for output in seen if output.finished}
    assert [last[tuple(prompt)].token_ids for prompt in PROMPTS] == expected
    assert sum(output.finished for output in seen) == 3
    assert_idle(llm)


def test_threads_share_a_model(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    found: list[object] = []

    def work() -> None:
        try:
            for _ in range(3):
                outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
                found.append([output.token_ids for output in outputs])
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [expected] * 9
    assert_idle(llm)


def test_progress_is_of_the_callers_requests_only(llm: LLM) -> None:
    stream = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=LONG)
    other = next(stream).request_id
    events: list[Progress] = []
    llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=PARAMS, progress=events.append)
    assert events and other not in {event.request_id for event in events}
    assert [output.finished for output in stream][-1]


def test_an_error_in_a_callback_ends_its_requests_only(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    class Stop(Exception):
        pass

    def stop_after(count: int) -> Callable[[Progress], None]:
        left = iter(range(count))

        def call(event: Progress) -> None:
            if next(left, None) is None:
                raise Stop

        return call

    for count in range(0, 16, 3):
        stream = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS)
        next(stream)
        with pytest.raises(Stop):
            llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=LONG, progress=stop_after(count))
        assert list(stream)[-1].token_ids == expected[1]
        assert_idle(llm)


@pytest.mark.parametrize("action", ["generate", "stream", "close"])
def test_a_callback_cannot_use_its_model(llm: LLM, action: str) -> None:
    def call(event: Progress) -> None:
        if action == "close":
            llm.close()
        else:
            getattr(llm, action)(prompt_token_ids=[1])

    with pytest.raises(UsageError, match="a progress callback cannot"):
        llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=PARAMS, progress=call)
    assert_idle(llm)


def test_a_callback_may_abort_and_drop_iterators(llm: LLM) -> None:
    streams = [llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=LONG)]

    def call(event: Progress) -> None:
        streams.clear()
        gc.collect()
        assert llm.abort(event.request_id)

    (output,) = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=LONG, progress=call)
    assert output.finish_reason == "abort"
    llm.generate(prompt_token_ids=[1], sampling_params=PARAMS)
    assert_idle(llm)


def test_abort_from_another_thread(llm: LLM) -> None:
    started = threading.Event()
    ids: set[str] = set()

    def note(event: Progress) -> None:
        ids.add(event.request_id)
        started.set()

    def end() -> None:
        started.wait(60)
        for request_id in list(ids):
            llm.abort(request_id)

    thread = threading.Thread(target=end)
    thread.start()
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    (output,) = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params, progress=note)
    thread.join(60)
    assert output.finish_reason == "abort" and output.finished
    assert not llm.abort(output.request_id)
    assert_idle(llm)


def test_a_closed_model_is_of_no_use() -> None:
    threads = set(threading.enumerate())
    llm = LLM(FOLDER, device="cpu", offload=OFFLOAD)
    stream = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=LONG)
    next(stream)
    llm.close()
    llm.close()
    assert [(output.finished, output.finish_reason) for output in stream] == [(True, "abort")]
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match="closed"):
            call(prompt_token_ids=[1])
    assert not llm.abort("request-0")
    left = [t for t in set(threading.enumerate()) - threads if t.name.startswith("herald")]
    assert not left


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no config"):
        LLM(tmp_path)
