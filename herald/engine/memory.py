"""What an engine allocates: the device arena, the host pool with its index, and who works on them.

Sizes follow the requests. Nothing is allocated before the first one; when no request holds memory and
the next one needs more, arena or pool is rebuilt larger. A fixed ``host_memory_bytes`` is allocated
once and never grows.
"""

from __future__ import annotations

import torch

from herald.config import OffloadConfig
from herald.engine.arena import DeviceArena
from herald.errors import HostPoolTooSmall
from herald.hardware import usable_cores
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.models import BlockModel
from herald.select import Selector
from herald.transfer import Transfer, make_transfer

PAGE_TOKENS = 64


class HostStore:
    """Host side of offloading: pool, key index, selector and the transfer into one arena.

    Args:
        layout: of the rows.
        num_pages: pages of the pool.
        arena: destination of transfers.
        config: offload options.
        pin: register the pool with CUDA.
    """

    def __init__(
        self, layout: RowLayout, num_pages: int, arena: DeviceArena, config: OffloadConfig, pin: bool
    ) -> None:
        threads = config.num_threads or usable_cores()
        self.layout = layout
        self.config = config
        self.num_threads = threads
        self.pool = HostPool(layout, num_pages, pin)
        self.index = KeyIndex(self.pool, config.index_bits)
        self.selector = Selector(self.pool, self.index, config.score_operator, threads)
        self.transfer: Transfer
        self.transfer_why = ""
        self.connect(arena)

    def connect(self, arena: DeviceArena) -> None:
        """(Re)build the transfer for another arena."""
        if hasattr(self, "transfer"):
            self.transfer.close()
        self.transfer, self.transfer_why = make_transfer(
            self.config.transfer,
            self.pool.flat_rows,
            arena.flat_rows,
            arena.rows.device,
            self.num_threads,
        )

    def close(self) -> None:
        self.transfer.close()
        self.selector.close()
        self.index.close()
        self.pool.close()


class EngineMemory:
    """Arena and host store of an engine, grown when idle.

    Args:
        model: gives shapes, dtype and device.
        config: offload options.
        poison: fill unowned device rows with NaN (tests).
    """

    def __init__(self, model: BlockModel, config: OffloadConfig, poison: bool = False) -> None:
        self.model = model
        self.config = config
        self.poison = poison
        self.arena = self._new_arena(0)
        self.store: HostStore | None = None
        page = config.page_size or max(PAGE_TOKENS, model.config.block_length)
        shape = model.config
        self.layout = RowLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, page, model.dtype)

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` token positions; 0 without offload."""
        return -(-positions // self.layout.page_size) if self.config.enabled else 0

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

    def ensure(self, arena_rows: int, pages: int) -> None:
        """Grow arena and pool to at least these sizes, as far as nobody uses them now.

        Raises:
            ResidentSetTooSmall, HostPoolTooSmall: the machine has no room.
        """
        if arena_rows > self.arena.capacity and self.arena.idle:
            self.arena = self._new_arena(0)  # the old one is freed before the new one is taken
            self.arena = self._new_arena(arena_rows)
            if self.store is not None:
                self.store.connect(self.arena)
        if pages and (self.store is None or self._pool_may_grow(pages)):
            if self.store is not None:
                self.store.close()
                self.store = None
            self.store = self._new_store(pages)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _pool_may_grow(self, pages: int) -> bool:
        assert self.store is not None
        allocator = self.store.pool.allocator
        idle = allocator.num_free == allocator.num_pages
        return idle and not self.config.host_memory_bytes and pages > allocator.num_pages

    def _new_arena(self, rows: int) -> DeviceArena:
        shape = self.model.config
        return DeviceArena(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            rows,
            self.model.dtype,
            self.model.device,
            self.poison,
        )

    def _new_store(self, pages: int) -> HostStore:
        fixed = self.config.host_memory_bytes // self.layout.page_bytes
        pin = self.model.device.type == "cuda"
        try:
            return HostStore(self.layout, fixed or pages, self.arena, self.config, pin)
        except HostPoolTooSmall as error:
            raise HostPoolTooSmall(
                f"{error.problem} (for {pages * self.layout.page_size:,} tokens of "
                f"{self.layout.token_bytes:,} bytes)",
                error.remedy or "use a shorter prompt",
            ) from error


def free_device_bytes(device: torch.device) -> int | None:
    """Bytes a CUDA device has free, None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
