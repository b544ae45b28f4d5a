"""Where the time of a run goes: a workload, its spans as a trace and a picture, and what they add up to.

Spans are those that the engine keeps (`herald.engine.trace`). On CUDA a forward is timed by the host, around
a step whose result is read back; transfers are timed by events.
"""
