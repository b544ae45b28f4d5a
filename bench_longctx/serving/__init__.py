"""Load on a running server, and what a long prompt does to the answers that run beside it."""
