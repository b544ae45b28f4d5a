"""Every kernel compiles for a Hopper GPU, within its shared memory, on a machine that has no GPU."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
GPUTarget = importlib.import_module("triton.backends.compiler").GPUTarget

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on the GPU compile the kernels"),
]

SHARED_BYTES_OF_HOPPER = 227 << 10
BF16, FP32 = torch.bfloat16, torch.float32


class NoDevice:
    """As much of a Triton driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that were launched, compiled and not run."""
    jit_function = importlib.import_module("triton.runtime.jit").JITFunction
    launch: Callable[..., Any] = jit_function.run
    kernels: list[Any] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(jit_function, "run", compile_only)
    driver = triton.runtime.driver
    before = dict(vars(driver))
    driver.set_active(NoDevice())
    yield kernels
    # `reset_active` would look for a real driver.
    vars(driver).update(before)


def kernel_of(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"herald_kernels.ops.{op}.triton_kernel"), op)


def check(kernels: list[Any], dtype: torch.dtype, products: bool) -> None:
    """All fit into an SM; 16-bit products use the matrix units, float32 ones do not (it would be tf32)."""
    assert kernels
    ptx = "".join(kernel.asm["ptx"] for kernel in kernels)
    assert max(kernel.metadata.shared for kernel in kernels) <= SHARED_BYTES_OF_HOPPER
    assert all(kernel.asm["cubin"] for kernel in kernels)
    assert ("mma." in ptx) == (products and dtype != FP32)


@pytest.mark.parametrize(
    ("block_length", "group", "head_dim", "max_length", "dtype"),
    [
        (4, 1, 128, 10_000, BF16),
        (32, 4, 128, 10_000, BF16),
        (32, 4, 128, 20, BF16),
        (64, 8, 64, 10_000, BF16),
        (16, 3, 256, 10_000, BF16),
        (64, 1, 256, 10_000, BF16),
        (16, 1, 512, 10_000, BF16),
        (64, 2, 256, 10_000, FP32),
        (32, 4, 128, 10_000, FP32),
    ],
    ids=str,
)
def test_resident_attention(
    compiled: list[Any], block_length: int, group: int, head_dim: int, max_length: int, dtype: torch.dtype
) -> None:
    lanes = torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(2, block_length, 2 * group, head_dim, dtype=dtype)
    rows = torch.zeros(2, 2, block_length, 2 * head_dim, dtype=dtype)
    arena = torch.zeros(2, 8, 2 * head_dim, dtype=dtype)
    length = torch.zeros(2, 2, dtype=torch.int32)
    kernel_of("resident_attention")(q, rows, arena, lanes.long(), length, lanes, 0.1, max_length)
    assert len(compiled) == (1 if max_length <= 20 else 2)
    check(compiled, dtype, products=True)


@pytest.mark.parametrize(
    ("group", "head_dim", "window", "dtype"),
    [(2, 256, 1023, BF16), (8, 512, 0, BF16), (2, 16, 7, BF16), (2, 64, 1023, FP32)],
    ids=str,
)
def test_lanes_that_see_a_part(
    compiled: list[Any], group: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    """Canvases of 256 positions; the second shape is that of layers that see everything."""
    lanes = torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(2, 256, 2 * group, head_dim, dtype=dtype)
    rows = torch.zeros(2, 2, 256, 2 * head_dim, dtype=dtype)
    arena, length = torch.zeros(2, 8, 2 * head_dim, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32)
    given = (lanes.long(), length, lanes, 1.0, window or 10_000)
    kernel_of("resident_attention")(q, rows, arena, *given, lanes, window, lanes.long())
    check(compiled, dtype, products=True)


def test_long_sets_use_larger_tiles(compiled: list[Any]) -> None:
    lanes, length = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.int32)
    q, rows = torch.zeros(8, 32, 32, 128, dtype=BF16), torch.zeros(8, 8, 32, 256, dtype=BF16)
    arena = torch.zeros(8, 8, 256, dtype=BF16)
    kernel_of("resident_attention")(q, rows, arena, lanes.long(), length, lanes, 0.1, 32_768)
    assert compiled[0].metadata.num_warps == 8
    check(compiled, BF16, products=True)


def test_rows_at_the_edge_of_a_set_are_copied_sixteen_bytes_at_once(compiled: list[Any]) -> None:
    test_resident_attention(compiled, 32, 4, 128, 10_000, BF16)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], (\S+),", compiled[0].asm["ptx"])
    assert copies and set(copies) == {"0x10"}


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (512, BF16), (128, FP32)], ids=str
)
def test_prefill_attention(compiled: list[Any], head_dim: int, dtype: torch.dtype) -> None:
    q, rows = torch.zeros(64, 8, head_dim, dtype=dtype), torch.zeros(2, 96, 2 * head_dim, dtype=dtype)
    kernel_of("prefill_attention")(q, rows, 32, 32, 0.1)
    check(compiled, dtype, products=True)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_prefill_attention_of_a_window(compiled: list[Any], dtype: torch.dtype) -> None:
    q, rows = torch.zeros(2048, 4, 256, dtype=dtype), torch.zeros(2, 3071, 512, dtype=dtype)
    kernel_of("prefill_attention")(q, rows, 1023, 1, 1.0, 1023)
    check(compiled, dtype, products=True)


@pytest.mark.parametrize(
    ("operator", "dtype", "head_dim"),
    [("max", BF16, 128), ("sum", BF16, 128), ("max", FP32, 128), ("max", BF16, 512)],
    ids=str,
)
def test_score_rows(compiled: list[Any], operator: str, dtype: torch.dtype, head_dim: int) -> None:
    q, rows = torch.zeros(32, 8, head_dim, dtype=dtype), torch.zeros(2, 300, 2 * head_dim, dtype=dtype)
    kernel_of("score_rows")(q, torch.zeros(32, 8), rows, 0.1, operator)
    check(compiled, dtype, products=True)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("size", "n", "width", "paged"),
    [
        (64, 128, 128, False),
        (64, 128, 128, True),
        (24, 16, 48, True),
        (64, 64, 512, False),
        (256, 512, 2048, False),
    ],
    ids=str,
)
def test_score_codes(compiled: list[Any], size: int, n: int, width: int, bits: int, paged: bool) -> None:
    """Products of int8 run on the matrix units, and nothing of a score's rounding is left to the compiler."""
    codes = torch.zeros(3, 2, size, n * bits // 8, dtype=torch.uint8)
    row_scales, means = torch.zeros(3, 2, size), torch.zeros(3, 2, 2, n, dtype=torch.int8)
    query_codes, lead = torch.zeros(2, width, n, dtype=torch.int8), torch.zeros(2, width)
    starts = torch.zeros(2, 3, width, dtype=torch.int32 if bits == 8 else torch.float32)
    span, keys = torch.zeros(4, dtype=torch.int32), torch.zeros(2 * 3 * size, dtype=torch.int32)
    given = (means, torch.zeros(3, 2, 2), query_codes, lead, torch.zeros(2), span, starts, keys)
    table = torch.zeros(3, dtype=torch.int32) if paged else None
    kernel_of("score_codes")(codes, None if bits == 8 else row_scales, *given, table)
    check(compiled, torch.int8, products=True)
    ptx = "".join(kernel.asm["ptx"] for kernel in compiled)
    assert re.search(r"mma\S*\.s32\.s8\.s8", ptx) and "div.full" not in ptx


def test_qk_norm_rope(compiled: list[Any]) -> None:
    qkv, weight, phase = (
        torch.zeros(32, 12 * 128, dtype=BF16),
        torch.zeros(128, dtype=BF16),
        torch.zeros(32, 64),
    )
    q_out, rows_out = torch.zeros(32, 8, 128, dtype=BF16), torch.zeros(2, 2, 16, 256, dtype=BF16)
    kernel_of("qk_norm_rope")(qkv, weight, weight, phase, phase, q_out, rows_out, 8, 2, 1e-6)
    check(compiled, BF16, products=False)


@pytest.mark.parametrize("kv_projections", [1, 2])
def test_qk_norm_rope_with_normed_values(compiled: list[Any], kv_projections: int) -> None:
    qkv, phase = torch.zeros(512, (16 + 2 * kv_projections) * 512, dtype=BF16), torch.zeros(512, 256)
    q_out, rows_out = torch.zeros(512, 16, 512, dtype=BF16), torch.zeros(2, 2, 256, 1024, dtype=BF16)
    weight = torch.zeros(512, dtype=BF16)
    kernel_of("qk_norm_rope")(qkv, weight, weight, phase, phase, q_out, rows_out, 16, 2, 1e-6, True)
    check(compiled, BF16, products=False)


def test_qk_norm_rope_of_half_a_head(compiled: list[Any]) -> None:
    qkv, phase = torch.zeros(640, 24 * 128, dtype=BF16), torch.zeros(640, 32)
    q_out, rows_out = torch.zeros(640, 16, 128, dtype=BF16), torch.zeros(20, 4, 32, 256, dtype=BF16)
    weight = torch.zeros(128, dtype=BF16)
    kernel_of("qk_norm_rope")(qkv, weight, weight, phase, phase, q_out, rows_out, 16, 4, 1e-6)
    check(compiled, BF16, products=False)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "experts", "groups"),
    [(BF16, BF16, 256, 8), (BF16, FP32, 256, 8), (BF16, BF16, 128, 1), (FP32, FP32, 256, 8)],
    ids=str,
)
def test_route_experts(
    compiled: list[Any], dtype: torch.dtype, weight_dtype: torch.dtype, experts: int, groups: int
) -> None:
    hidden, weight = torch.zeros(40, 2048, dtype=dtype), torch.zeros(experts, 2048, dtype=weight_dtype)
    score = "sigmoid" if groups > 1 else "softmax"
    bias = torch.zeros(experts) if groups > 1 else None
    kernel_of("route_experts")(hidden, weight, bias, 8, score, groups, groups // 2, True, 2.5)
    check(compiled, dtype, products=True)


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(32, BF16), (640, BF16), (1280, BF16), (4096, BF16), (640, FP32)], ids=str
)
def test_expert_mlp(compiled: list[Any], tokens: int, dtype: torch.dtype) -> None:
    """16B-A1B: 256 experts of 512, 8 a token, hidden size 2048."""
    hidden = torch.zeros(1, 2048, dtype=dtype).expand(tokens, -1)
    ids = torch.zeros(tokens, 8, dtype=torch.int32)
    gate_up = torch.empty(256, 1024, 2048, dtype=dtype)
    down = torch.empty(256, 2048, 512, dtype=dtype)
    kernel_of("expert_mlp")(hidden, ids, ids.float(), gate_up, down, hidden)
    assert len(compiled) == 5
    check(compiled, dtype, products=True)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_greedy_confidence(compiled: list[Any], dtype: torch.dtype) -> None:
    kernel_of("greedy_confidence")(torch.zeros(4, 151_936, dtype=dtype))
    check(compiled, dtype, products=False)


