from __future__ import annotations

import argparse

import pytest

from herald.cli.fields import (
    engine_config,
    in_options,
    offload_config,
    problem_in_options,
    sampling_params,
)
from herald.cli.main import build_parser
from herald.cli.options import device, size, threshold
from herald.config import EngineConfig, OffloadConfig
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams


def parse(*options: str) -> argparse.Namespace:
    return build_parser().parse_args(["generate", *options])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GiB", 16 << 30),
        ("16gib", 16 << 30),
        ("16 GB", 16 * 10**9),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("100", 100),
        ("7B", 7),
    ],
)
def test_size(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "16G", "GiB", "-1GiB", "1e9", "16 QiB", "nan"])
def test_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write it as 16GiB"):
        size(text)


def test_threshold() -> None:
    assert threshold("off") is None
    assert threshold("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="or off"):
        threshold("none")


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:3"])
def test_device(text: str) -> None:
    assert device(text) == text


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_device_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="use auto, cpu, cuda or cuda:N"):
        device(text)


def test_what_is_not_given_keeps_the_defaults_of_the_dataclasses() -> None:
    args = parse("--prompt", "x")
    assert sampling_params(args) == SamplingParams()
    assert offload_config(args) == OffloadConfig()
    assert engine_config(args) == EngineConfig()


def test_what_is_given_reaches_its_field() -> None:
    args = parse(
        *("--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "11"),
        *("--stop", "a", "--stop", "b", "--threshold", "0.8", "--steps", "4", "--ignore-eos"),
        *("--no-offload", "--kv-budget", "0.1", "--index-bits", "4", "--lookahead-step", "2"),
        *("--lookahead", "late"),
        *("--on-late", "proceed", "--host-memory", "2GiB", "--transfer", "staged", "--num-threads", "3"),
        *("--index-device-memory", "8GiB"),
        *("--max-model-len", "4096", "--max-num-seqs", "2"),
    )
    assert sampling_params(args) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=11,
        stop=("a", "b"),
        confidence_threshold=0.8,
        denoising_steps=4,
        ignore_eos=True,
    )
    assert offload_config(args) == OffloadConfig(
        enabled=False,
        kv_budget=0.1,
        index_bits=4,
        lookahead="late",
        lookahead_step=2,
        on_late="proceed",
        host_memory_bytes=2 << 30,
        transfer="staged",
        num_threads=3,
        index_device_bytes=8 << 30,
    )
    assert engine_config(args) == EngineConfig(max_model_len=4096, max_num_seqs=2)


def test_threshold_off_is_passed_on() -> None:
    assert sampling_params(parse("--threshold", "off")).confidence_threshold is None


def test_a_value_out_of_range_names_the_option() -> None:
    with pytest.raises(InvalidOption, match=r"^--kv-budget=1\.5 is not valid"):
        offload_config(parse("--kv-budget", "1.5"))
    for more in (("--index-bits", "16"), ("--no-scan-on-device",)):
        with pytest.raises(
            InvalidOption, match=r"^--index-device-memory=1024 is not valid; use 0, or scan_on"
        ):
            offload_config(parse("--index-device-memory", "1KiB", *more))
        assert not offload_config(parse("--index-device-memory", "0", *more)).index_device_bytes
    with pytest.raises(InvalidOption, match=r"^--steps=-1 is not valid"):
        sampling_params(parse("--steps", "-1"))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--max-tokens", text) for text in ("9" * 5000, "1.5", "x", "")),
        *(("--kv-budget", text) for text in ("x" * 5000, "", "1,5")),
        *(("--host-memory", text) for text in ("9" * 400, "9" * 5000, "8388608TiB")),
        *(("--seed", text) for text in ("9" * 5000, "-1")),
        *(("--threshold", text) for text in ("nan", "1.5", "-1", "x" * 5000)),
        ("--device", "x" * 5000),
    ],
)
def test_what_no_option_takes_is_one_short_line(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(option, text)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"herald: error: argument {option}: ")
    assert error.count("\n") == 1 and len(error) < 250


