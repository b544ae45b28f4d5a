"""Streams that record graphs are nobody else's, however many streams a process asks torch for."""

from __future__ import annotations

import threading

import pytest
import torch

from herald.cuda_driver import CudaDriver, exclusive_stream
from herald.engine.program import record_graph
from herald.engine.runner import recording_stream

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_torch_gives_them_to_nobody() -> None:
    mine = {recording_stream(DEVICE).cuda_stream, exclusive_stream(DEVICE, "a test").cuda_stream}
    assert len(mine) == 2 and 0 not in mine
    others = {torch.cuda.Stream(DEVICE, priority=p).cuda_stream for p in (0, -1) for _ in range(64)}
    assert not mine & others
    assert recording_stream(DEVICE) is recording_stream(DEVICE)


def test_work_on_every_stream_disturbs_no_recording() -> None:
    """Two threads record while a third keeps all of torch's streams busy."""
    streams = [torch.cuda.Stream(DEVICE) for _ in range(40)]
    over = threading.Event()

    def busy() -> None:
        values = torch.zeros(1 << 12, device=DEVICE)
        while not over.is_set():
            for stream in streams:
                with torch.cuda.stream(stream):
                    values.add_(1)
                    stream.record_event().query()

    counts = torch.zeros(2, 256, device=DEVICE)
    driver, graphs, errors = CudaDriver(DEVICE), [], []

    def record() -> None:
        try:
            graphs.extend(driver.capture(lambda: counts[0].add_(1)) for _ in range(50))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=busy), threading.Thread(target=record)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    steps = [record_graph(lambda: counts[1].add_(1), None, recording_stream(DEVICE)) for _ in range(50)]
    threads[1].join()
    over.set()
    threads[0].join()
    assert not errors and len(graphs) == 50
    torch.cuda.synchronize()
    before = counts.clone()  # `record_graph` runs what it records once
    for step in steps:
        step.replay()
    torch.cuda.synchronize()
    assert (counts[1] - before[1] == 50).all() and (counts[0] == before[0]).all()
    driver.release(graphs, [])
