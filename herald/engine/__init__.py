"""The step loop: schedule, forward, commit, emit."""
