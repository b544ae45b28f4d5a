"""Speed of the runtime: against its hardware, and against a dense engine."""
