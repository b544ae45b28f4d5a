"""One large piece of host memory, on huge pages and pinned for the GPU when there is one."""

from __future__ import annotations

import contextlib
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch

from herald import hardware
from herald.config import check
from herald.errors import HostPoolTooSmall, UsageError

HUGE_PAGE_BYTES = 2 << 20
# One registration covers this much; a single asynchronous copy must not cross into the next one.
REGISTER_BYTES = 1 << 30
_SMALL_PAGE_BYTES = 4096
# Left to everybody else on the machine when the slab's size is checked.
_SPARE_BYTES = 256 << 20


class HostSlab:
    """``num_bytes`` of zeroed, 2 MiB-aligned private memory, touched once by all cores.

    Built as the fastest way measured for 16 GiB: private anonymous ``mmap``, ``MADV_HUGEPAGE``, parallel
    first touch, and ``cudaHostRegister`` piece by piece, of one piece while later ones are touched: 0.6 s
    on 16 cores, and 1.2 s the first time in a process, when CuPy is imported and CUDA starts. Takes exactly
    the bytes asked for (rounded up to a 4 KiB page), where pooled pinned allocators round up to a power of
    two.

    Args:
        num_bytes: size, at least 1.
        pin: register the memory with CUDA, so that the GPU reads and copies it directly. Where that is
            not possible the slab is ordinary memory, `pinned` is False and `pin_reason` says why.
        num_threads: threads of the first touch, 0 for all usable cores.
        register_bytes: size of a registered piece, a multiple of 2 MiB.

    Attributes:
        seconds: what making it took: ``"map"``, ``"pin"`` (inside `cudaHostRegister`) and ``"all"``.

    Raises:
        HostPoolTooSmall: the machine or its control group has no room; says how many bytes would fit.
    """

    def __init__(
        self, num_bytes: int, pin: bool, num_threads: int = 0, register_bytes: int = REGISTER_BYTES
    ) -> None:
        check(num_bytes >= 1, "num_bytes", num_bytes, "use 1 or more")
        check(
            register_bytes >= HUGE_PAGE_BYTES and register_bytes % HUGE_PAGE_BYTES == 0,
            "register_bytes",
            register_bytes,
            f"use a multiple of {HUGE_PAGE_BYTES}",
        )
        start = time.perf_counter()
        self.num_bytes = num_bytes
        self.pinned = False
        self.pin_reason = "" if pin else "not asked for"
        self._mapped_bytes = -(-num_bytes // _SMALL_PAGE_BYTES) * _SMALL_PAGE_BYTES
        self._registered: list[int] = []
        self._map = _map_memory(self._mapped_bytes)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES
        # The array keeps the mapping's buffer exported: while any view of it lives, the mapping cannot go.
        self._bytes: np.ndarray | None = whole[skip : skip + self._mapped_bytes]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE, skip, self._mapped_bytes)
        self.seconds = {"map": time.perf_counter() - start, "pin": 0.0}
        self._touch_and_pin(pin, num_threads or hardware.usable_cores(), register_bytes)
        self.seconds["all"] = time.perf_counter() - start

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._live().ctypes.data

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._bytes is None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the first bytes as a contiguous tensor, without a copy.

        Raises:
            UsageError: the shape needs more bytes than the slab has, or the slab is closed.
        """
        needed = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if needed > self.num_bytes:
            raise UsageError(f"a view of {needed} bytes does not fit", f"use at most {self.num_bytes} bytes")
        return torch.from_numpy(self._live()[:needed]).view(dtype).view(shape)

    def close(self) -> None:
        """Unregister and unmap. With views still alive the memory goes when the last of them does.

        The device must be done with the memory. Closing twice is allowed.
        """
        if self._bytes is None:
            return
        self._unpin()
        self._bytes = None
        # A live view exports the buffer; the mapping is then freed together with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> HostSlab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_registered", None):
            self._unpin()

    def _live(self) -> np.ndarray:
        if self._bytes is None:
            raise UsageError("the slab is closed", "make a new one")
        return self._bytes

    def _touch_and_pin(self, pin: bool, num_threads: int, register_bytes: int) -> None:
        """First touch on all cores; each piece is registered as soon as it has been touched."""
        memory, runtime = self._live(), None
        share = -(-memory.size // (8 * num_threads))
        step = min(register_bytes, -(-share // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        with ThreadPoolExecutor(num_threads) as executor:
            pieces = [memory[at : at + register_bytes] for at in range(0, memory.size, register_bytes)]
            touched = [
                [executor.submit(_touch, piece[at : at + step]) for at in range(0, piece.size, step)]
                for piece in pieces
            ]
            if pin:
                # After the touches were started: it may have to wake the driver.
                runtime, self.pin_reason = _cuda_runtime()
            for piece, touches in zip(pieces, touched, strict=True):
                for touch in touches:
                    touch.result()
                if runtime is not None and not self._register(runtime, piece):
                    runtime = None
        self.pinned = runtime is not None

    def _register(self, runtime: _CudaRuntime, piece: np.ndarray) -> bool:
        """Pin one piece; where that fails, let go of all and say why."""
        start = time.perf_counter()
        address = piece.ctypes.data
        try:
            runtime.register(address, piece.size)
        except RuntimeError as error:
            self._unpin()
            self.pin_reason = f"cudaHostRegister failed: {error}"
            return False
        self._registered.append(address)
        self.seconds["pin"] += time.perf_counter() - start
        return True

    def _unpin(self) -> None:
        runtime, _ = _cuda_runtime()
        while self._registered:
            address = self._registered.pop()
            if runtime is not None:
                runtime.unregister(address)
        self.pinned = False


class _CudaRuntime:
    """`cudaHostRegister` through CuPy's binding, or torch's. Failures are `RuntimeError`."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._cupy: Any = None
        try:
            from cupy.cuda import runtime
        except ImportError:
            self._torch: Any = torch.cuda.cudart()
        else:
            self._cupy = runtime

    def register(self, address: int, num_bytes: int) -> None:
        if self._cupy is not None:
            self._cupy.hostRegister(address, num_bytes, 0)
        else:
            _raise_cuda_error(self._torch.cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> None:
        if self._cupy is not None:
            self._cupy.hostUnregister(address)
        else:
            _raise_cuda_error(self._torch.cudaHostUnregister(address))


def _cuda_runtime() -> tuple[_CudaRuntime | None, str]:
    if not torch.cuda.is_available():
        return None, "CUDA is not available"
    return _CudaRuntime(), ""


def _raise_cuda_error(code: Any) -> None:
    if int(code) != 0:
        raise RuntimeError(f"CUDA error {int(code)}")


def _map_memory(num_bytes: int) -> mmap.mmap:
    """Private anonymous memory, large enough to align ``num_bytes`` to a huge page inside it."""
    fits = hardware.memory().free - _SPARE_BYTES
    remedy = f"use at most {max(0, fits)} bytes"
    if num_bytes > fits:
        raise HostPoolTooSmall(f"{num_bytes} bytes of host memory are not free", remedy)
    try:
        # Python maps shared memory unless told otherwise, and huge pages do not apply to that.
        return mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise HostPoolTooSmall(f"mapping {num_bytes} bytes failed ({error})", remedy) from error


def _touch(memory: np.ndarray) -> None:
    """Make the kernel back these pages now, not one fault at a time in the step loop. Without the GIL."""
    memory[::_SMALL_PAGE_BYTES] = 0
