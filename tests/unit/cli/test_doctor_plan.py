"""``herald doctor --model --context --gpu-memory``: what fits, from a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from herald.cli.main import main
from herald.config import OffloadConfig
from herald.doctor.context import probe_plan, shape_of
from herald.doctor.fit import device_bytes, host_bytes
from herald.doctor.plan import plan_batch
from herald.engine.resident import set_size, staging_rows
from herald.models import PRESETS, num_parameters
from herald.models.registry import FAMILIES
from tests.support.golden import GOLDEN

GIB = 1 << 30
ROOMY = {"host_memory": 512 * GIB, "device_memory": 80 * GIB}


def plan(model: str, context: int, **memory: Any) -> dict[str, Any]:
    return probe_plan(model, context, **(ROOMY | memory)).value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_from_its_config_alone(family: Any, tmp_path: Path) -> None:
    """No weights and no tokenizer lie in the folder; the vocabulary is that of a released model."""
    raw = json.loads((GOLDEN / family.golden[0] / "config.json").read_text())
    if family.mask_token_id is not None:
        raw |= {"vocab_size": max(raw["vocab_size"], family.mask_token_id + 1)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = plan(str(tmp_path), 4096)
    assert found["batch"] > 1 and found["weight_bytes"] > 0 and found["resident_bytes"] > 0


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_of_a_plan(name: str) -> None:
    context = min(32768, PRESETS[name].max_positions)
    found = plan(name, context)
    shape, config = shape_of(name, PRESETS[name], 2), OffloadConfig()
    assert found["weight_bytes"] == 2 * num_parameters(PRESETS[name])
    parts = ("weight_bytes", "workspace_bytes", "prefill_bytes", "resident_bytes", "staging_bytes")
    assert sum(found[part] for part in parts) == device_bytes(shape, context, config)
    assert found["host_bytes"] + found["prefill_host_bytes"] == host_bytes(shape, context, config)
    block = PRESETS[name].block_length or 1
    assert found["resident_rows"] >= set_size(config, block, context - block)
    assert found["staging_rows"] >= staging_rows(config, block, context - 8 * block, context - block)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    for host, device in ((512, 40), (20, 80), (64, 24)):
        found = plan("sdar-8b", 20_000, host_memory=host * GIB, device_memory=device * GIB)
        on_device = found["resident_bytes"] + found["staging_bytes"]
        fixed = found["weight_bytes"] + found["workspace_bytes"] + found["prefill_bytes"]
        batch = found["batch"]
        assert batch > 0
        fits = [
            fixed + n * on_device <= device * GIB and n * found["host_bytes"] <= host * GIB
            for n in (batch, batch + 1)
        ]
        assert fits == [True, False]


def test_offload_holds_more_requests() -> None:
    found = plan("sdar-8b", 32768, device_memory=48 * GIB)
    assert found["batch"] > 2 * found["dense_batch"] > 0


def test_a_cpu_holds_both_sides_in_one_memory() -> None:
    shape = shape_of("sdar-1.7b", PRESETS["sdar-1.7b"], 4)
    found = plan_batch(shape, 8192, 64 * GIB, None, OffloadConfig())
    a_request = found.host_bytes + found.resident_bytes + found.staging_bytes
    fixed = found.fixed_device_bytes + found.prefill_host_bytes
    assert fixed + found.batch * a_request <= 64 * GIB < fixed + (found.batch + 1) * a_request


def test_no_context_means_the_largest() -> None:
    found = plan("sdar-8b", 0, device_memory=24 * GIB, host_memory=4 * GIB)
    assert found["context"] == found["longest"] < 32768 and found["batch"] == 1


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        ({"device_memory": 8 * GIB}, "no context fits beside the weights"),
        ({"device_memory": 33 * GIB // 2}, "--context of at most"),
        ({"host_memory": 2 * GIB}, "of host memory, 2.0 GiB are there; a --context of at most"),
    ],
)
def test_what_does_not_fit_says_what_is_missing(memory: dict[str, int], advice: str) -> None:
    finding = probe_plan("sdar-8b", 32768, **(ROOMY | memory))
    assert finding.value["batch"] == 0 and "does not fit" in finding.text[-1]
    assert advice in finding.advice
    if finding.value["longest"]:
        assert plan("sdar-8b", finding.value["longest"], **memory)["batch"] == 1


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_a_smaller_index_is_advised_only_where_it_is_smaller(bits: int) -> None:
    memory = {"device_memory": 24 << 30, "host_memory": 4 << 30}
    found = probe_plan("sdar-8b", 32768, **memory, offload=OffloadConfig(index_bits=bits))
    fewer = probe_plan("sdar-8b", 32768, **memory, offload=OffloadConfig(index_bits=4))
    assert found.value["host_batch"] == 0 and "of host memory" in found.advice
    assert ("--index-bits 4 helps" in found.advice) == (bits == 8)
    assert bits != 8 or fewer.value["longest"] > found.value["longest"]


def test_the_option_of_a_refusal_is_taken() -> None:
    found = plan("sdar-8b", 100_000, rope_scaling="yarn:4", block_length=32)
    assert found["batch"] > 1 and found["context"] == 100_000


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--model", "fast-dllm-v2-7b", "--context", "32768", "--gpu-memory", "24GiB"]
    assert main([*command, "--host-memory", "64GiB", "--kv-budget", "0.05"]) == 0
    printed = capsys.readouterr().out
    for part in ("weights: ", "resident set: ", "host pool: ", "largest batch: "):
        assert part in printed
    assert main([*command, "--host-memory", "64GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert list(found) == ["plan"] and found["plan"]["context"] == 32768


def test_an_index_on_the_gpu_takes_room_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"device_memory": 48 << 30, "host_memory": 512 << 30}
    without = plan("sdar-8b", 32768, **memory)
    held = probe_plan("sdar-8b", 32768, **memory, offload=OffloadConfig(index_device_bytes=16 << 30))
    a_set = without["resident_bytes"] + without["staging_bytes"]
    assert 0 <= without["device_batch"] - held.value["device_batch"] - (16 << 30) // a_set <= 1
    assert held.value["dense_batch"] == without["dense_batch"]
    assert any("key index on the GPU: 16.0 GiB" in line for line in held.text)
    command = ["doctor", "--model", "sdar-8b", "--context", "32768", "--host-memory", "512GiB"]
    assert main([*command, "--gpu-memory", "48GiB", "--index-device-memory", "16GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"]["plan"] == {**held.value, "advice": ""}
    assert main([*command, "--gpu-memory", "24GiB", "--index-device-memory", "16GiB", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["findings"]["plan"]["advice"]
    assert "a lower --index-device-memory helps" in advice and "and the key index" in advice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "32768"], "a plan needs a model"),
        (["--model", "sdar-8b", "--context", "0"], "--context=0 is not valid"),
        (["--model", "sdar-8b", "--context", "-5"], "--context=-5 is not valid"),
        (["--model", "sdar-8b", "--context", "lots"], "is not a whole number"),
        (["--model", "sdar-8b", "--context", "100000"], "or --rope-scaling=yarn:4 "),
        (["--model", "sdar-8b", "--gpu-memory", "24"], "use a size of 1 MiB or more, such as 24GiB"),
        (["--model", "sdar-8b", "--host-memory", "0"], "use a size of 1 MiB or more"),
        (["--model", "sdar-8b", "--gpu-memory", "24 pounds"], "is not a size"),
        (["--model", "sdar-8b", "--context", "64", "--kv-budget", "0"], "kv-budget=0.0 is not valid"),
        (["--model", "sdar-8b", "--context", "64", "--index-device-memory", "much"], "is not a size"),
        (["--model", "sdar-8b", "--context", "64", "--index-bits", "3"], "index-bits=3 is not valid"),
        (["--model", "no-such-model", "--context", "64"], "there is no model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["doctor", *arguments])
    except SystemExit as error:  # what the parser refuses
        code = int(str(error.code))
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["llada-8b", "dream-7b", "sdar-8b"])
def test_what_a_cache_holds_is_said_to_need_one(preset: str) -> None:
    finding = probe_plan(preset, 2048, **ROOMY)
    needs_cache = PRESETS[preset].full_attention
    assert finding.value["full_attention"] == needs_cache
    assert any("without one, the default, nothing is kept" in line for line in finding.text) == needs_cache
