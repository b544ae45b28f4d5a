"""The one place that decides which implementation of an operation runs on which device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

OPS = (
    "commit",
    "commit_edits",
    "copy_rows",
    "entropy_softmax",
    "expert_mlp",
    "gelu_mul",
    "greedy_confidence",
    "open_blocks",
    "prefill_attention",
    "qk_norm_rope",
    "resident_attention",
    "rms_norm",
    "route_experts",
    "score_codes",
    "score_rows",
    "silu_mul",
)

OLDEST_TRITON = (3, 4)

_MODULES = {"triton": "triton_kernel", "torch": "reference"}
_MODES = ("auto", "torch", "triton")


@dataclass(frozen=True)
class Backend:
    """The implementation an operation uses on a device.

    Args:
        name: ``"triton"`` or ``"torch"``.
        reason: why the better (or the requested) implementation is not the one in use; empty when it is.
    """

    name: Literal["triton", "torch"]
    reason: str


@functools.cache
def _triton_problem() -> str:
    """What keeps Triton from being used here, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    version = importlib.import_module("triton").__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_TRITON:
        return f"triton {version} is too old; pip install 'triton>={OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}'"
    return ""


def backend(op: str, device_type: str) -> Backend:
    """Which implementation of ``op`` runs for tensors on ``device_type``, and why not the better one.

    ``HERALD_KERNELS`` chooses: ``auto`` (Triton on cuda, torch elsewhere), ``torch``, or ``triton``. Triton
    on cpu tensors runs only in Triton's interpreter, which ``TRITON_INTERPRET=1`` selects at import.

    Raises:
        ValueError: ``op`` or the value of ``HERALD_KERNELS`` is unknown.
        RuntimeError: ``HERALD_KERNELS=triton`` on cuda, and Triton cannot be used.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is unknown; known: {', '.join(OPS)}")
    mode = os.environ.get("HERALD_KERNELS") or "auto"
    if mode not in _MODES:
        raise ValueError(f"HERALD_KERNELS={mode!r} is unknown; use one of {', '.join(_MODES)}")
    if device_type == "cuda":
        if mode == "torch":
            return Backend("torch", "HERALD_KERNELS=torch asks for the references; unset it")
        problem = _triton_problem()
        if not problem:
            return Backend("triton", "")
        if mode == "triton":
            raise RuntimeError(f"HERALD_KERNELS=triton, but {problem}")
        return Backend("torch", problem)
    if mode != "triton":
        return Backend("torch", "")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return Backend("torch", f"Triton needs its interpreter on {device_type}; set TRITON_INTERPRET=1")
    problem = _triton_problem()
    return Backend("torch", problem) if problem else Backend("triton", "")


@functools.cache
def _load(op: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"herald_kernels.ops.{op}.{_MODULES[name]}")
    function: Callable[..., Any] = getattr(module, op)
    return function


def implementation(op: str, device_type: str) -> Callable[..., Any]:
    """The function that computes ``op`` on ``device_type``; kernels are imported at their first use."""
    return _load(op, backend(op, device_type).name)
