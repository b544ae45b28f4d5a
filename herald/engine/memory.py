"""What an engine allocates: the device arena, the host pool with its index, and who works on them.

Sizes follow the requests. Nothing is allocated before the first one; when no request holds memory and
the next one needs more, the arena gets larger rows and the pool is rebuilt. A fixed
``host_memory_bytes`` is allocated once and never grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np

from herald.config import OffloadConfig
from herald.engine.arena import DeviceArena
from herald.errors import HostPoolTooSmall, ResidentSetTooSmall
from herald.hardware import usable_cores
from herald.kvstore import HostPool, KeyIndex, PrefixCache, RowLayout, choose_page_size
from herald.kvstore.pages import page_runs
from herald.models import BlockModel
from herald.select import Selector
from herald.transfer import Transfer, make_transfer
from herald.transfer.streams import DeviceStreams

# Cores left to the step loop and to whoever feeds the device, where one runs beside the selection.
SPARE_CORES = 2


def default_threads(beside_device: bool) -> int:
    """Threads of selection where the user names no number."""
    cores = usable_cores()
    return cores - SPARE_CORES if beside_device and cores > 2 * SPARE_CORES else cores


class MemoryNeed(NamedTuple):
    """What requests need; see `EngineMemory.ensure`."""

    arena_rows: int
    pages: int
    keep_prefixes: bool = True
    requests: int = 0


class HostStore:
    """Host side of offloading: pool, key index, selector and the transfer into one arena.

    Args:
        layout: of the rows.
        num_pages: pages of the pool.
        arena: destination of transfers.
        config: offload options.
        pin: register the pool with CUDA, and the index if the device scans a share of it.
        streams: of the arena's device.

    Attributes:
        transfer_why: why ``transfer="auto"`` could not take the fastest way, or "".

    Raises:
        HostPoolTooSmall: the machine has no room for the pool.
        ResidentSetTooSmall: the device has none for ``index_device_bytes``.
    """

    def __init__(
        self,
        layout: RowLayout,
        num_pages: int,
        arena: DeviceArena,
        config: OffloadConfig,
        pin: bool,
        streams: DeviceStreams,
    ) -> None:
        self.layout = layout
        self.streams = streams
        self.config = config
        self.num_threads = config.num_threads or default_threads(pin)
        with ExitStack() as undo:
            self.pool = HostPool(layout, num_pages, pin, self.num_threads)
            undo.callback(self.pool.close)
            device = arena.rows.device if pin and config.scan_on_device else None
            self.index = KeyIndex(self.pool, config.index_bits, self.num_threads, pin=device is not None)
            undo.callback(self.index.close)
            self.selector = Selector(
                *(self.pool, self.index, config.score_operator, self.num_threads),
                device=device,
                device_bytes=config.index_device_bytes,
            )
            undo.callback(self.selector.close)
            self._transfer: Transfer | None = None
            self.transfer_why = ""
            self.connect(arena)
            undo.pop_all()

    @property
    def transfer(self) -> Transfer:
        """The transfer into the arena."""
        assert self._transfer is not None, "the store is not connected to an arena"
        return self._transfer

    def connect(self, arena: DeviceArena) -> None:
        """Make the transfer into the arena's rows; once more after they were replaced."""
        self._transfer, self.transfer_why = make_transfer(
            self.config.transfer,
            self.pool.flat_rows,
            arena.flat_rows,
            arena.rows.device,
            self.num_threads,
            self.streams,
        )

    def disconnect(self) -> None:
        """Complete the transfers and let go of the arena's rows. Idempotent."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def copy_pages(self, other: HostStore, pages: np.ndarray, into: np.ndarray) -> None:
        """Take over rows and codes of another store of the same layout and index.

        Args:
            pages: int32 [n] in ``other``.
            into: int32 [n] here, consecutive.
        """
        for begin, end in page_runs(pages):
            old = slice(int(pages[begin]), int(pages[begin]) + end - begin)
            new = slice(int(into[begin]), int(into[begin]) + end - begin)
            for layer in range(self.layout.num_layers):
                self.pool.rows[layer, new].copy_(other.pool.rows[layer, old])
                self.index.copy_pages(other.index, layer, old, new)

    def close(self) -> None:
        self.disconnect()
        self.selector.close()
        self.index.close()
        self.pool.close()


class EngineMemory:
    """Arena and host store of an engine, grown when idle.

    Args:
        model: gives shapes, dtype and device.
        config: offload options.
        poison: fill unowned device rows with NaN (tests).

    Attributes:
        arena: the device rows, the same object for as long as the engine lives.
        windows: likewise, of the layers with a window: a ring of as many rows for each request. None
            without such layers.
        store: the host side; None without offload, and before a request needs a page.
        shares_prefixes: whether requests share pages.
        prefixes: pages of the store that can be shared.

    Raises:
        InvalidOption: ``page_size`` is not a multiple of the model's block length.
    """

    def __init__(self, model: BlockModel, config: OffloadConfig, poison: bool = False) -> None:
        self.model = model
        self.config = config
        shape = model.config
        # rows of a canvas's prompt are sent by pages, whatever its blocks are
        block = 1 if shape.full_attention else shape.block_length
        page_size = choose_page_size(block, config.page_size)
        layers, heads, dim = shape.num_full_layers, shape.num_kv_heads, shape.head_dim
        self.layout = RowLayout(layers, heads, dim, page_size, model.dtype)
        self.arena = DeviceArena(layers, heads, dim, 0, model.dtype, model.device, poison)
        self.windows: DeviceArena | None = None
        if (windowed := shape.windowed) is not None:
            heads, dim, layers = windowed.num_kv_heads, windowed.head_dim, len(windowed.layers)
            self.windows = DeviceArena(layers, heads, dim, 0, model.dtype, model.device, poison)
        self.store: HostStore | None = None
        # A position's KV must depend on nothing behind its block, and all layers' rows be in the pool.
        shareable = not shape.full_attention and shape.windowed is None
        self.shares_prefixes = config.enabled and config.prefix_sharing and shareable
        self.prefixes = PrefixCache()
        self._streams = DeviceStreams(model.device)

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` token positions; 0 without offload."""
        return self.layout.pages_for(positions) if self.config.enabled else 0

    def require_pages(self, pages: int, prompt_tokens: int) -> None:
        """Raise `HostPoolTooSmall` when a fixed pool can never hold ``pages``."""
        fixed = self.config.host_memory_bytes
        if fixed and pages > (room := fixed // self.layout.page_bytes):
            largest = max(room * self.layout.page_size - 1, 0)
            raise HostPoolTooSmall(
                f"the prompt of {prompt_tokens:,} tokens and its output need {pages} pages "
                f"({pages * self.layout.page_bytes:,} bytes) and the host pool has {room}",
                f"use at most {largest:,} tokens in all, or a pool of {pages * self.layout.page_bytes} bytes",
            )

    @property
    def replaced(self) -> int:
        """How often device rows were put in the place of others."""
        return self.arena.replaced + (0 if self.windows is None else self.windows.replaced)

    @property
    def window_rows(self) -> int:
        """Rows of a request's ring in a layer with a window."""
        windowed = self.model.config.windowed
        return 0 if windowed is None else windowed.window

    def ensure_one(self, needs: Sequence[MemoryNeed]) -> None:
        """`ensure` the first of several needs that the machine has room for.

        Raises:
            ResidentSetTooSmall, HostPoolTooSmall: there is none.
        """
        for need in needs[:-1]:
            with suppress(HostPoolTooSmall, ResidentSetTooSmall):
                self.ensure(*need)
                return
        self.ensure(*needs[-1])

    def ensure(self, arena_rows: int, pages: int, keep_prefixes: bool = True, requests: int = 0) -> None:
        """Grow arena and pool to at least these sizes, as far as nobody uses them now.

        Args:
            keep_prefixes: a pool that grows takes its shared pages along, which needs room for both at once.
            requests: that hold rows of layers with a window, where there are such layers.

        Raises:
            ResidentSetTooSmall, HostPoolTooSmall: the machine has no room.
        """
        if arena_rows > self.arena.capacity and self.arena.idle:
            self._resize_arena(arena_rows)
        rings = requests * self.window_rows
        if self.windows is not None and rings > self.windows.capacity and self.windows.idle:
            self.windows.resize(rings)
        if pages and (self.store is None or self._pool_may_grow(pages)):
            self._replace_store(pages, keep_prefixes)

    def close(self) -> None:
        """Give device and host memory back. Idempotent."""
        self._drop_store()
        self.arena.resize(0)
        if self.windows is not None:
            self.windows.resize(0)

    def _resize_arena(self, rows: int) -> None:
        if self.store is not None:
            self.store.disconnect()  # its transfer would keep the old rows beside the new ones
        self.arena.resize(rows)
        if self.store is not None:
            self.store.connect(self.arena)

    def _pool_may_grow(self, pages: int) -> bool:
        assert self.store is not None
        allocator = self.store.pool.allocator
        idle = allocator.num_free + len(self.prefixes) == allocator.num_pages
        return idle and not self.config.host_memory_bytes and pages > allocator.num_pages

    def _replace_store(self, pages: int, keep_prefixes: bool) -> None:
        if not keep_prefixes or not len(self.prefixes):
            self._drop_store()
        if self.store is not None and self.store.selector.device_scan is not None:
            self.store.selector.device_scan.let_go()  # the next one may hold as much
        new = self._new_store(pages)
        if self.store is None:
            self.prefixes.attach(new.pool.allocator)
        else:
            new.copy_pages(self.store, *self.prefixes.move(new.pool.allocator))
            self.store.close()
        self.store = new

    def _drop_store(self) -> None:
        if self.store is not None:
            self.prefixes.clear()
            self.store.close()
            self.store = None

    def _new_store(self, pages: int) -> HostStore:
        fixed = self.config.host_memory_bytes // self.layout.page_bytes
        pin = self.model.device.type == "cuda"
        try:
            return HostStore(self.layout, fixed or pages, self.arena, self.config, pin, self._streams)
        except HostPoolTooSmall as error:
            raise HostPoolTooSmall(
                f"{error.problem} (for {pages * self.layout.page_size:,} tokens of "
                f"{self.layout.token_bytes:,} bytes)",
                error.remedy or "use a shorter prompt",
            ) from error
