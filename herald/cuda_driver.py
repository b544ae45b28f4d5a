"""The CUDA driver itself, for what torch does not give: functions by address, graphs, streams of one's own.

The extension calls functions by address, outside of the interpreter's lock. `CudaDriver` finds them in the
driver that torch has loaded; `HostDriver` stands for a device whose memory is the host's, for tests.

Torch hands the 32 streams it has of a device out in turn, so two users may have the same one. Where a graph
is recorded that must not be: what the other one does meanwhile would be recorded, or refused. Hence
`exclusive_stream`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

# In the order of DriverCalls in csrc/device_share.h.
CALLS = (
    "cuCtxSetCurrent",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuGraphLaunch",
)
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_THREAD_LOCAL = 1
_NON_BLOCKING = 1
# Held while a graph is recorded: the streams that record are the process's.
RECORDING = threading.RLock()


def exclusive_stream(device: torch.device, purpose: str) -> torch.cuda.ExternalStream:
    """The one stream of this process for a purpose on a device; torch gives it to nobody. Thread-safe.

    It lives as long as the process: cuBLAS keeps a workspace for every stream it has seen.

    Raises:
        RuntimeError: the driver makes none.
    """
    with RECORDING:
        return _make_stream(device, purpose)


@functools.lru_cache
def _make_stream(device: torch.device, purpose: str) -> torch.cuda.ExternalStream:
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context, if nobody has yet
        if error := ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING):
            raise RuntimeError(f"cuStreamCreate: CUDA error {error}")
    return torch.cuda.ExternalStream(stream.value, device=device)


class Driver(Protocol):
    """A device's streams, events and graphs, as handles.

    Attributes:
        calls: addresses of `CALLS`.
        context: what the first of them makes current.
        pinned: whether host memory must be page-locked for copies.
    """

    calls: list[int]
    context: int
    pinned: bool

    def stream(self) -> Any:
        """A new stream, for `handle` and `on`."""

    def handle(self, stream: Any) -> int:
        """What the calls take for a stream."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Torch's work within goes to the stream."""

    def event(self, blocking: bool) -> int:
        """A new event; ``blocking``: who waits for it sleeps."""

    def capture(self, work: Callable[[], None]) -> int:
        """A graph that does ``work``, which has run before and takes no memory."""

    def release(self, graphs: list[int], events: list[int]) -> None:
        """Give graphs and events back, none of which is under way."""


class CudaDriver:
    """A CUDA device's.

    Raises:
        RuntimeError: a function of the driver fails; says which.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = ctypes.CDLL("libcuda.so.1")
        self.calls = [self._address(name) for name in CALLS]
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context, if nobody has yet
            context = ctypes.c_void_p()
            self._call("cuCtxGetCurrent", ctypes.byref(context))
        self.context = context.value or 0

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, blocking: bool) -> int:
        event = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING | blocking * _BLOCKING_SYNC)
        return event.value or 0

    def capture(self, work: Callable[[], None]) -> int:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        stream = exclusive_stream(self._device, "kernels without torch's graphs")
        handle = ctypes.c_void_p(stream.cuda_stream)
        with RECORDING, torch.cuda.stream(stream):
            self._call("cuStreamBeginCapture_v2", handle, _THREAD_LOCAL)
            try:
                try:
                    work()
                except BaseException:
                    self._library.cuStreamEndCapture(handle, ctypes.byref(graph))
                    raise
                self._call("cuStreamEndCapture", handle, ctypes.byref(graph))
                self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
            finally:
                if graph:
                    self._library.cuGraphDestroy(graph)
        return executable.value or 0

    def release(self, graphs: list[int], events: list[int]) -> None:
        # whatever these say: at the process's end the driver may be gone before us
        for graph in graphs:
            self._library.cuGraphExecDestroy(ctypes.c_void_p(graph))
        for event in events:
            self._library.cuEventDestroy_v2(ctypes.c_void_p(event))

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {error}")


class HostDriver:
    """A device whose memory is the host's: every call has happened when it returns.

    Attributes:
        error: what the next copies and launches return.
    """

    pinned = False
    context = 0

    def __init__(self) -> None:
        self.error = 0
        self._graphs: list[Callable[[], None]] = []
        number, pointer = ctypes.c_uint64, ctypes.c_void_p
        size, flags = ctypes.c_size_t, ctypes.c_uint

        def copy(to: int, source: int, count: int, _stream: int) -> int:
            if not self.error:
                ctypes.memmove(to, source, count)
            return self.error

        def launch(graph: int, _stream: int) -> int:
            if not self.error:
                self._graphs[graph - 1]()
            return self.error

        kinds: list[tuple[Callable[..., int], tuple[Any, ...]]] = [
            (_nothing, (pointer,)),
            (copy, (number, pointer, size, pointer)),
            (copy, (pointer, number, size, pointer)),
            (_nothing, (pointer, pointer)),
            (_nothing, (pointer, pointer, flags)),
            (_nothing, (pointer,)),
            (_nothing, (pointer,)),
            (launch, (pointer, pointer)),
        ]
        self._functions = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(function) for function, types in kinds]
        self.calls = [ctypes.cast(function, pointer).value or 0 for function in self._functions]

    def stream(self) -> Any:
        return None

    def handle(self, stream: Any) -> int:
        return 0

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield

    def event(self, blocking: bool) -> int:
        return 0

    def capture(self, work: Callable[[], None]) -> int:
        self._graphs.append(work)
        return len(self._graphs)

    def release(self, graphs: list[int], events: list[int]) -> None:
        for graph in graphs:
            self._graphs[graph - 1] = _released


def _nothing(*_: Any) -> int:
    return 0


def _released() -> None:
    raise AssertionError("a graph that was given back")
