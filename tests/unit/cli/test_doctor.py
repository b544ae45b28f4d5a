from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from herald import hardware
from herald.cli.main import main
from herald.doctor import bandwidth, context, device, examine, host
from herald.doctor.finding import Finding
from herald.doctor.fit import ContextFit
from herald.errors import ModelNotFound, WeightsError

NAMES = [
    *("cpu", "memory", "memlock", "huge_pages", "numa", "gpu", "software", "kernels", "native"),
    *("transfer", "bandwidth", "context"),
]


def fit(**changes: object) -> ContextFit:
    values = {
        "model": "m",
        "tokens": 32768,
        "memory_tokens": 50_000,
        "host_tokens": 50_000,
        "device_tokens": 60_000,
        "dense_tokens": 9_000,
        "limited_by": "model",
        "kv_bytes_per_token": 147_456,
        "index_bytes_per_token": 100.0,
        "weight_bytes": 1 << 34,
    }
    return ContextFit(**{**values, **changes})  # type: ignore[arg-type]


def test_examine_runs_every_probe_and_its_report_is_json() -> None:
    seen: list[str] = []
    findings = examine(measure_bandwidth=False, report=seen.append)
    assert seen == [each.name for each in findings] == [name for name in NAMES if name != "bandwidth"]
    assert not [each for each in findings if "error" in each.value]
    assert all(each.text and all(each.text) for each in findings)
    json.dumps([each.value for each in findings], allow_nan=False)


def test_a_probe_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise RuntimeError("the driver\nis broken")

    monkeypatch.setattr(device, "probe_gpu", fail)
    findings = {each.name: each for each in examine(measure_bandwidth=False)}
    assert findings["gpu"].value == {"error": "RuntimeError: the driver"}
    assert "error" not in findings["context"].value


def test_cpu_advises_on_closed_cores_and_missing_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    monkeypatch.setattr(hardware, "cpu_features", lambda: frozenset({"sse4_2"}))
    found = host.probe_cpu()
    assert found.value["instruction_sets"] == []
    assert "6 cores are closed" in found.advice and "no AVX2" in found.advice
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    monkeypatch.setattr(hardware, "cpu_features", lambda: frozenset({"avx2", "amx_int8"}))
    found = host.probe_cpu()
    assert (found.value["instruction_sets"], found.advice) == (["avx2", "amx_int8"], "")


@pytest.mark.parametrize(("free", "advises"), [(1 << 30, True), (64 << 30, False)])
def test_memory_advises_when_short(free: int, advises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    info = hardware.MemoryInfo(128 << 30, 64 << 30, cgroup_limit=96 << 30, cgroup_free=free)
    monkeypatch.setattr(hardware, "memory", lambda: info)
    found = host.probe_memory()
    assert found.value["free_bytes"] == free
    assert found.value["cgroup_limit_bytes"] == 96 << 30
    assert bool(found.advice) == advises


@pytest.mark.parametrize(("mode", "advises"), [("always", False), ("madvise", False), ("never", True)])
def test_huge_pages(mode: str, advises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "huge_pages", lambda: mode)
    assert bool(host.probe_huge_pages().advice) == advises


def test_numa_advises_with_more_than_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "numa_nodes", lambda: {0: (0, 1)})
    assert host.probe_numa().advice == ""
    monkeypatch.setattr(hardware, "numa_nodes", lambda: {0: (0, 1), 1: (2, 3)})
    found = host.probe_numa()
    assert found.value == {"nodes": {"0": [0, 1], "1": [2, 3]}}
    assert "numactl" in found.advice


def test_memlock_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memlock_limit", lambda: None)
    assert host.probe_memlock().text == ("unlimited",)


def test_kernels_says_why_the_better_one_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    import herald_kernels

    def backend(op: str, device_type: str) -> herald_kernels.Backend:
        if op == "commit":
            raise RuntimeError("HERALD_KERNELS=triton, but triton is too old")
        return herald_kernels.Backend("torch", "triton is not installed")

    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(herald_kernels, "backend", backend)
    found = device.probe_kernels()
    assert set(found.value["operations"]) == set(herald_kernels.OPS)
    assert found.value["operations"]["copy_rows"]["backend"] == "torch"
    assert "triton is not installed" in found.advice and "too old" in found.advice


