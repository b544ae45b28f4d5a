"""The result of a probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What one probe found.

    Attributes:
        name: key of the finding in the JSON report, lower case.
        value: the facts, ready for JSON; sizes in bytes, rates in bytes per second.
        text: the facts for a person, one line each.
        advice: what would make things better here, or "" when nothing would.
    """

    name: str
    value: dict[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()
    advice: str = ""
