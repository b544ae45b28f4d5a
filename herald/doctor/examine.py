"""Runs the probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from herald.config import OffloadConfig
from herald.doctor import bandwidth, context, device, host
from herald.doctor.finding import Finding
from herald.errors import UsageError, WeightsError


def examine(
    model: str | None = None,
    measure_bandwidth: bool = True,
    report: Callable[[str], None] | None = None,
    offload: OffloadConfig | None = None,
    **overrides: Any,
) -> list[Finding]:
    """Run every probe.

    Args:
        model: also say which context fits this model (folder, hub id, ``"tiny"`` or a preset).
        measure_bandwidth: copy memory for about a second.
        report: called with a probe's name before it runs.
        offload: options that contexts are computed with; the defaults if None.
        overrides: of ``model``, as for `herald.doctor.context.config_of`.

    Raises:
        UsageError, WeightsError: ``model`` cannot be found or its configuration cannot be read. A probe that
            fails otherwise becomes a finding that says so.
    """
    probes: dict[str, Callable[[], Finding]] = {
        "cpu": host.probe_cpu,
        "memory": host.probe_memory,
        "memlock": host.probe_memlock,
        "huge_pages": host.probe_huge_pages,
        "numa": host.probe_numa,
        "gpu": device.probe_gpu,
        "software": device.probe_software,
        "kernels": device.probe_kernels,
        "native": device.probe_native,
        "transfer": device.probe_transfer,
        "bandwidth": bandwidth.probe_bandwidth,
        "context": lambda: context.probe_context(model, offload, **overrides),
    }
    if not measure_bandwidth:
        del probes["bandwidth"]
    findings = []
    for name, probe in probes.items():
        if report is not None:
            report(name)
        findings.append(_run(name, probe))
    return findings


def _run(name: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except (UsageError, WeightsError):
        raise
    except Exception as error:  # a broken driver must not hide what the other probes found
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(
            name, {"error": problem}, (f"could not be examined: {problem}",), "see the error above"
        )
