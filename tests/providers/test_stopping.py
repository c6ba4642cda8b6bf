"""A stop gets past a start that has only just begun."""

import threading

from openenv_core.providers.stopping import stopped

PATIENCE_S = 20


def test_a_start_that_begins_after_the_stop_was_said_hears_of_it() -> None:
    stopping, lock, said = threading.Event(), threading.Lock(), threading.Event()
    lock.acquire()  # a start is under way
    heard: list[bool] = []

    def start() -> None:
        said.wait(PATIENCE_S)
        stopping.clear()  # as every start does
        heard.append(stopping.wait(PATIENCE_S))
        lock.release()

    def end() -> None:
        stopping.set()
        said.set()

    thread = threading.Thread(target=start)
    thread.start()
    with stopped(end, lock):
        thread.join(PATIENCE_S)
    assert heard == [True]
    assert not lock.locked()
