"""What this machine offers: CPU features, usable cores, free memory, huge pages, NUMA nodes.

Read from ``/proc``, ``/sys`` and the control groups, without torch. Every function takes the root of the
file system, so that tests can show it a made-up machine; a file that is missing or cannot be parsed counts
as "no limit" or "unknown", never as an error.
"""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# What cgroup v1 writes for "no limit" (a page-aligned LONG_MAX); anything this large is no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class MemoryInfo:
    """Host memory in bytes.

    Attributes:
        total: physical memory of the machine.
        machine_free: what the kernel says can be allocated without swapping.
        cgroup_limit: smallest limit of this process's control groups, None without one.
        cgroup_free: room left under those limits (page cache that can be dropped counts as room).
    """

    total: int
    machine_free: int
    cgroup_limit: int | None
    cgroup_free: int | None

    @property
    def free(self) -> int:
        """Bytes that can be allocated now: the smaller of the machine's and the control group's room."""
        if self.cgroup_free is None:
            return self.machine_free
        return min(self.machine_free, self.cgroup_free)


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Instruction set flags as the kernel names them (``avx2``, ``avx512_vnni``, ``amx_int8`` ...)."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def usable_cores(root: Path = ROOT) -> int:
    """Cores this process may use: its affinity mask, cut by the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0))
    quotas = [q for folder in _group_folders(root, "cpu") if (q := _cpu_quota(folder)) is not None]
    if quotas:
        cores = min(cores, max(1, int(min(quotas))))
    return max(1, cores)


def memory(root: Path = ROOT) -> MemoryInfo:
    """Total and free host memory, with the limits of this process's control groups."""
    values: dict[str, str] = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    )
    total = int(values.get("MemTotal", "0")) * 1024
    machine_free = int(values.get("MemAvailable", values.get("MemFree", "0"))) * 1024
    limits: list[int] = []
    rooms: list[int] = []
    for folder in _group_folders(root, "memory"):
        usage = _memory_usage(folder)
        if usage is not None:
            limits.append(usage[0])
            rooms.append(max(0, usage[0] - usage[1]))
    if not limits:
        return MemoryInfo(total, machine_free, None, None)
    return MemoryInfo(total, machine_free, min(limits), min(rooms))


def memlock_limit() -> int | None:
    """Bytes this process may lock in memory (``RLIMIT_MEMLOCK``), None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages(root: Path = ROOT) -> str:
    """Mode of transparent huge pages: ``always``, ``madvise``, ``never``, or ``unknown``."""
    match = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return match.group(1) if match else "unknown"


def numa_nodes(root: Path = ROOT) -> dict[int, tuple[int, ...]]:
    """CPUs of every NUMA node; empty when the kernel does not tell."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        nodes[int(folder.name[4:])] = _parse_cpu_list(_read(folder / "cpulist"))
    return dict(sorted(nodes.items()))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _parse_cpu_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` -> (0, 1, 2, 3, 8)."""
    cpus: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.extend(range(int(low), int(high or low) + 1))
    return tuple(cpus)


def _group_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups for ``controller``, from the leaf up to the mount.

    A limit of any ancestor applies. Inside a container the path of ``/proc/self/cgroup`` may not exist
    under the mount; then only the mount itself, which is the container's own group, is found.
    """
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controller, mount / controllers]
        else:
            continue
        parts = [p for p in group.split("/") if p not in ("", "..")]
        for base in bases:
            folders += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time per period that the group may use, None for no limit."""
    version2 = _read(folder / "cpu.max").split()
    if len(version2) == 2 and version2[0].isdigit() and int(version2[1]) > 0:
        return int(version2[0]) / int(version2[1])
    quota = _read(folder / "cpu.cfs_quota_us").strip()
    period = _read(folder / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _memory_usage(folder: Path) -> tuple[int, int] | None:
    """(limit, bytes in use that cannot be dropped) of the group, None for no limit."""
    for limit_name, usage_name, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(folder / limit_name).strip()
        if not limit.isdigit() or int(limit) >= _NO_LIMIT:
            continue
        usage = _read(folder / usage_name).strip()
        match = re.search(rf"^{dropped} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        cache = int(match.group(1)) if match else 0
        return int(limit), max(0, (int(usage) if usage.isdigit() else 0) - cache)
    return None
