"""Two ways to keep GEMMs off a few SMs: a green context, and the number of SMs that cuBLAS plans for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Values and sizes of the driver's interface (cuda.h).
RESOURCE_TYPE_SM = 1
IGNORE_COSCHEDULING = 1
DEFAULT_STREAM = 1
NON_BLOCKING = 1
RESOURCE_BYTES = 256  # CUdevResource has 144 in CUDA 13.0, and may grow
SM_COUNT_AT = 96


class GreenContext:
    """A share of the device's SMs, with streams whose kernels run there and nowhere else.

    Args:
        num_sms: at least so many; the driver rounds up, to a multiple of 8 on Hopper.
        fine: let it round to 2 instead, which gives up large thread block clusters.

    Attributes:
        sms: how many it has got.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, num_sms: int, fine: bool = False) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.synchronize()  # the primary context must be there
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        whole, share, rest = (ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3))
        self._call("cuDeviceGetDevResource", device, whole, RESOURCE_TYPE_SM)
        groups = ctypes.c_uint(1)
        flags = ctypes.c_uint(IGNORE_COSCHEDULING if fine else 0)
        self._call(
            "cuDevSmResourceSplitByCount",
            share,
            ctypes.byref(groups),
            whole,
            rest,
            flags,
            ctypes.c_uint(num_sms),
        )
        self.sms = int.from_bytes(share.raw[SM_COUNT_AT : SM_COUNT_AT + 4], "little")
        description = ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), share, ctypes.c_uint(1))
        self._context = ctypes.c_void_p()
        self._call(
            "cuGreenCtxCreate",
            ctypes.byref(self._context),
            description,
            device,
            ctypes.c_uint(DEFAULT_STREAM),
        )

    def stream(self, priority: int = 0) -> torch.cuda.ExternalStream:
        """A new stream of the context; it lives as long as the process."""
        handle = ctypes.c_void_p()
        flags = ctypes.c_uint(NON_BLOCKING)
        self._call("cuGreenCtxStreamCreate", ctypes.byref(handle), self._context, flags, priority)
        return torch.cuda.ExternalStream(handle.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with {status}")


@contextmanager
def cublas_sms(num_sms: int) -> Iterator[None]:
    """Let cuBLAS plan for ``num_sms`` SMs in GEMMs that this thread issues or captures meanwhile.

    Raises:
        RuntimeError: libcublas is not loaded, or refuses.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/libcublas.so" in line}
    if not paths:
        raise RuntimeError("libcublas is not loaded")
    set_target = ctypes.CDLL(paths.pop()).cublasSetSmCountTarget
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = set_target(handle, ctypes.c_int(num_sms))
    if status:
        raise RuntimeError(f"cublasSetSmCountTarget failed with {status}")
    try:
        yield
    finally:
        set_target(handle, ctypes.c_int(0))


@contextmanager
def torch_carveout(num_sms: int | None, library: str) -> Iterator[None]:
    """Ask torch to leave ``num_sms`` SMs free, with GEMMs from ``library`` ("cublas" or "cublaslt")."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(before)
