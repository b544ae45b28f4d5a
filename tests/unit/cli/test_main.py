from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from herald.cli.main import main
from herald.errors import HostPoolTooSmall, ModelNotFound


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    try:
        code = main(argv)
    except SystemExit as exit_info:
        code = int(exit_info.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_answer_on_stdout_statistics_on_stderr(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "--prompt", "q")
    assert (code, out) == (0, fake_llm.answer + "\n")
    assert "rows selected" in err and "1,234,567" in err and "10.0%" in err
    assert "prefill:" not in err  # no bar: stderr is no terminal
    assert fake_llm.made[0].closed


def test_options_reach_the_engine(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--model",
        "m",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--block-length",
        "8",
        "--mask-token-id",
        "5",
        "--rope-scaling",
        "yarn:2",
    )
    code, _, _ = run(capsys, "generate", "--prompt", "q", "--no-offload", "--max-tokens", "9", *options)
    assert code == 0
    given = fake_llm.made[0].options
    assert not given.pop("offload").enabled
    given.pop("engine")
    overrides = {"block_length": 8, "mask_token_id": 5, "rope_scaling": "yarn:2"}
    assert given == {"model": "m", "device": "cpu", "dtype": "float32", **overrides}
    assert fake_llm.made[0].calls[0]["params"].max_tokens == 9


def test_quiet_leaves_only_the_answers(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "--prompt", "a", "--prompt", "b", "--quiet")
    assert (code, out, err) == (0, 2 * (fake_llm.answer + "\n"), "")


def test_several_prompts_are_named_on_stderr(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "generate", "--prompt", "long " * 99 + "\nlast?", "--prompt", "b")
    assert out == 2 * (fake_llm.answer + "\n")
    lines = err.splitlines()
    assert lines[0].startswith("[1/2] ...") and lines[0].endswith("long long last?") and len(lines[0]) < 90
    assert lines[1] == "[2/2] b"


def test_the_heading_is_the_question(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"--prompt=the document\n\nQuestion: {which}?\nAnswer:" for which in ("one", "two")]
    _, _, err = run(capsys, "generate", *prompts)
    assert err.splitlines()[:2] == ["[1/2] Question: one? Answer:", "[2/2] Question: two? Answer:"]


def test_json_is_one_object_a_prompt_and_nothing_else(
    fake_llm: type, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.noise = "a library says hello"
    code, out, err = run(capsys, "generate", "--prompt", "a", "--prompt", "bc", "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [each["prompt_tokens"] for each in objects] == [1, 2]
    assert objects[0].keys() == {"text", "token_ids", "finish_reason", "prompt_tokens", "metrics"}
    assert err == "a library says hello\n"


def test_chat_hands_over_token_ids(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, "generate", "--prompt", "hi", "--chat")
    assert code == 0
    call = fake_llm.made[0].calls[0]
    assert (call["prompts"], call["prompt_token_ids"]) == (None, [[1, 104, 105, 2]])


def test_stream_prints_whole_characters_only(
    fake_llm: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (written.append(text), write(text))[1])
    code, out, _ = run(capsys, "generate", "--prompt", "q", "--stream")
    assert (code, out) == (0, fake_llm.answer + "\n")
    assert written[:3] == ["4029", "13 ", "\u00e9"]


def test_stream_with_chat(fake_llm: type, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "generate", "--prompt", "hi", "--chat", "--stream")
    call = fake_llm.made[0].calls[0]
    assert (call["prompt"], call["prompt_token_ids"]) == (None, [1, 104, 105, 2])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["generate"], "no prompt was given"),
        (["generate", "--prompt", ""], "--prompt is empty"),
        (["generate", "--prompt", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["generate", "--prompt", "x", "--max-tok", "3"], "unrecognized arguments: --max-tok"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens=0 is not valid; use 1 or more"),
        (["generate", "--prompt", "x", "--kv-budget", "nan"], "--kv-budget=nan is not valid"),
        (["generate", "--prompt", "x", "--steps", "17"], "--steps=17 is not valid; use at most 16"),
        (["chat", "--steps", "17"], "--steps=17 is not valid; use at most 16"),
        (
            ["generate", "--prompt", "x", "--device", "cpu", "--cache", "dual"],
            "--cache=dual is not valid; use 'auto'",
        ),
        (["generate", "--prompt", "x", "--rope-scaling", "x"], "--rope-scaling=x is not valid"),
        (
            ["generate", "--prompt", "x", "--mask-token-id", "-5"],
            "--mask-token-id=-5 is not valid; pass --mask",
        ),
        (["generate", "--prompt", "x", "--block-length", "-5"], "--block-length=-5 is not valid"),
        (["generate", "--prompt", "x", "--device", "cuda:99"], "--device=cuda:99"),
        (["generate", "--prompt", "x", "--host-memory", "16G"], "not a size"),
        (["generate", "--prompt", "x", "--stream", "--json"], "not allowed with"),
        (["generate", "--prompt-file", "/nonexistent"], "does not exist"),
        (["doctor", "--model", "/nonexistent"], "/nonexistent"),
        (
            ["doctor", "--no-bandwidth", "--model", "~no-such-user-x/y"],
            "there is no model '~no-such-user-x/y'",
        ),
        (["doctor", "--no-bandwidth", "--model", "x" * 5000], "there is no model"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("herald: error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelNotFound("there is no model 'x'", "pass a folder"), 2, "there is no model 'x'; pass a folder"),
        (HostPoolTooSmall("the pool\n is full", "use 3 tokens"), 1, "the pool is full; use 3 tokens"),
        (OSError(28, "No space left on device"), 1, "No space left on device; free space where"),
        (OSError(5, "Input/output error"), 1, "[Errno 5] Input/output error\n"),
        (MemoryError("lots"), 1, "out of memory: lots"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), 1, "out of memory: CUDA"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_one_line(
    error: BaseException, code: int, message: str, fake_llm: type, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.fail = error
    got, out, err = run(capsys, "generate", "--prompt", "x")
    assert (got, out) == (code, "")
    assert err.startswith("herald: error: ") and message in err
    assert err.count("\n") == 1


def test_a_bug_is_not_hidden(fake_llm: type) -> None:
    fake_llm.fail = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["generate", "--prompt", "x"])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("herald ")
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0 and "--kv-budget SHARE" in out and "default: 0.08" in out


@pytest.mark.parametrize(
    ("closed", "command", "code"),
    [
        ("stdin", "generate --prompt-file -", 2),
        ("stdout", "generate --prompt-file /nonexistent", 2),
        ("stdout", "generate --help", 0),
        ("stderr", "generate --prompt-file /nonexistent", 2),
    ],
)
def test_a_closed_standard_stream_changes_nothing_else(closed: str, command: str, code: int) -> None:
    descriptor = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[closed]
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m herald {command} {descriptor}', sys.executable],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    lines = 1 if code and closed != "stderr" else 0
    assert done.stderr.count("\n") == lines and "Traceback" not in done.stderr


def test_answers_without_a_standard_output(fake_llm: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ([], ["--stream"], ["--json"]):
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["generate", "--prompt", "x", "--quiet", *shape]) == 0


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    root = Path(__file__).resolve().parents[3]
    script = (
        "import os, sys; from herald.cli import main, doctor\n"
        "doctor.run = lambda args: print('x' * (1 << 20)) or 0\n"
        "sys.exit(main.main(['doctor']))"
    )
    read_end = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    read_end.wait(timeout=60)
    assert read_end.stdin is not None
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=read_end.stdin,
        stderr=subprocess.PIPE,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_standard_output_is_one_line_with_a_remedy() -> None:
    root = Path(__file__).resolve().parents[3]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "herald", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=root,
            env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "PATH": "/usr/bin:/bin"},
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"herald: error: [Errno 28]") and done.stderr.count(b"\n") == 1
    assert b"; free space where it is written to, or write elsewhere" in done.stderr


def test_module_runs() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "herald", "generate"],
        capture_output=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"herald: error: no prompt was given")