def test_host_copy_rate_copies_everything() -> None:
    found = bandwidth.probe_bandwidth(1 << 20)
    assert found.value["host_copy"] > 1e7
    calls: list[int] = []
    assert bandwidth.best_rate(lambda: calls.append(1), 10, repeats=2) > 0
    assert len(calls) == 3


def test_context_lists_the_released_shapes() -> None:
    found = context.probe_context()
    models = {each["model"]: each for each in found.value["models"]}
    assert models["sdar-8b"]["kv_bytes_per_token"] in (147_456, 2 * 147_456)  # bfloat16, float32 on a CPU
    assert found.value["kv_budget"] == 0.08


def test_context_of_a_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["SDARForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "mask_token_id": 5,
        "block_length": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = context.probe_context(str(tmp_path))
    first = next(each for each in found.value["models"] if each["model"] == str(tmp_path))
    assert first["tokens"] == 4096 and first["limited_by"] == "model"


def test_a_model_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModelNotFound, match="nobody/nothing"):
        context.config_folder("nobody/nothing")
    with pytest.raises(ModelNotFound):
        examine("no such model", measure_bandwidth=False)


def test_a_broken_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError):
        examine(str(tmp_path), measure_bandwidth=False)


def test_descriptions() -> None:
    assert "all the model allows; memory holds 50,000" in context.describe(fit())
    assert "limited by host memory" in context.describe(fit(limited_by="host memory"))
    assert "does not fit" in context.describe(fit(memory_tokens=0))
    assert context.advice_for([fit()]) == ""
    advice = context.advice_for([fit(limited_by="host memory"), fit(limited_by="device memory")])
    assert "--index-bits 4" in advice and "--kv-budget" in advice
    for bits in (16, 4, 1):
        assert "--index-bits" not in context.advice_for([fit(limited_by="host memory")], bits)


def test_context_of_a_preset_comes_first_and_once() -> None:
    found = context.probe_context("sdar-8b", rope_scaling="yarn:4")
    names = [each["model"] for each in found.value["models"]]
    assert names[0] == "sdar-8b" and len(names) == len(set(names))
    assert context.config_of("sdar-8b", rope_scaling="yarn:4").max_positions == 131_072


def test_options_count_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--json", "--no-bandwidth", "--model", "fast-dllm-v2-7b"]
    assert main([*command, "--kv-budget", "0.5", "--index-bits", "4", "--block-length", "16"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]["context"]
    assert found["kv_budget"] == 0.5 and found["index_bits"] == 4
    assert found["models"][0]["model"] == "fast-dllm-v2-7b"
    for option in (["--block-length", "8"], ["--rope-scaling", "yarn:4"], ["--mask-token-id", "0"]):
        assert main(["doctor", "--no-bandwidth", *option]) == 2
        assert f"{option[0]} is a model's; add --model" in capsys.readouterr().err


def fake_examine(
    model: str | None, measure: bool, report: object, offload: object, **overrides: object
) -> list[Finding]:
    print("a driver says hello")
    return [
        Finding("cpu", {"cores": 2}, ("2 cores",)),
        Finding("huge_pages", {"transparent": "never"}, ("never",), f"switch on {model} {measure}"),
    ]


def test_command_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("herald.doctor.examine", fake_examine)
    assert main(["doctor", "--json", "--no-bandwidth", "--model", "m"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == {
        "cpu": {"cores": 2, "advice": ""},
        "huge_pages": {"transparent": "never", "advice": "switch on m False"},
    }


def test_command_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("herald.doctor.examine", fake_examine)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "huge pages" in out and "-> switch on None True" in out and "hello" not in out


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    findings = {each.name: each for each in examine()}
    assert not [each for each in findings.values() if "error" in each.value]
    assert findings["gpu"].value["devices"][0]["free_bytes"] > 0
    assert findings["transfer"].value["mode"] in ("zero_copy", "staged")
    assert findings["bandwidth"].value["to_device"] > 1e9
    assert findings["context"].value["device_memory_bytes"] > 0
