"""DiffusionGemma through `LLM` and the command line: batches, streams, aborts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from herald import LLM, OffloadConfig, SamplingParams
from herald.cli.main import main
from herald.errors import InvalidOption
from herald.models.resolve import BUNDLED_FOLDER
from tests.engine.support import random_prompt
from tests.support.golden import GOLDEN

OFFLOAD = OffloadConfig(kv_budget=0.3, min_resident_rows=24, recent_rows=8, sink_rows=2)
PARAMS = SamplingParams(max_tokens=20, denoising_steps=4, seed=3, ignore_eos=True)
PROMPTS = [random_prompt(length, length, 250) for length in (50, 130, 7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoint, with the tokenizer of the bundled model."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "diffusion_gemma" / name, tmp_path / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_FOLDER / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", offload=OFFLOAD) as model:
        yield model


def test_batches_and_streams_agree(llm: LLM) -> None:
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    assert all(output.metrics.blocks == 3 and output.metrics.resident_bytes > 0 for output in outputs)
    seen: dict[str, list[tuple[int, ...]]] = {}
    for output in llm.stream(prompt_token_ids=PROMPTS, sampling_params=PARAMS):
        seen.setdefault(output.request_id, []).append(output.token_ids)
    assert [parts[-1] for parts in seen.values()] == [output.token_ids for output in outputs]
    assert [len(part) for part in next(iter(seen.values()))] == [8, 16, 20]
    other = llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=replace(PARAMS, seed=4))
    assert other[0].token_ids != outputs[0].token_ids


def test_an_aborted_stream_leaves_the_others(llm: LLM) -> None:
    (alone,) = llm.generate(prompt_token_ids=PROMPTS[1:2], sampling_params=PARAMS)
    found = {}
    for output in llm.stream(prompt_token_ids=PROMPTS[:2], sampling_params=PARAMS):
        found[output.request_id] = output
        if len(found) == 1:
            llm.abort(output.request_id)
    reasons = sorted(output.finish_reason or "" for output in found.values())
    assert reasons == ["abort", "length"]
    last = next(output for output in found.values() if output.finish_reason == "length")
    assert last.prompt_token_ids != tuple(PROMPTS[1]) or last.token_ids == alone.token_ids
    assert llm.engine.memory.windows is not None and not llm.engine.has_work


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--model", str(folder), "--device", "cpu", "--prompt", "what is this?", "--quiet"]
    options = ["--max-tokens", "16", "--steps", "3", "--entropy-bound", "2.5", "--stop-entropy", "0"]
    assert main([*common, *options, "--seed", "1", "--ignore-eos", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with LLM(folder, device="cpu") as model:
        params = SamplingParams(
            max_tokens=16, denoising_steps=3, entropy_bound=2.5, stop_entropy=0.0, seed=1, ignore_eos=True
        )
        (expected,) = model.generate("what is this?", params)
    assert tuple(found["token_ids"]) == expected.token_ids and found["metrics"]["steps"] == 6
    assert main([*common, *options, "--stream"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--threshold", "0.5"], "--threshold=0.5"),
        (["--editing-threshold", "0.5"], "--editing-threshold=0.5"),
        (["--mask-token-id", "5"], "--mask-token-id=5"),
        (["--entropy-bound", "0"], "--entropy-bound=0.0"),
    ],
)
def test_options_without_a_meaning_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    argv = ["generate", "--model", str(folder), "--device", "cpu", "--prompt", "q", "--quiet", *options]
    assert main(argv) == 2
    assert named in capsys.readouterr().err


def test_no_prefix_is_shared_or_saved(llm: LLM, tmp_path: Path) -> None:
    """Rows of layers with a window are not in the pool: a second request computes its prompt itself."""
    for _ in range(2):
        (output,) = llm.generate(prompt_token_ids=PROMPTS[1:2], sampling_params=PARAMS)
        assert output.metrics.cached_tokens == 0
    with pytest.raises(InvalidOption, match="layers with a window"):
        llm.save_prefix(PROMPTS[1], tmp_path / "prefix")
