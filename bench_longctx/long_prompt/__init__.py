"""One long prompt through the whole system, with its memory and its overlap."""
