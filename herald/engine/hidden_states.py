"""Hidden states of a prompt between one layer and the next, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from herald.kvstore.host_memory import HUGE_PAGE_BYTES, HostSlab

# Prompts whose hidden states take no more stay on the device.
KEPT_BYTES = 256 << 20
# Chunks on the device: one in work, the next one arriving, the one before leaving.
BUFFERS = 3


class HiddenStates:
    """Hands out the chunks of a prompt, layer after layer, each to be changed in place and given back.

    Those of a short prompt lie on the device. Those of a long one cross to page-locked memory and back,
    beside the work on other chunks, so that the device holds three chunks of a prompt of any length.

    Args:
        embed: int64 [c] to [c, hidden_size] on the device.
        tokens: int64 [n] on the device.
        hidden_size: of a position.
        dtype: of the hidden states.
        starts: first positions of the chunks, ascending from 0.
        reads: how often each layer takes all chunks; the last time they are changed.
    """

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        tokens: torch.Tensor,
        hidden_size: int,
        dtype: torch.dtype,
        starts: list[int],
        reads: int = 1,
    ) -> None:
        self._embed = embed
        self._reads = reads
        self._tokens = tokens
        self._edges = [*starts, tokens.numel()]
        self._turn = 0
        self._whole: torch.Tensor | None = None
        self._slab: HostSlab | None = None
        num_bytes = tokens.numel() * hidden_size * dtype.itemsize
        if num_bytes <= KEPT_BYTES or len(starts) < BUFFERS:
            self._whole = embed(tokens)
            return
        device = tokens.device
        self._cuda = device.type == "cuda"
        size = max(end - begin for begin, end in pairwise(self._edges))
        self._buffers = torch.empty(BUFFERS, size, hidden_size, dtype=dtype, device=device)
        self._in: Any = torch.cuda.Stream(device) if self._cuda else None
        self._out: Any = torch.cuda.Stream(device) if self._cuda else None
        self._loaded: list[Any] = [None] * BUFFERS
        self._left: list[Any] = [None] * BUFFERS  # after which a buffer may be written again
        self._saved: list[Any] = [None] * len(starts)  # after which a chunk may be read again
        # One registration, so that no copy crosses from one into the next. Last: `close` asks for the slab.
        whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._slab = HostSlab(num_bytes, self._cuda, register_bytes=whole)
        self._host = self._slab.tensor(dtype, (tokens.numel(), hidden_size))

    def take(self, layer: int, chunk: int, read: int = 0) -> torch.Tensor:
        """A chunk's input of a layer, [c, hidden_size] on the device; takes follow each other in order.

        Args:
            read: how often the layer took all chunks before.
        """
        begin, end = self._edges[chunk], self._edges[chunk + 1]
        if self._whole is not None:
            return self._whole[begin:end]
        buffer = self._turn % BUFFERS
        hidden = self._buffers[buffer, : end - begin]
        if layer == 0:
            self._wait(self._left[buffer])
            hidden.copy_(self._embed(self._tokens[begin:end]))
        else:
            self._wait(self._loaded[buffer])
        following = (chunk + 1) % (len(self._edges) - 1)
        if layer > 0 or (following == 0 and read == self._reads - 1):
            self._load(following, (buffer + 1) % BUFFERS)
        return hidden

    def give_back(self, chunk: int, changed: bool = True) -> None:
        """The chunk that was taken last holds its layer's output, by work on the current stream.

        Args:
            changed: False where it still holds the layer's input, to be taken once more.
        """
        if self._whole is not None:
            return
        buffer = self._turn % BUFFERS
        self._turn += 1
        begin, end = self._edges[chunk], self._edges[chunk + 1]
        done = self._event()
        if not changed:
            self._left[buffer] = done
            return
        with torch.cuda.stream(self._out):
            self._wait(done)
            self._host[begin:end].copy_(self._buffers[buffer, : end - begin], non_blocking=True)
            self._left[buffer] = self._saved[chunk] = self._event()

    def close(self) -> None:
        """Let the copies end and give the memory back. Idempotent."""
        self._whole = None
        slab, self._slab = self._slab, None
        if slab is not None:
            if self._cuda:
                self._in.synchronize()
                self._out.synchronize()
            del self._host, self._buffers
            slab.close()

    def __del__(self) -> None:
        if getattr(self, "_slab", None) is not None:
            self.close()

    def _load(self, chunk: int, buffer: int) -> None:
        begin, end = self._edges[chunk], self._edges[chunk + 1]
        with torch.cuda.stream(self._in):
            self._wait(self._left[buffer])
            self._wait(self._saved[chunk])
            self._buffers[buffer, : end - begin].copy_(self._host[begin:end], non_blocking=True)
            self._loaded[buffer] = self._event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._buffers.device).wait_event(event)

    def _event(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._buffers.device))
        return event
