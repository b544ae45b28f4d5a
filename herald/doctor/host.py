"""Probes of the host: CPU, memory, limits, NUMA."""

from __future__ import annotations

import os
import platform

from herald import hardware
from herald.doctor.finding import Finding
from herald.doctor.units import format_bytes

# What selection and row packing can use, slowest first; names as the kernel reports them.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
ROOMY_BYTES = 8 << 30


def probe_cpu() -> Finding:
    """Instruction sets and cores."""
    features = hardware.cpu_features()
    present = [name for name in INSTRUCTION_SETS if name in features]
    usable, all_cores = hardware.usable_cores(), os.cpu_count() or 1
    advice = []
    if "avx2" not in features:
        advice.append("this CPU has no AVX2, so scanning the key index will be slow")
    if usable < all_cores:
        advice.append(f"{all_cores - usable} cores are closed to this process (affinity or cgroup quota)")
    return Finding(
        "cpu",
        {
            "machine": platform.machine(),
            "cores_usable": usable,
            "cores": all_cores,
            "instruction_sets": present,
        },
        (
            f"{platform.machine()}, {usable} of {all_cores} cores usable",
            ", ".join(present) or "no vector extensions",
        ),
        "; ".join(advice),
    )


def probe_memory() -> Finding:
    """Free host memory, and the limit of the control group."""
    info = hardware.memory()
    limit = "none" if info.cgroup_limit is None else format_bytes(info.cgroup_limit)
    advice = ""
    if info.free < ROOMY_BYTES:
        advice = (
            "the host pool holds the whole KV cache: free some memory, or raise the container's memory limit"
        )
    return Finding(
        "memory",
        {
            "total_bytes": info.total,
            "free_bytes": info.free,
            "machine_free_bytes": info.machine_free,
            "cgroup_limit_bytes": info.cgroup_limit,
            "cgroup_free_bytes": info.cgroup_free,
        },
        (f"{format_bytes(info.free)} free of {format_bytes(info.total)}, cgroup limit: {limit}",),
        advice,
    )


def probe_memlock() -> Finding:
    """Memory this process may lock."""
    limit = hardware.memlock_limit()
    # No advice: CUDA's driver pins past it on most systems, and the transfer probe says where it cannot.
    return Finding(
        "memlock", {"limit_bytes": limit}, ("unlimited" if limit is None else format_bytes(limit),)
    )


def probe_huge_pages() -> Finding:
    """Whether transparent huge pages can be had by asking."""
    mode = hardware.huge_pages()
    advice = (
        ""
        if mode in ("always", "madvise")
        else "switch them on for the host pool: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return Finding("huge_pages", {"transparent": mode}, (f"transparent huge pages: {mode}",), advice)


def probe_numa() -> Finding:
    """NUMA nodes and their CPUs."""
    nodes = hardware.numa_nodes()
    advice = ""
    if len(nodes) > 1:
        advice = "keep the process on the node of its GPU: numactl --cpunodebind=N --membind=N herald ..."
    counts = ", ".join(f"node {node}: {len(cpus)} CPUs" for node, cpus in nodes.items())
    return Finding(
        "numa",
        {"nodes": {str(node): list(cpus) for node, cpus in nodes.items()}},
        (counts or "not reported",),
        advice,
    )