@pytest.mark.parametrize("text", ["-1", "99999999999999999999", "x"])
def test_a_seed_no_generator_takes_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(f"--seed={text}")
    assert exit_info.value.code == 2
    assert "use 0 to 9223372036854775807" in capsys.readouterr().err


def test_editing_options_are_passed_on() -> None:
    params = sampling_params(parse("--editing-threshold", "0.5", "--max-post-steps", "4"))
    assert (params.editing_threshold, params.max_post_steps) == (0.5, 4)
    with pytest.raises(InvalidOption, match=r"--editing-threshold=1\.5"):
        sampling_params(parse("--editing-threshold", "1.5"))


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (
            "max_tokens below 5, or rope_scaling='yarn:4' (",
            "--max-tokens below 5, or --rope-scaling=yarn:4 (",
        ),
        ("use max_model_len=99,999; max_num_seqs, or", "use --max-model-len=99,999; --max-num-seqs, or"),
        ("confidence_threshold=0.9, denoising_steps=8.", "--threshold=0.9, --steps=8."),
        ("host_memory_bytes=5 and enabled=False", "--host-memory=5 and --no-offload"),
        ("--kv-budget=3.0; stop and cache are words", "--kv-budget=3.0; stop and cache are words"),
        ("use device='cpu', dtype=float32 or 'auto'", "use --device=cpu, --dtype=float32 or 'auto'"),
        ("use None: it is known for LLaDA only", "leave it out: it is known for LLaDA only"),
        ("use 0.5, or None to keep it", "use 0.5, or leave it out to keep it"),
        (
            "use at most 7 tokens in all, or a pool of 99 bytes",
            "use at most 7 tokens in all, or --host-memory=99",
        ),
        ("use at most 0 tokens in all, or a pool of 99 bytes", "use --host-memory=99"),
        (
            "stop=['a'], /tmp/max_tokens.json, my_max_tokens",
            "stop=['a'], /tmp/max_tokens.json, my_max_tokens",
        ),
    ],
)
def test_remedies_are_options_of_the_command_line(remedy: str, expected: str) -> None:
    assert in_options(remedy, argparse.Namespace()) == expected


def test_an_option_with_two_names_has_the_one_that_was_given() -> None:
    assert in_options("max_tokens=3", argparse.Namespace(new_tokens=3)) == "--new-tokens=3"
    assert problem_in_options("max_tokens=3", argparse.Namespace(new_tokens=3)) == "--new-tokens=3"


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("cache='dual' is not valid", "--cache=dual is not valid"),
        ("denoising_steps=-5 is not valid", "--steps=-5 is not valid"),
        ("5 tokens + max_tokens=99,999 exceed", "5 tokens + --max-tokens=99,999 exceed"),
        ("--kv-budget=2.0 is not valid", "--kv-budget=2.0 is not valid"),
        ("there is no model 'cache=dual'", "there is no model 'cache=dual'"),
        ("max_tokens and cache are words", "max_tokens and cache are words"),
        ("--input line 3: kv_budget=5 is not valid", "--input line 3: kv_budget=5 is not valid"),
        ("config.json: dtype='int4' is not supported", "config.json: dtype='int4' is not supported"),
    ],
)
def test_problems_are_options_of_the_command_line(problem: str, expected: str) -> None:
    given = argparse.Namespace(dtype="float16")
    assert problem_in_options(problem, given) == expected


@pytest.mark.parametrize(
    ("name", "left_out", "given"),
    [
        ("device", "auto", "cuda:1"),
        ("dtype", "auto", "float16"),
        ("rope_scaling", "", "yarn:2"),
        ("mask_token_id", None, -5),
        ("block_length", 0, 7),
    ],
)
def test_what_the_checkpoint_says_is_no_option(name: str, left_out: object, given: object) -> None:
    problem = f"{name}={given!r} is not valid"
    assert problem_in_options(problem, argparse.Namespace(**{name: left_out})) == problem
    spoken = f"--{name.replace('_', '-')}={given} is not valid"
    assert problem_in_options(problem, argparse.Namespace(**{name: given})) == spoken
