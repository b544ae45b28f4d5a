"""One layer's KV of a prompt on the device, layer after layer, with a shared prefix brought from the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from herald.models.noise_config import WindowLayers
from herald.transfer import Ticket

# (layer, where its rows go [kv_heads, shared positions, 2 * head_dim]) -> ticket. They are written after
# the work that was on the current stream.
LoadLayer = Callable[[int, torch.Tensor], Ticket]


class LayerRows:
    """The buffer that a prefill fills with one layer's KV.

    Where the prompt begins with a shared prefix there are two, so that the prefix's rows of the next layer
    arrive beside the work on this one; a device without room for the second waits for them instead.

    Args:
        shape: [kv_heads, positions, 2 * head_dim].
        num_layers: of the model.
        shared: positions at the beginning whose rows are loaded.
        load: starts to bring them. None where ``shared`` is 0.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        num_layers: int,
        shared: int = 0,
        load: LoadLayer | None = None,
    ) -> None:
        self._num_layers = num_layers
        self._shared = shared
        self._load = load
        self._buffers = [torch.empty(shape, dtype=dtype, device=device)]
        self._arriving: dict[int, Ticket] = {}
        if shared:
            with suppress(torch.OutOfMemoryError):
                self._buffers.append(torch.empty(shape, dtype=dtype, device=device))

    def begin(self, layer: int) -> torch.Tensor:
        """A layer's rows, the shared ones there for work on the current stream. Layers follow each other.

        Raises:
            what went wrong with the copy.
        """
        if self._shared:
            if layer not in self._arriving:
                self._start(layer)
            self._arriving.pop(layer).wait_device()
            if len(self._buffers) > 1 and layer + 1 < self._num_layers:
                self._start(layer + 1)
        return self._buffer(layer)

    def close(self) -> None:
        """Let copies end, then drop the buffers. Idempotent."""
        arriving, self._arriving = self._arriving, {}
        for ticket in arriving.values():
            with suppress(Exception):  # nobody is left to tell
                ticket.wait_host()
        self._buffers = []

    def _buffer(self, layer: int) -> torch.Tensor:
        return self._buffers[layer % len(self._buffers)]

    def _start(self, layer: int) -> None:
        assert self._load is not None
        self._arriving[layer] = self._load(layer, self._buffer(layer)[:, : self._shared])


class WindowRows:
    """Rows of a layer with a window while chunks of a prompt pass it: the last ones, and those of a chunk.

    Args:
        layers: gives their shape.
        chunk: positions of the longest chunk.
        dtype, device: of the rows.

    Attributes:
        length: positions before its own that a token sees.
    """

    def __init__(self, layers: WindowLayers, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = layers.window
        shape = (layers.num_kv_heads, self.length + chunk, 2 * layers.head_dim)
        self._rows = torch.empty(shape, dtype=dtype, device=device)
        self._used = 0

    @property
    def last(self) -> torch.Tensor:
        """[kv_heads, n, 2 * head_dim] of the last positions taken, the window's at most."""
        return self._rows[:, max(self._used - self.length, 0) : self._used]

    def take(self, start: int, size: int) -> tuple[torch.Tensor, int]:
        """Room for a chunk of ``size`` positions that begins at ``start``, behind those before it.

        Returns:
            [kv_heads, n + size, 2 * head_dim] and n: its first n rows are those of the n positions before the
            chunk.
        """
        if start == 0:
            self._used = 0
        kept = self.last
        before = kept.shape[1]
        self._rows[:, :before] = kept.clone()
        self._used = before + size
        return self._rows[:, : self._used], before
