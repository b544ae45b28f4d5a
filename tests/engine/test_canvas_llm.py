"""Families with full attention through `LLM` and the command line: the same surface as for the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from herald import LLM, OffloadConfig, SamplingParams
from herald.cli.main import main
from herald.errors import InvalidOption
from herald.outputs import Progress
from tests.engine.support import random_prompt
from tests.support.golden import GOLDEN

PARAMS = SamplingParams(max_tokens=24, block_length=8, cache="dual")
OFFLOAD = OffloadConfig(kv_budget=0.3, min_resident_rows=24, recent_rows=8, sink_rows=2)
PROMPTS = [random_prompt(length, length) for length in (50, 130, 7)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(GOLDEN / "llada", device="cpu", offload=OFFLOAD, seed=0) as model:
        yield model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of LLaDA with the byte-level tokenizer of the bundled model."""
    path = tmp_path_factory.mktemp("llada")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llada" / name, path)
    tiny = Path(__file__).parents[2] / "herald" / "models" / "tiny_weights"
    for file in tiny.glob("tokenizer*.json"):
        shutil.copy(file, path)
    return path


def test_generate_answers_in_order(llm: LLM) -> None:
    together = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    alone = [llm.generate(prompt_token_ids=[prompt], sampling_params=PARAMS)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    for output, prompt in zip(together, PROMPTS, strict=True):
        metrics = output.metrics
        assert output.prompt_token_ids == tuple(prompt) and output.finish_reason == "length"
        assert (metrics.blocks, metrics.steps, metrics.forwards) == (3, 24, 24)
        assert metrics.prefill_seconds > 0 and metrics.decode_seconds > 0 and metrics.resident_bytes > 0
        assert metrics.first_block_seconds > 0


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_stream_yields_finished_blocks(llm: LLM, cache: str) -> None:
    params = SamplingParams(max_tokens=20, block_length=8, cache=cache)  # type: ignore[arg-type]
    (whole,) = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    states = list(llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=params))
    assert [len(state.token_ids) for state in states] == [8, 16, 20]
    assert [state.finished for state in states] == [False, False, True]
    for state in states:
        assert state.token_ids == whole.token_ids[: len(state.token_ids)]


def test_abort_while_others_go_on(llm: LLM) -> None:
    (expected,) = llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS)
    dropped = llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=PARAMS)
    first = next(dropped)
    assert llm.abort(first.request_id)
    (found,) = llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS)
    assert found.token_ids == expected.token_ids
    last = list(dropped)[-1]
    assert last.finished and last.finish_reason == "abort" and not llm.abort(first.request_id)
    assert not llm.engine.has_work and llm.engine.memory.arena.idle


def test_progress_never_falls_back(llm: LLM) -> None:
    events: list[Progress] = []
    llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS, progress=events.append)
    prefill = [event.done for event in events if event.phase == "prefill"]
    decode = [event.done for event in events if event.phase == "decode"]
    assert prefill == sorted(prefill) and prefill[-1] == events[0].total == 130 * 2
    assert decode == [8, 16, 24]


def test_an_error_in_a_callback_is_the_callers(llm: LLM) -> None:
    def broken(event: Progress) -> None:
        raise KeyError(event.phase)

    with pytest.raises(KeyError, match="prefill"):
        llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS, progress=broken)
    assert not llm.engine.has_work and llm.engine.memory.arena.idle
    assert len(llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=PARAMS)[0].token_ids) == 24


def test_stop_strings_cut_the_text(folder: Path) -> None:
    with LLM(folder, device="cpu", offload=OFFLOAD) as llm:
        params = SamplingParams(max_tokens=24, block_length=8)
        (whole,) = llm.generate("What is this?", params)
        text = whole.outputs[0].text
        stop = text[2]
        (cut,) = llm.generate("What is this?", SamplingParams(max_tokens=24, block_length=8, stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)] and cut.finish_reason == "stop"


def test_options_of_a_look_ahead_are_refused_when_the_model_is_made() -> None:
    with pytest.raises(InvalidOption, match="lookahead='late'"):
        LLM(GOLDEN / "dream", device="cpu", offload=OffloadConfig(lookahead="late"))


def test_block_length_of_the_model_is_kept(folder: Path) -> None:
    dream = {"device": "cpu", "offload": OffloadConfig(enabled=False)}
    with LLM(GOLDEN / "dream", **dream) as llm:  # type: ignore[arg-type]
        (whole,) = llm.generate(prompt_token_ids=PROMPTS[2], sampling_params=SamplingParams(max_tokens=16))
        (cached,) = llm.generate(
            prompt_token_ids=PROMPTS[2], sampling_params=SamplingParams(max_tokens=40, cache="dual")
        )
    assert (whole.metrics.blocks, cached.metrics.blocks) == (1, 2)
    with LLM(GOLDEN / "dream", block_length=8, **dream) as llm:  # type: ignore[arg-type]
        (blocks,) = llm.generate(prompt_token_ids=PROMPTS[2], sampling_params=SamplingParams(max_tokens=16))
    assert blocks.metrics.blocks == 2


def generate(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> tuple[int, str, str]:
    try:
        code = main(["generate", "--model", str(folder), "--device", "cpu", "--max-tokens", "16", *options])
    except SystemExit as exit_info:
        code = int(exit_info.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--block-length", "8", "--prompt", "What is this?", "--prompt", "And what is that?"]
    texts = {}
    for cache in ("none", "prefix", "dual"):
        code, out, _ = generate(capsys, folder, *asked, "--cache", cache, "--json")
        objects = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [len(each["token_ids"]) for each in objects] == [16, 16]
        assert all(each["metrics"]["blocks"] == 2 for each in objects)
        texts[cache] = [each["text"] for each in objects]
        code, out, err = generate(capsys, folder, *asked, "--cache", cache, "--stream")
        assert code == 0 and out == "".join(f"{text}\n" for text in texts[cache])
        assert "steps per block" in err
    assert len(set(map(tuple, texts.values()))) == 3
    code, out, _ = generate(capsys, folder, *asked, "--json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == texts["none"]
    code, out, _ = generate(capsys, folder, *asked, "--confidence-factor", "4", "--json")
    steps = [json.loads(line)["metrics"]["steps"] for line in out.splitlines()]
    assert code == 0 and max(steps) < 16


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--algorithm", "entropy"], "--algorithm=entropy"),
        (["--lookahead", "late"], "--lookahead=late"),
        (["--editing-threshold", "0.5"], "--editing-threshold=0.5"),
        (["--confidence-factor", "0"], "--confidence-factor=0"),
        (["--confidence-factor", "1", "--threshold", "0.9"], "--confidence-factor=1.0"),
        (["--max-tokens", "5000"], "--max-tokens"),
    ],
)
def test_command_line_refuses_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    code, out, err = generate(capsys, folder, "--prompt", "Hello", *options)
    assert code == 2 and not out and named in err


def test_profile(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--tokens", "200", "--new-tokens", "16", "--block-length", "8", "--cache", "dual"]
    assert (
        main(["profile", "--model", str(folder), "--device", "cpu", *workload, "--out", str(tmp_path)]) == 0
    )
    summary = json.loads((tmp_path / "summary.json").read_text())["summary"]
    assert [block["steps"] for block in summary["blocks"]] == [8, 8]
    assert summary["forwards"] == 15  # all but the first full forward, which counts as prefill
    assert "compute busy" in capsys.readouterr().out
