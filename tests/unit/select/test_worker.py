"""The background worker: order, errors, closing."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

from herald.errors import UsageError
from herald.select import BackgroundWorker


def test_runs_in_order_on_one_daemon_thread() -> None:
    worker = BackgroundWorker()
    seen: list[tuple[int, int]] = []

    def job(i: int) -> int:
        seen.append((i, threading.get_ident()))
        return i * i

    futures = [worker.submit(job, i) for i in range(20)]
    assert [f.result(10) for f in futures] == [i * i for i in range(20)]
    assert [i for i, _ in seen] == list(range(20))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1
    assert worker._thread.daemon
    worker.close()


def test_errors_reach_the_future_and_the_next_job_runs() -> None:
    worker = BackgroundWorker()
    failed = worker.submit(lambda: 1 // 0)
    ended = worker.submit(lambda: (_ for _ in ()).throw(KeyboardInterrupt()).__next__())
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    with pytest.raises(KeyboardInterrupt):
        ended.result(10)
    assert worker.submit(lambda: 5).result(10) == 5
    worker.close()


def test_close_finishes_what_is_queued_and_refuses_more() -> None:
    worker = BackgroundWorker()
    gate = threading.Event()
    worker.submit(gate.wait, 10)
    last = worker.submit(lambda: "done")
    threading.Timer(0.05, gate.set).start()
    worker.close()
    worker.close()
    assert last.result(0) == "done"
    assert not worker._thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        worker.submit(print)


def test_close_from_a_job_does_not_deadlock() -> None:
    worker = BackgroundWorker()
    worker.submit(worker.close).result(10)
    worker._thread.join(10)
    assert not worker._thread.is_alive()


def test_a_cancelled_job_does_not_run() -> None:
    worker = BackgroundWorker()
    gate = threading.Event()
    worker.submit(gate.wait, 10)
    ran: list[int] = []
    future = worker.submit(ran.append, 1)
    assert future.cancel()
    gate.set()
    worker.close()
    assert ran == []


def test_a_finished_job_keeps_nothing_alive() -> None:
    worker = BackgroundWorker()
    array = np.zeros(4)
    alive = weakref.ref(array)
    worker.submit(np.sum, array).result(10)
    worker.submit(int).result(10)
    del array
    assert alive() is None
    worker.close()


def test_at_the_interpreters_end_only_the_job_that_runs_ends() -> None:
    worker = BackgroundWorker()
    begun, gate = threading.Event(), threading.Event()

    def job() -> str:
        begun.set()
        gate.wait(10)
        return "done"

    running, told = worker.submit(job), []
    waiting = worker.submit(lambda: "never")
    waiting.add_done_callback(lambda future: told.append(future.exception()))
    assert begun.wait(10)
    worker.stop()
    assert isinstance(waiting.exception(0), CancelledError)
    assert told == [waiting.exception()]
    with pytest.raises(UsageError, match="closed"):
        worker.submit(print)
    gate.set()
    worker.join(10)
    assert running.result(0) == "done" and not worker._thread.is_alive()
    worker.stop()
    worker.close()
