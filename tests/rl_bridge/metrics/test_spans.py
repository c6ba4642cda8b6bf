"""Every instant of a process is work, idle or unaccounted for, and is counted once."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from rl_bridge.metrics.spans import Spans, SpanTotals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spans(clock: Clock) -> Spans:
    return Spans(clock=clock, cpu_clock=lambda: clock.now / 2)


def test_work_idle_and_the_rest_add_up(spans: Spans, clock: Clock) -> None:
    clock.now += 1
    with spans.span("train"):
        clock.now += 2
        with spans.span("sample", waits_for="rollout"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    totals = spans.totals()
    assert totals.work == {"train": 10}
    assert totals.idle == {"rollout": 4}
    assert (totals.wall_s, totals.unaccounted_s, totals.cpu_s) == (31, 17, 15.5)


def test_span_that_ends_before_an_inner_one_is_over(spans: Spans, clock: Clock) -> None:
    def abandoned() -> Iterator[None]:
        with spans.span("outer"):
            yield

    generator = abandoned()
    next(generator)
    with spans.span("inner"):
        generator.close()
        clock.now += 1
    clock.now += 2
    assert (spans.totals().work, spans.totals().unaccounted_s) == ({"inner": 1, "outer": 0}, 2)


async def test_tasks_that_work_share_the_time_and_hide_those_that_wait(spans: Spans, clock: Clock) -> None:
    async def hold(name: str, waits_for: str | None, until: asyncio.Event) -> None:
        with spans.span(name, waits_for):
            await until.wait()

    ends = [asyncio.Event() for _ in range(4)]
    words = (("parse", None), ("score", None), ("step", "environment"), ("answer", "policy"))
    tasks = [asyncio.create_task(hold(*word, end)) for word, end in zip(words, ends, strict=True)]
    await asyncio.sleep(0)
    clock.now += 8  # two work
    ends[0].set()
    await tasks[0]
    clock.now += 3  # one works
    ends[1].set()
    await tasks[1]
    clock.now += 10  # two wait
    ends[2].set()
    ends[3].set()
    await asyncio.gather(*tasks)
    clock.now += 1
    totals = spans.totals()
    assert totals.work == {"parse": 4, "score": 7}
    assert totals.idle == {"environment": 5, "policy": 5}
    assert totals.unaccounted_s == 1


async def test_process_rests_while_nobody_calls(spans: Spans, clock: Clock) -> None:
    clock.now += 1  # it starts
    with spans.span("start"):
        clock.now += 256
    clock.now += 1
    spans.rest("batches")
    clock.now += 2
    with spans.call():
        clock.now += 4  # nobody says what for
        with spans.span("train"):
            clock.now += 8
            with spans.call():
                clock.now += 16
        with spans.span("save", waits_for="disk"):
            clock.now += 32
    clock.now += 64
    with spans.span("tidy"):
        clock.now += 128
    totals = spans.totals()
    assert totals.work == {"start": 258, "train": 24, "tidy": 128}
    assert totals.idle == {"disk": 32, "batches": 66}
    assert (totals.rest_s, totals.unaccounted_s) == (66, 4)


async def test_whatever_tasks_do_the_parts_are_the_whole(spans: Spans, clock: Clock) -> None:
    chance = random.Random(7)
    covered = 0.0

    async def wander(depth: int) -> None:
        nonlocal covered
        for _ in range(4):
            waits_for = chance.choice((None, "a", "b"))
            with spans.span(chance.choice("xyz"), waits_for):
                step = chance.random()
                clock.now += step
                covered += step
                await asyncio.sleep(0)
                if depth:
                    await (wander(depth - 1) if chance.random() < 0.5 else asyncio.create_task(wander(0)))

    began = clock.now
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(wander(2))
    totals = spans.totals()
    assert totals.wall_s == pytest.approx(clock.now - began)
    assert sum(totals.work.values()) + sum(totals.idle.values()) == pytest.approx(covered)
    assert totals.unaccounted_s == pytest.approx(0.0, abs=1e-9)
    clock.now += 1
    assert spans.totals().unaccounted_s == pytest.approx(1.0)  # nothing was left open


def test_shares_in_the_log_are_read_back() -> None:
    seconds: dict[tuple[str, str | None], float] = {
        ("train", None): 5,
        ("save", "disk"): 1,
        ("log", "disk"): 1,
        ("rest", "batches"): 2,
    }
    trainer = SpanTotals(began=7, wall_s=10, cpu_s=4, seconds=seconds)
    metrics = trainer.metrics("trainer")
    assert metrics == {
        "span/trainer/unaccounted": pytest.approx(0.1),
        "span/trainer/cpu": 0.4,
        "span/trainer/work/train": 0.5,
        "span/trainer/idle/disk": 0.2,
        "span/trainer/rest/batches": 0.2,
    }
    read = SpanTotals.from_metrics({"iteration": 3, "train/loss": 1.0, **metrics}, 20.0)["trainer"]
    assert (read.work, read.idle) == ({"train": 10}, {"disk": 4, "batches": 4})
    assert (read.wall_s, read.cpu_s, read.rest_s, read.unaccounted_s) == (20, 8, 4, pytest.approx(2))
