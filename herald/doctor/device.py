"""Probes of the GPU, of the optional parts, and of the kernels in use."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from herald.doctor.finding import Finding
from herald.doctor.units import format_bytes

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "cupy-cuda13x")
PIN_TEST_BYTES = 32 << 20


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def device_type() -> str:
    """The device ``--device auto`` takes."""
    return "cuda" if cuda_available() else "cpu"


def free_device_memory() -> int | None:
    """Free bytes of the current GPU; None without one."""
    import torch

    return torch.cuda.mem_get_info()[0] if cuda_available() else None


def probe_gpu() -> Finding:
    """CUDA devices that torch sees."""
    import torch

    if not cuda_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        advice = (
            "install a CUDA build of torch to use a GPU"
            if torch.version.cuda is None
            else "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
        return Finding(
            "gpu", {"devices": [], "reason": reason}, (f"none: {reason}; HERALD runs on the CPU",), advice
        )
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    text = tuple(
        f"cuda:{index} {each['name']} (sm {each['compute_capability']}), {each['multiprocessors']} SMs, "
        f"{format_bytes(each['free_bytes'])} free of {format_bytes(each['total_bytes'])}"
        for index, each in enumerate(devices)
    )
    return Finding("gpu", {"devices": devices, "reason": ""}, text)


def probe_software() -> Finding:
    """Versions of what the runtime builds on."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    shown = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return Finding("software", {"versions": versions}, (shown,))


def probe_kernels() -> Finding:
    """Backend of every kernel on the device that would be used, and why a better one is not active."""
    import herald_kernels

    device = device_type()
    operations: dict[str, dict[str, str]] = {}
    for operation in herald_kernels.OPS:
        try:
            backend = herald_kernels.backend(operation, device)
            operations[operation] = {"backend": backend.name, "reason": backend.reason}
        except (RuntimeError, ValueError) as error:
            operations[operation] = {"backend": "none", "reason": str(error)}
    by_backend: dict[str, list[str]] = {}
    for operation, found in operations.items():
        by_backend.setdefault(found["backend"], []).append(operation)
    text = tuple(f"{name} on {device}: {', '.join(sorted(ops))}" for name, ops in sorted(by_backend.items()))
    reasons = sorted({found["reason"] for found in operations.values()} - {""})
    return Finding("kernels", {"device": device, "operations": operations}, text, "; ".join(reasons))


def probe_native() -> Finding:
    """The C++ extension."""
    from herald.kvstore.native import find_native

    try:
        importlib.import_module("herald._native")
    except ImportError as error:
        absent = importlib.util.find_spec("herald._native") is None
        reason = "not built" if absent else f"does not load: {error}"
        advice = (
            "numba selects and packs rows, slower: install g++ and pybind11, "
            "then reinstall herald-dllm with HERALD_BUILD_EXT=1"
        )
        return Finding("native", {"active": False, "reason": reason}, (f"herald._native {reason}",), advice)
    found = find_native()
    if found.module is None:
        advice = "rebuild it: reinstall herald-dllm with HERALD_BUILD_EXT=1"
        return Finding("native", {"active": False, "reason": found.reason}, (found.reason,), advice)
    isas: dict[str, str] = found.module.scan_isas()
    scan = found.module.scan_isa()
    better = [f"not {isa}: {why}" for isa, why in isas.items() if why]
    beside = cuda_available()
    shared = "the GPU scores a share of 8 and 4 bit indexes" if beside else "no GPU scores a share of it"
    text = ", ".join([f"herald._native is active, selection uses {scan}", *better, shared])
    value = {"active": True, "reason": "", "scan_isa": scan, "scan_isas": isas, "scan_on_device": beside}
    return Finding("native", value, (text,))


def probe_transfer() -> Finding:
    """How rows would reach the device, and whether host memory can be pinned for it."""
    if not cuda_available():
        return Finding(
            "transfer", {"mode": "thread", "pinned": False, "reason": ""}, ("worker thread (CPU device)",)
        )
    import torch

    from herald.kvstore import HostSlab
    from herald.transfer import make_transfer

    with HostSlab(PIN_TEST_BYTES, pin=True) as slab:
        pinned, reason = slab.pinned, slab.pin_reason
        pool = slab.tensor(torch.uint8, (PIN_TEST_BYTES // 512, 512))
        arena = torch.empty(1024, 512, dtype=torch.uint8, device="cuda")
        transfer, why = make_transfer("auto", pool, arena, arena.device, 1)
        mode = type(transfer).__name__.removesuffix("Transfer").lower()
        transfer.close()
        del pool
    mode = {"zerocopy": "zero_copy"}.get(mode, mode)
    advice = "; ".join(text for text in (reason, why) if text)
    if "CuPy" in advice:
        advice += "; pip install 'herald-dllm[cuda]'"
    if not pinned:
        advice += "; raise the limit of locked memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    text = f"{mode}, host memory {'pinned' if pinned else 'not pinned'}"
    return Finding("transfer", {"mode": mode, "pinned": pinned, "reason": advice}, (text,), advice)