def test_rms_norm(compiled: list[Any]) -> None:
    kernel_of("rms_norm")(torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16), 1e-6)
    check(compiled, BF16, products=False)


def test_rms_norm_without_weights(compiled: list[Any]) -> None:
    kernel_of("rms_norm")(torch.zeros(4, 2816, dtype=BF16), None, 1e-6)
    check(compiled, BF16, products=False)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_entropy_softmax(compiled: list[Any], dtype: torch.dtype) -> None:
    kernel_of("entropy_softmax")(torch.zeros(4, 262_144), torch.ones(4), dtype)
    assert len(compiled) == 3
    check(compiled, dtype, products=False)


def test_gelu_mul(compiled: list[Any]) -> None:
    kernel_of("gelu_mul")(torch.zeros(4, 2 * 2112, dtype=BF16))
    check(compiled, BF16, products=False)


def test_experts_of_gemma(compiled: list[Any]) -> None:
    """26B-A4B: 128 experts of 704, 8 a token, hidden size 2816."""
    hidden, ids = torch.zeros(1, 2816, dtype=BF16).expand(512, -1), torch.zeros(512, 8, dtype=torch.int32)
    gate_up = torch.empty(128, 1408, 2816, dtype=BF16)
    down = torch.empty(128, 2816, 704, dtype=BF16)
    kernel_of("expert_mlp")(hidden, ids, ids.float(), gate_up, down, hidden, "gelu_tanh")
    weight, scale = torch.zeros(128, 2816), torch.zeros(128)
    kernel_of("route_experts")(hidden, weight, None, 8, "softmax", 1, 1, True, 1.0, scale)
    check(compiled, BF16, products=True)


