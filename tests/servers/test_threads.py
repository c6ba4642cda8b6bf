"""The thread pool: short calls share a thread, long ones delay no other, and none is lost or left running."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import eventually

from servers import threads
from servers.threads import Outcome, ThreadPool, max_threads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set at the end, for calls that wait for it."""
    event = threading.Event()
    yield event
    event.set()


def pool_threads(name: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(f"{name}-")]


class Submitted:
    """A call in a pool, and what waits for its outcome."""

    def __init__(self, pool: ThreadPool, fn: Callable[[], object]) -> None:
        self.waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.call = pool.submit(fn, self.waiter.set_result)


async def results(pool: ThreadPool, *calls: Callable[[], object]) -> list[object]:
    outcomes = await asyncio.gather(*(Submitted(pool, call).waiter for call in calls))
    return [value for _, value in outcomes]


async def test_short_calls_share_a_thread_and_start_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LONG_S", 60.0)
    pool = ThreadPool(8, "short")
    order: list[int] = []
    for _ in range(3):
        names = await results(
            pool, *(lambda n=n: order.append(n) or threading.current_thread().name for n in range(100))
        )
        assert set(names) == {"short-1"}
    assert order == [*range(100)] * 3
    pool.close()
    await eventually(lambda: not pool_threads("short"))


@pytest.mark.slow
async def test_thousand_blocking_calls_run_at_once(gate: threading.Event) -> None:
    pool = ThreadPool(threads.MAX_THREADS, "waiting")
    inside: list[int] = []
    calls = [Submitted(pool, lambda: inside.append(1) or gate.wait(60)) for _ in range(1000)]
    await eventually(lambda: len(inside) == 1000)
    gate.set()
    await asyncio.gather(*(call.waiter for call in calls))
    pool.close()
    await eventually(lambda: not pool_threads("waiting"))


async def test_computing_calls_get_a_bounded_number_of_threads(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def busy() -> float:
        looks.append(1)
        return time.monotonic()

    monkeypatch.setattr(threads, "MAX_COMPUTING", 3)
    monkeypatch.setattr(threads, "_MAX_CHECK_INTERVAL_S", threads._CHECK_INTERVAL_S)
    monkeypatch.setattr(time, "process_time", busy)
    pool = ThreadPool(64, "computing")
    calls = [Submitted(pool, lambda: gate.wait(60)) for _ in range(10)]
    await eventually(lambda: len(looks) > 60)
    assert len(pool_threads("computing")) == 3
    monkeypatch.setattr(time, "process_time", lambda: 0.0)  # they wait for something, it turns out
    await eventually(lambda: len(pool_threads("computing")) == 10)
    gate.set()
    await asyncio.gather(*(call.waiter for call in calls))
    pool.close()


async def test_hanging_call_costs_only_its_own_thread(gate: threading.Event) -> None:
    pool = ThreadPool(4, "hanging")
    pool._idle_s = -1
    hangs = Submitted(pool, lambda: gate.wait(60))
    before = Submitted(pool, lambda: "before")
    for _ in range(20):
        assert await results(pool, lambda: 1, lambda: 2) == [1, 2]
    assert await before.waiter == (True, "before")
    assert pool.abort(hangs.call)
    assert not hangs.waiter.done()
    more = [Submitted(pool, lambda: gate.wait(60)) for _ in range(4)]  # as many as the pool has
    await eventually(lambda: all(call.call.started for call in more))
    assert len(pool_threads("hanging")) == 5
    gate.set()
    await asyncio.gather(*(call.waiter for call in more))
    await eventually(lambda: len(pool_threads("hanging")) == 4)
    pool.close()
    await eventually(lambda: not pool_threads("hanging"))


async def test_outcome_is_not_delayed_by_a_long_call_after_it(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_LONG_S", 0.5)  # nothing before the last call is taken for long
    pool, begin = ThreadPool(1, "held"), threading.Event()
    Submitted(pool, lambda: begin.wait(60))
    short, long = Submitted(pool, lambda: "short"), Submitted(pool, lambda: gate.wait(60))
    begin.set()
    assert await asyncio.wait_for(asyncio.shield(short.waiter), 60) == (True, "short")
    assert not long.waiter.done()
    pool.close()


async def test_failing_callback_loses_no_other_outcome() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    pool = ThreadPool(1, "failing")
    pool.submit(lambda: "late", lambda _: 1 / 0)
    assert await asyncio.wait_for(results(pool, *[lambda: 1] * 10), 60) == [1] * 10
    assert [type(error) for error in errors] == [ZeroDivisionError]
    pool.close()


async def test_idle_threads_end_but_a_single_thread_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)
    several, one = ThreadPool(2, "several"), ThreadPool(1, "one")
    for _ in range(3):
        assert await results(several, lambda: 1) == [1]
        await eventually(lambda: not pool_threads("several"))
    first = await results(one, threading.current_thread)
    await asyncio.sleep(0.1)
    assert await results(one, threading.current_thread) == first
    one.close()
    await eventually(lambda: not pool_threads("one"))


async def test_closed_pool_finishes_its_queue_and_can_be_used_again() -> None:
    pool = ThreadPool(1, "closed")
    calls = [Submitted(pool, lambda: 1) for _ in range(20)]
    pool.close()
    await asyncio.gather(*(call.waiter for call in calls))
    await eventually(lambda: not pool_threads("closed"))
    assert await results(pool, lambda: 2) == [2]
    pool.close()
    await eventually(lambda: not pool_threads("closed"))


async def test_call_aborted_as_it_ends_keeps_its_thread_in_the_pool(gate: threading.Event) -> None:
    pool = ThreadPool(1, "ended")
    late: list[object] = []
    call = pool.submit(lambda: "ended", late.append)
    await asyncio.sleep(0)  # in which a thread is woken
    while call.thread is not None or not call.started:
        time.sleep(0.001)  # noqa: ASYNC251 - the loop is not to hear of its end
    assert pool.abort(call)  # its outcome is on its way
    hangs = Submitted(pool, lambda: gate.wait(60))
    await eventually(lambda: hangs.call.started and late == [(True, "ended")])
    assert pool._threads == len(pool_threads("ended")) == 1
    pool.close()


async def test_aborted_call_does_not_start(gate: threading.Event) -> None:
    pool = ThreadPool(1, "dropped")
    hangs, calls_made = Submitted(pool, lambda: gate.wait(60)), []
    dropped, kept = (
        Submitted(pool, lambda: calls_made.append("dropped")),
        Submitted(pool, lambda: calls_made.append("kept")),
    )
    assert not pool.abort(dropped.call)
    gate.set()
    await asyncio.gather(hangs.waiter, kept.waiter)
    assert calls_made == ["kept"]
    pool.close()


async def test_calls_wait_while_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, refusals = threading.Thread.start, iter(range(5))

    def refuse(thread: threading.Thread) -> None:
        if next(refusals, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = ThreadPool(4, "refused")
    with caplog.at_level(logging.ERROR, "servers"):
        assert await asyncio.wait_for(results(pool, lambda: 1), 60) == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot start a thread beside 0 others: can't start new thread; calls wait"
    ]
    pool.close()


def test_pids_limit_of_a_container_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "pids.max"
    monkeypatch.setattr(threads, "_PIDS_LIMITS", (str(tmp_path / "missing"), str(limit)))
    for text, expected in (("256\n", 64), ("1\n", 1), ("max\n", 1024), ("32768\n", 1024)):
        limit.write_text(text)
        assert max_threads() == expected
