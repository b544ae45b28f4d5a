"""What of a model fits into given memory at one context length: weights, resident sets, host pool, batch.

Arithmetic of a configuration alone, by the sizes of `herald.doctor.fit`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from herald.config import OffloadConfig
from herald.doctor.finding import Finding
from herald.doctor.fit import (
    WORKSPACE_BYTES,
    ContextFit,
    ModelShape,
    fit_context,
    host_request_bytes,
    prefill_device_bytes,
    prefill_host_bytes,
    set_rows,
)
from herald.doctor.units import format_bytes


@dataclass(frozen=True)
class BatchPlan:
    """Requests of one context length that decode at the same time; sizes in bytes.

    Attributes:
        context: positions of each request, prompt and output.
        weight_bytes, workspace_bytes, index_device_bytes: on the device, whatever the requests.
        prefill_bytes: on the device while a prompt is read, one at a time.
        resident_rows: of a request, in each layer and KV head; staging_rows: those that may arrive at once.
        resident_bytes, staging_bytes: of a request, on the device; with the rows of layers with a window.
        host_bytes: of a request, rows and key index; prefill_host_bytes: beside them, while one is read.
        device_memory, host_memory: what was planned for; ``device_memory`` is None on a CPU, where the host's
            memory holds both sides.
        batch: requests that fit, 0 for none; device_batch, host_batch: what each side would hold.
        dense_batch: what the device would hold without offload.
        longest: the largest context of a single request.
        index_bits: of a code of the key index.
        full_attention: sets are those of a request with a cache of its prompt.
    """

    model: str
    context: int
    weight_bytes: int
    workspace_bytes: int
    index_device_bytes: int
    prefill_bytes: int
    resident_rows: int
    staging_rows: int
    resident_bytes: int
    staging_bytes: int
    host_bytes: int
    prefill_host_bytes: int
    device_memory: int | None
    host_memory: int
    batch: int
    device_batch: int
    host_batch: int
    dense_batch: int
    longest: int
    index_bits: int
    full_attention: bool

    @property
    def fixed_device_bytes(self) -> int:
        """On the device beside the requests' sets."""
        return self.weight_bytes + self.workspace_bytes + self.index_device_bytes + self.prefill_bytes

    @property
    def device_bytes(self) -> int:
        """On the device for one request."""
        return self.fixed_device_bytes + self.resident_bytes + self.staging_bytes


def plan_batch(
    shape: ModelShape, context: int, host_memory: int, device_memory: int | None, config: OffloadConfig
) -> BatchPlan:
    """How many requests of ``context`` positions fit.

    Args:
        host_memory: bytes that may be used on the host.
        device_memory: bytes of the GPU; None for a run on the CPU.
    """
    resident, staging = set_rows(context, config)
    set_bytes = (resident + staging) * shape.kv_bytes + shape.window_bytes
    prefill, waiting = prefill_device_bytes(shape, context), prefill_host_bytes(shape, context)
    fixed = shape.weight_bytes + WORKSPACE_BYTES + prefill
    a_request = host_request_bytes(shape, context, config)
    if device_memory is None:
        both = max(host_memory - fixed - waiting, 0) // (a_request + set_bytes)
        device_batch = host_batch = both
    else:
        device_batch = max(device_memory - fixed - config.index_device_bytes, 0) // set_bytes
        host_batch = max(host_memory - waiting, 0) // a_request if a_request else device_batch
    room = max((host_memory if device_memory is None else device_memory) - fixed, 0)
    fit: ContextFit = fit_context(shape, host_memory, device_memory, config)
    return BatchPlan(
        model=shape.name,
        context=context,
        weight_bytes=shape.weight_bytes,
        workspace_bytes=WORKSPACE_BYTES,
        index_device_bytes=0 if device_memory is None else config.index_device_bytes,
        prefill_bytes=prefill,
        resident_rows=resident,
        staging_rows=staging,
        resident_bytes=resident * shape.kv_bytes + shape.window_bytes,
        staging_bytes=staging * shape.kv_bytes,
        host_bytes=a_request,
        prefill_host_bytes=waiting,
        device_memory=device_memory,
        host_memory=host_memory,
        batch=min(device_batch, host_batch),
        device_batch=device_batch,
        host_batch=host_batch,
        dense_batch=room // (context * shape.kv_bytes + shape.window_bytes),
        longest=fit.tokens,
        index_bits=config.index_bits,
        full_attention=shape.full_attention,
    )


def describe_plan(plan: BatchPlan) -> Finding:
    """The plan as a finding: what each part takes, and what would help where nothing fits."""
    device = "memory" if plan.device_memory is None else "GPU memory"
    lines = [
        f"{plan.model}, {plan.context:,} positions a request",
        f"weights: {format_bytes(plan.weight_bytes)}",
        f"resident set: {format_bytes(plan.resident_bytes)} a request, {plan.resident_rows:,} rows a KV head "
        f"({format_bytes(plan.staging_bytes)} more for rows that arrive)",
    ]
    if plan.full_attention:
        lines.append(
            "that is with a cache of the prompt (prefix or dual); without one, the default, nothing is kept"
        )
    lines.append(
        f"prefill: {format_bytes(plan.prefill_bytes)}, one prompt at a time; workspace: "
        f"{format_bytes(plan.workspace_bytes)}"
    )
    if plan.index_device_bytes:
        lines.append(f"key index on the GPU: {format_bytes(plan.index_device_bytes)}")
    lines.append(f"host pool: {format_bytes(plan.host_bytes)} a request (rows and key index)")
    available = format_bytes(plan.host_memory)
    if plan.device_memory is not None:
        available = f"{format_bytes(plan.device_memory)} of GPU memory, {available} of host memory"
    if plan.batch:
        side = "host memory" if plan.host_batch < plan.device_batch else device
        lines.append(
            f"largest batch: {plan.batch:,} in {available}, limited by {side} "
            f"(without offload {plan.dense_batch:,})"
        )
    else:
        lines.append(f"does not fit into {available}")
    return Finding("plan", asdict(plan), tuple(lines), _advice(plan))


def _advice(plan: BatchPlan) -> str:
    if plan.batch:
        return ""
    limit, needed = plan.device_memory, plan.device_bytes
    if limit is None:
        limit, needed = plan.host_memory, needed + plan.host_bytes + plan.prefill_host_bytes
    advice = []
    if not plan.device_batch:
        memory = "memory" if plan.device_memory is None else "GPU memory"
        advice.append(
            f"one request needs {format_bytes(needed)} of {memory}, {format_bytes(limit)} are there"
        )
    elif not plan.host_batch:
        needed = plan.host_bytes + plan.prefill_host_bytes
        there = format_bytes(plan.host_memory)
        advice.append(f"one request needs {format_bytes(needed)} of host memory, {there} are there")
    if plan.index_device_bytes and not plan.device_batch:
        advice.append("a lower --index-device-memory helps")
    if plan.longest:
        advice.append(f"a --context of at most {plan.longest:,} fits")
        if not plan.device_batch:
            advice.append("a lower --kv-budget helps")
        elif plan.index_bits == 8:  # exact keys (16 bits) have no index to be made smaller
            advice.append("--index-bits 4 helps")
    else:
        held = " and the key index" if plan.index_device_bytes else ""
        advice.append(f"no context fits beside the weights{held}: use a smaller model or more memory")
    return "; ".join(advice)