def test_silu_mul(compiled: list[Any]) -> None:
    kernel_of("silu_mul")(torch.zeros(4, 2 * 12_288, dtype=BF16))
    check(compiled, BF16, products=False)


@pytest.mark.parametrize("windows", [False, True])
def test_commit(compiled: list[Any], windows: bool) -> None:
    tokens, confidence = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, 32)
    slots = torch.zeros(2, dtype=torch.int64)
    kernel_of("commit")(
        *(tokens, tokens > 0, tokens, slots, tokens, tokens, confidence, slots, confidence[:, 0]),
        tokens if windows else None,
    )
    check(compiled, FP32, products=False)


def test_commit_edits(compiled: list[Any]) -> None:
    tokens, confidence = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, 32)
    slots, edits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    threshold = confidence[:, 0]
    kernel_of("commit_edits")(
        *(tokens, tokens > 0, tokens, edits, threshold, slots, slots, tokens, tokens, confidence),
        *(slots, threshold, 7),
    )
    check(compiled, FP32, products=False)


def test_open_blocks(compiled: list[Any]) -> None:
    tokens, slots = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    kernel_of("open_blocks")(tokens, tokens > 0, tokens, tokens, slots, slots, 7)
    check(compiled, FP32, products=False)


def test_copy_rows_moves_sixteen_bytes_at_once(compiled: list[Any]) -> None:
    rows, ids = torch.zeros(8, 256, dtype=BF16), torch.arange(8)
    kernel_of("copy_rows")(rows, ids, rows, ids)
    check(compiled, BF16, products=False)
    assert "ld.global.v2.b64" in compiled[0].asm["ptx"] or "ld.global.v4.b32" in compiled[0].asm["ptx"]
