"""Selection: which rows a block attends to, and what that changes in the resident set."""

from herald.select.difference import Difference, difference
from herald.select.reference import select_reference
from herald.select.selector import Selector
from herald.select.worker import BackgroundWorker

__all__ = ["BackgroundWorker", "Difference", "Selector", "difference", "select_reference"]
