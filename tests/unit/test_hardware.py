"""Reading the machine from made-up /proc, /sys and control group files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from herald import hardware

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_features_are_the_flags_of_the_first_processor(tmp_path: Path) -> None:
    write(
        tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni amx_int8\nbugs\t: none\n"}
    )
    assert hardware.cpu_features(tmp_path) == {"fpu", "avx2", "avx512_vnni", "amx_int8"}


def test_cpu_features_on_arm_and_without_the_file(tmp_path: Path) -> None:
    assert hardware.cpu_features(tmp_path) == frozenset()
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve\n"})
    assert hardware.cpu_features(tmp_path) == {"fp", "asimd", "sve"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 8),
        # The limit stands on the parent.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        # Inside a container the group's path is not under the mount.
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({}, 8),
    ],
)
def test_usable_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert hardware.usable_cores(write(tmp_path, files)) == expected


def test_usable_cores_keeps_to_the_affinity_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"})
    assert hardware.usable_cores(tmp_path) == 1


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n"}


def test_memory_without_a_limit(tmp_path: Path) -> None:
    info = hardware.memory(write(tmp_path, MEMINFO))
    assert info == hardware.MemoryInfo(64 * GIB, 32 * GIB, None, None)
    assert info.free == 32 * GIB


def test_memory_under_cgroup_version_2_counts_cache_as_room(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{2 * GIB}\n",
    }
    info = hardware.memory(write(tmp_path, MEMINFO | files))
    assert (info.cgroup_limit, info.cgroup_free, info.free) == (8 * GIB, 6 * GIB, 6 * GIB)


def test_memory_under_cgroup_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:memory:/x/y\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/x/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{base}/x/memory.usage_in_bytes": f"{GIB}\n",
        f"{base}/x/memory.stat": f"total_inactive_file {GIB // 2}\n",
        f"{base}/x/y/memory.limit_in_bytes": f"{40 * GIB}\n",
        f"{base}/x/y/memory.usage_in_bytes": f"{GIB}\n",
    }
    info = hardware.memory(write(tmp_path, MEMINFO | files))
    assert (info.cgroup_limit, info.free) == (4 * GIB, 3 * GIB + GIB // 2)


def test_huge_pages_and_numa(tmp_path: Path) -> None:
    assert hardware.huge_pages(tmp_path) == "unknown"
    assert hardware.numa_nodes(tmp_path) == {}
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/node/node1/cpulist": "4-5,7\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
    }
    write(tmp_path, files)
    assert hardware.huge_pages(tmp_path) == "madvise"
    assert hardware.numa_nodes(tmp_path) == {0: (0, 1, 2, 3), 1: (4, 5, 7)}


def test_this_machine_answers() -> None:
    info = hardware.memory()
    assert 0 < info.free <= info.total
    assert hardware.usable_cores() >= 1
    limit = hardware.memlock_limit()
    assert limit is None or limit > 0
