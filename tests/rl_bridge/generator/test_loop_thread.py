"""A loop on a thread of its own: what is submitted is answered, one way or the other."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import pytest

from rl_bridge.errors import GeneratorError
from rl_bridge.generator.loop_thread import LoopThread

WAIT_S = 20.0


class Stage:
    def __init__(self, failure: Exception | None = None) -> None:
        self.cleaned = 0
        self.failure = failure
        self.thread = LoopThread("test", self.clean_up)

    async def clean_up(self) -> None:
        self.cleaned += 1
        if self.failure is not None:
            raise self.failure


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_work_begins_in_the_order_in_which_it_is_submitted() -> None:
    stage = Stage()
    stage.thread.start()
    begun: list[int] = []

    async def work(number: int) -> tuple[int, str]:
        begun.append(number)
        return number, threading.current_thread().name

    futures = [stage.thread.submit(work(number)) for number in range(50)]
    assert [future.result(WAIT_S) for future in futures] == [(number, "test") for number in range(50)]
    assert begun == list(range(50))
    stage.thread.close(WAIT_S)
    assert (stage.thread.ended.result(0), stage.cleaned) == (None, 1)


def test_a_cancelled_future_ends_its_work() -> None:
    stage = Stage()
    stage.thread.start()
    ended: Future[None] = Future()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set_result(None)

    future = stage.thread.submit(work())
    stage.thread.submit(asyncio.sleep(0)).result(WAIT_S)  # it has begun
    assert future.cancel()
    ended.result(WAIT_S)
    stage.thread.close(WAIT_S)


def test_the_end_fails_what_is_under_way_and_what_comes_after() -> None:
    stage = Stage()
    stage.thread.start()
    futures = [stage.thread.submit(forever()) for _ in range(20)]
    stage.thread.end(RuntimeError("it broke"))
    stage.thread.end(RuntimeError("later"))  # the first word counts
    for future in futures:
        with pytest.raises(GeneratorError, match="the engine has failed: it broke"):
            future.result(WAIT_S)
    with pytest.raises(GeneratorError, match="it broke"):
        stage.thread.submit(forever())
    with pytest.raises(GeneratorError, match="it broke"):
        stage.thread.require_open()
    assert str(stage.thread.ended.exception(WAIT_S)) == "it broke"
    assert stage.cleaned == 1


def test_work_that_clings_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_bridge.generator.loop_thread.GRACE_S", 0.05)
    stage = Stage()
    stage.thread.start()

    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        await forever()

    stage.thread.submit(work())
    stage.thread.submit(asyncio.sleep(0)).result(WAIT_S)
    stage.thread.close(WAIT_S)
    assert (stage.thread.ended.result(0), stage.cleaned) == (None, 1)


def test_before_the_start_nothing_is_taken() -> None:
    stage = Stage()
    with pytest.raises(GeneratorError, match="closed"):
        stage.thread.submit(forever())
    stage.thread.close(WAIT_S)


def test_who_waits_for_its_end_no_longer_does_not_take_it_from_the_others() -> None:
    stage = Stage()
    stage.thread.start()
    assert not stage.thread.ended.cancel()
    stage.thread.close(WAIT_S)
    assert stage.thread.ended.result(WAIT_S) is None


def test_a_clean_up_that_fails_is_told_of() -> None:
    stage = Stage(RuntimeError("it is stuck"))
    stage.thread.start()
    stage.thread.close(WAIT_S)
    assert str(stage.thread.ended.exception(0)) == "it is stuck"
