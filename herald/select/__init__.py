"""Selection: which rows a block attends to, and what that changes in the resident set."""

from herald.select.reference import select_reference
from herald.select.selector import Selector
from herald.select.update import Plan, SlotGeometry
from herald.select.worker import BackgroundWorker

__all__ = [
    "BackgroundWorker",
    "Plan",
    "Selector",
    "SlotGeometry",
    "select_reference",
]
