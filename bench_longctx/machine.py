"""Describes the machine and the versions a figure was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "cupy-cuda13x", "herald-dllm")


def describe() -> dict[str, Any]:
    """Commit, CPU, memory, GPU and package versions as plain JSON values. Sizes in bytes.

    The commit is that of the checkout, with "-dirty" where files differ from it; None outside of one.
    """
    from herald.hardware import cpu_features, usable_cores

    gpu = None
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        gpu = {
            "name": props.name,
            "memory_bytes": props.total_memory,
            "multiprocessors": props.multi_processor_count,
        }
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "cpu_features": sorted(f for f in cpu_features() if f.startswith(("avx512", "amx", "avx2"))),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
