"""Bytes and seconds as people read them."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``: powers of 1024, three digits at most before the point."""
    value, unit = float(count), 0
    while abs(value) >= 1000 and unit + 1 < len(_BYTE_UNITS):
        value /= 1024
        unit += 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Seconds with three significant digits, in milliseconds below one second."""
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 0.9995 else f"{seconds:.2f} s"
