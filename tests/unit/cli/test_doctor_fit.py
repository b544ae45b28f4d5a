from __future__ import annotations

import dataclasses

import pytest

from herald.config import OffloadConfig
from herald.doctor.fit import (
    WORKSPACE_BYTES,
    ModelShape,
    dense_device_bytes,
    device_bytes,
    fit_context,
    host_bytes,
    index_bytes_per_token,
    largest,
)
from herald.engine.hidden_states import KEPT_BYTES

GIB = 1 << 30
SDAR_8B = ModelShape(
    name="sdar-8b",
    num_layers=36,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    block_length=4,
    max_positions=32768,
    weight_bytes=16 * GIB,
)


def test_kv_bytes_are_those_of_the_design() -> None:
    assert SDAR_8B.kv_bytes == 147_456  # measured and published for this shape


@pytest.mark.parametrize(("bits", "codes"), [(8, 128), (4, 64), (1, 16)])
def test_index_bytes(bits: int, codes: int) -> None:
    # codes, one float32 scale, and a 64th of a float32 mean, for each of 36 x 8 rows
    assert index_bytes_per_token(SDAR_8B, bits, 64) == 36 * 8 * (codes + 4 + 128 * 4 / 64)


def test_exact_index_takes_nothing() -> None:
    assert index_bytes_per_token(SDAR_8B, 16, page_size=64) == 0


def test_host_bytes_come_in_pages() -> None:
    config = OffloadConfig(index_bits=16)
    assert host_bytes(SDAR_8B, 1, config) == host_bytes(SDAR_8B, 64, config) == 64 * 147_456
    assert host_bytes(SDAR_8B, 65, config) == 128 * 147_456


def test_device_bytes_at_32k() -> None:
    tokens, config = 32768, OffloadConfig(kv_budget=0.08)
    resident = 2622  # ceil(0.08 x 32768)
    transient = tokens * (4096 * 2 + 8 * 2 * 128 * 2 + 8 * 16)  # hidden states, one layer's KV, scores
    expected = 16 * GIB + WORKSPACE_BYTES + 2 * resident * 147_456 + transient
    assert device_bytes(SDAR_8B, tokens, config) == expected
    assert expected - 16 * GIB < 6 * GIB


def test_hidden_states_of_a_long_prompt_are_on_the_host() -> None:
    config = OffloadConfig(kv_budget=0.02, index_bits=16)
    before, after = KEPT_BYTES // (4096 * 2), KEPT_BYTES // (4096 * 2) + 64
    assert host_bytes(SDAR_8B, after, config) - host_bytes(SDAR_8B, before, config) > KEPT_BYTES
    a_token = (device_bytes(SDAR_8B, 2 * before, config) - device_bytes(SDAR_8B, before, config)) / before
    assert a_token < 8 * 2 * 128 * 2 + 8 * 16 + 0.05 * 147_456


def test_a_full_budget_stages_nothing() -> None:
    few = device_bytes(SDAR_8B, 4096, OffloadConfig(kv_budget=1.0)) - dense_device_bytes(SDAR_8B, 4096)
    # prefill: a layer's KV and scores, but one copy of hidden states less, and no rotary table
    assert few == 4096 * (8 * 2 * 128 * 2 + 8 * 16 - 4096 * 2 - 4 * 128)


@pytest.mark.parametrize("limit", [0, 1, 7, 1000])
def test_largest_finds_the_last_that_fits(limit: int) -> None:
    assert largest(lambda n: n <= limit) == limit
    assert largest(lambda n: True, 500) == 500


def test_the_answer_fits_and_one_page_more_does_not() -> None:
    config = OffloadConfig()
    host, device = 64 * GIB, 40 * GIB
    fit = fit_context(SDAR_8B, host, device, config)
    assert (
        host_bytes(SDAR_8B, fit.host_tokens, config)
        <= host
        < host_bytes(SDAR_8B, fit.host_tokens + 64, config)
    )
    assert device_bytes(SDAR_8B, fit.device_tokens, config) <= device
    assert device_bytes(SDAR_8B, fit.device_tokens + 1, config) > device
    assert fit.memory_tokens == min(fit.host_tokens, fit.device_tokens)


@pytest.mark.parametrize(
    ("host_gib", "device_gib", "limited_by"),
    [(512, 140, "model"), (2, 140, "host memory"), (512, 17, "device memory")],
)
def test_what_limits(host_gib: int, device_gib: int, limited_by: str) -> None:
    fit = fit_context(SDAR_8B, host_gib * GIB, device_gib * GIB, OffloadConfig())
    assert fit.limited_by == limited_by
    assert fit.tokens == min(fit.memory_tokens, 32768)


def test_offload_holds_more_than_the_device_alone() -> None:
    fit = fit_context(SDAR_8B, 256 * GIB, 24 * GIB, OffloadConfig())
    assert fit.device_tokens > 2 * fit.dense_tokens > 0


def test_weights_that_do_not_fit_leave_nothing() -> None:
    fit = fit_context(SDAR_8B, 512 * GIB, 8 * GIB, OffloadConfig())
    assert (fit.tokens, fit.memory_tokens, fit.dense_tokens, fit.limited_by) == (0, 0, 0, "device memory")


def test_a_cpu_shares_one_memory() -> None:
    fit = fit_context(SDAR_8B, 40 * GIB, None, OffloadConfig())
    both = sum(count(SDAR_8B, fit.memory_tokens, OffloadConfig()) for count in (host_bytes, device_bytes))
    assert 39 * GIB < both <= 40 * GIB
    assert fit.host_tokens == fit.device_tokens


def test_families_with_full_attention_keep_no_rows_on_the_host() -> None:
    shape = dataclasses.replace(SDAR_8B, full_attention=True)
    config, long = OffloadConfig(kv_budget=0.08), 1 << 20
    assert host_bytes(shape, 1024, config) == 0
    assert host_bytes(shape, long, config) == long * 4096 * 2
    # one layer's rows, hidden states and queries beside the set and what a refresh brings
    one_layer = long * (8 * 2 * 128 * 2 + 8 * 16)
    resident = 2 * config.resident_rows(long) * shape.kv_bytes
    assert (
        device_bytes(shape, long, config)
        == 16 * GIB + WORKSPACE_BYTES + resident + 2 * KEPT_BYTES + one_layer
    )
    assert dense_device_bytes(shape, long) - dense_device_bytes(SDAR_8B, long) == long * shape.layer_kv_bytes
    fit = fit_context(shape, 64 * GIB, 80 * GIB, config)
    assert fit.memory_tokens > fit.dense_tokens and fit.limited_by == "model"
