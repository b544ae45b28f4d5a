"""Where the time of a run goes: a workload, its spans as a trace and a picture, and what they add up to.

Spans are those that the engine keeps (`herald.engine.trace`); what ran on a CUDA device is timed by events.
How many kernels ran, and for how much of the time, is what the device recorded over some further blocks.
"""
