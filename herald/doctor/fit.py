"""How long a context fits: bytes per token on both sides, and the largest prefix within given memory.

Pure arithmetic. It follows what the engine allocates for one request: the host holds rows and key index
of the whole prefix, the device holds the weights, resident set and staging, and during prefill one layer's
KV and what of the hidden states stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from herald.config import OffloadConfig
from herald.engine.hidden_states import KEPT_BYTES
from herald.kvstore import choose_page_size

SEARCH_LIMIT = 1 << 26  # tokens
SCORE_BYTES = 16  # of a row in one KV head, while the first set is chosen
WORKSPACE_BYTES = 512 << 20  # activations and copies of prefill chunks, kernel workspace, allocator slack


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about memory.

    Attributes:
        num_layers: whose rows the host holds; those with a window are not among them.
        max_positions: positions the checkpoint was made for.
        weight_bytes: bytes of all weights in the run's dtype.
        dtype_bytes: bytes of a number in weights and KV.
        full_attention: rows are computed anew for every block and never kept on the host; see
            `herald.engine.canvas`.
        window_bytes: rows of a request in layers with a window, on the device, whatever its length.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    block_length: int
    max_positions: int
    weight_bytes: int
    dtype_bytes: int = 2
    full_attention: bool = False
    window_bytes: int = 0

    @property
    def layer_kv_bytes(self) -> int:
        """KV bytes of one token in one layer."""
        return self.num_kv_heads * 2 * self.head_dim * self.dtype_bytes

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.num_layers * self.layer_kv_bytes


@dataclass(frozen=True)
class ContextFit:
    """Largest contexts of one model on one machine, in tokens; 0 where not even the weights fit.

    Attributes:
        memory_tokens: what memory allows with offload: the smaller of ``host_tokens`` and ``device_tokens``.
        tokens: ``memory_tokens``, limited by the positions the checkpoint was made for.
        dense_tokens: what the device alone would hold without offload.
        limited_by: ``"host memory"``, ``"device memory"`` or ``"model"``.
    """

    model: str
    tokens: int
    memory_tokens: int
    host_tokens: int
    device_tokens: int
    dense_tokens: int
    limited_by: str
    kv_bytes_per_token: int
    index_bytes_per_token: float
    weight_bytes: int


def index_bytes_per_token(shape: ModelShape, bits: int, page_size: int) -> float:
    """Key index of one token in all layers: codes, a float32 scale a row, float32 page means; 0 if exact."""
    if bits == 16:
        return 0.0
    padded = 1 << (shape.head_dim - 1).bit_length()
    row = padded * bits / 8 + 4 + shape.head_dim * 4 / page_size
    return shape.num_layers * shape.num_kv_heads * row


def host_request_bytes(shape: ModelShape, tokens: int, config: OffloadConfig) -> int:
    """Host memory of a request's prefix: rows and key index, in whole pages."""
    if shape.full_attention:
        return 0
    page = choose_page_size(shape.block_length, config.page_size)
    padded = -(-tokens // page) * page
    return int(padded * (shape.kv_bytes + index_bytes_per_token(shape, config.index_bits, page)))


def prefill_host_bytes(shape: ModelShape, tokens: int) -> int:
    """Host memory of a prompt's hidden states between the layers of its prefill."""
    hidden = tokens * shape.hidden_size * shape.dtype_bytes
    return hidden if hidden > KEPT_BYTES else 0


def host_bytes(shape: ModelShape, tokens: int, config: OffloadConfig) -> int:
    """Host memory of a single request while its prompt is read."""
    return host_request_bytes(shape, tokens, config) + prefill_host_bytes(shape, tokens)


def set_rows(tokens: int, config: OffloadConfig) -> tuple[int, int]:
    """(resident, staging) rows of a request in each layer and KV head."""
    resident = config.resident_rows(tokens)
    # At one boundary at most every row of the set arrives, and never more rows than are absent.
    return resident, min(resident, tokens - resident)


def prefill_device_bytes(shape: ModelShape, tokens: int) -> int:
    """Device memory of a prompt's prefill: hidden states, one layer's KV and scores."""
    hidden = min(tokens * shape.hidden_size * shape.dtype_bytes, KEPT_BYTES)
    if shape.full_attention:
        hidden *= 2  # queries of a layer besides
    return hidden + tokens * (shape.layer_kv_bytes + SCORE_BYTES * shape.num_kv_heads)


def device_bytes(shape: ModelShape, tokens: int, config: OffloadConfig) -> int:
    """Device memory of one request: weights, resident set, staging, and the transient part of prefill."""
    rows = sum(set_rows(tokens, config))
    transient = prefill_device_bytes(shape, tokens)
    return shape.weight_bytes + WORKSPACE_BYTES + rows * shape.kv_bytes + shape.window_bytes + transient


def dense_device_bytes(shape: ModelShape, tokens: int) -> float:
    """Device memory of one request without offload: weights and every row."""
    transient = tokens * (2 * shape.hidden_size * shape.dtype_bytes + 4 * shape.head_dim)
    if shape.full_attention:
        transient += tokens * shape.layer_kv_bytes  # of the layer in work, beside those that are kept
    return shape.weight_bytes + WORKSPACE_BYTES + tokens * shape.kv_bytes + shape.window_bytes + transient


def largest(fits: Callable[[int], bool], limit: int = SEARCH_LIMIT) -> int:
    """Largest n in [0, limit] for which ``fits(n)``, which must not come back once lost; 0 if none does."""
    low, high = 0, limit + 1  # fits(low) is taken as true, fits(high) as false
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fit_context(
    shape: ModelShape, host_memory: int, device_memory: int | None, config: OffloadConfig
) -> ContextFit:
    """Largest context of one request.

    Args:
        host_memory: bytes that may be used on the host.
        device_memory: bytes free on the GPU; None on a CPU, where both sides share the host's memory.
    """
    if device_memory is None:
        shared = largest(
            lambda n: host_bytes(shape, n, config) + device_bytes(shape, n, config) <= host_memory
        )
        host_tokens = device_tokens = shared
        dense = largest(lambda n: dense_device_bytes(shape, n) <= host_memory)
    else:
        room = device_memory - config.index_device_bytes
        host_tokens = largest(lambda n: host_bytes(shape, n, config) <= host_memory)
        device_tokens = largest(lambda n: device_bytes(shape, n, config) <= room)
        dense = largest(lambda n: dense_device_bytes(shape, n) <= device_memory)
    memory = min(host_tokens, device_tokens)
    if memory >= shape.max_positions:
        limited_by = "model"
    else:
        limited_by = "host memory" if host_tokens <= device_tokens else "device memory"
    return ContextFit(
        model=shape.name,
        tokens=min(memory, shape.max_positions),
        memory_tokens=memory,
        host_tokens=host_tokens,
        device_tokens=device_tokens,
        dense_tokens=dense,
        limited_by=limited_by,
        kv_bytes_per_token=shape.kv_bytes,
        index_bytes_per_token=index_bytes_per_token(
            shape, config.index_bits, choose_page_size(shape.block_length, config.page_size)
        ),
        weight_bytes=shape.weight_bytes,
    )
