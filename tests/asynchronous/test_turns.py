"""Whose gradients come in now."""

import threading

import pytest

from hvdlite.asynchronous import turns
from hvdlite.asynchronous.turns import Turns


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_half_of_the_workers_push_at_once(workers):
    shared, most, at_once, lock = Turns(workers), 0, 0, threading.Lock()

    def pushes(worker):
        nonlocal most, at_once
        for _ in range(50):
            shared.begin(worker)
            with lock:
                at_once += 1
                most = max(most, at_once)
            with lock:
                at_once -= 1
            shared.end(worker)

    threads = [threading.Thread(target=pushes, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not at_once
    assert 1 <= most <= max(1, workers // 2)


def test_a_worker_that_stops_in_the_middle_holds_up_the_others_once(monkeypatch):
    monkeypatch.setattr(turns, "_LEAST_PATIENCE_S", 0.01)
    shared = Turns(3)
    shared.begin(0)
    shared.begin(1)  # 0 has stopped, and loses its turn
    shared.end(0)  # it goes on; its turn is over already
    waits = threading.Thread(target=shared.begin, args=(2,))
    shared._patience_s = 60.0
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    shared.end(1)
    waits.join(60)
    assert not waits.is_alive()
