"""Every instant of a process is work, idle or unaccounted for, and is counted once."""

import asyncio
import json
import pickle
import random
import threading
from collections.abc import Generator

import pytest

from rl_bridge.metrics import Spans, SpanTotals, SpanWindow, by_role


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


def test_open_spans_count_up_to_now(spans: Spans, clock: Clock) -> None:
    with spans.span("train"):
        clock.now += 3
        assert spans.totals().work == {"train": 3}
        clock.now += 3
        assert spans.totals().work == {"train": 6}


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


async def test_span_of_a_task_does_not_hide_its_makers(spans: Spans, clock: Clock) -> None:
    end = asyncio.Event()

    async def background() -> None:
        with spans.span("listen", waits_for="prompts"):
            await end.wait()

    with spans.span("train"):
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        clock.now += 5
    clock.now += 2
    end.set()
    await task
    assert spans.totals().work == {"train": 5}
    assert spans.totals().idle == {"prompts": 2}


def test_threads_have_spans_of_their_own(spans: Spans, clock: Clock) -> None:
    inside, leave = threading.Event(), threading.Event()

    def generate() -> None:
        with spans.span("generate"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=generate)
    with spans.span("answer", waits_for="prompts"):
        thread.start()
        inside.wait(10)
        clock.now += 7
        leave.set()
        thread.join()
        clock.now += 2
    totals = spans.totals()
    assert (totals.work, totals.idle) == ({"generate": 7}, {"prompts": 2})


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


def test_what_nobody_named_before_it_had_started_is_its_start(spans: Spans, clock: Clock) -> None:
    clock.now += 1
    with spans.span("start", waits_for="processes"):
        clock.now += 2
    clock.now += 4
    spans.started()
    clock.now += 8
    totals = spans.totals()
    assert (totals.work, totals.idle) == ({"start": 5}, {"processes": 2})
    assert totals.unaccounted_s == 8  # it does not rest


def test_span_is_left_when_its_block_fails(spans: Spans, clock: Clock) -> None:
    with pytest.raises(RuntimeError), spans.span("train"):
        raise RuntimeError
    clock.now += 1
    assert spans.totals().unaccounted_s == 1


def test_span_of_an_abandoned_generator_ends_before_the_one_within_it(spans: Spans, clock: Clock) -> None:
    def rows() -> Generator[int]:
        with spans.span("read"):
            yield 1

    reading = rows()
    next(reading)
    with spans.span("train"):
        reading.close()
        clock.now += 3
    clock.now += 4
    totals = spans.totals()
    assert (totals.work, totals.unaccounted_s) == ({"read": 0, "train": 3}, 4)


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


def test_totals_travel(spans: Spans, clock: Clock) -> None:
    with spans.span("train"), spans.span("sample", waits_for="rollout"):
        clock.now += 1
    totals = spans.totals()
    assert SpanTotals.from_json(json.loads(json.dumps(totals.as_json()))) == totals
    assert pickle.loads(pickle.dumps(totals)) == totals


def totals(began: float, wall_s: float, **work: float) -> SpanTotals:
    seconds: dict[tuple[str, str | None], float] = {(name, None): spent for name, spent in work.items()}
    return SpanTotals(began=began, wall_s=wall_s, cpu_s=0.0, seconds=seconds)


def test_window_is_what_was_spent_since_the_last_one() -> None:
    window = SpanWindow()
    assert window.advance({"trainer-0": totals(1, 10, train=4, start=2)})["trainer-0"].work["train"] == 4
    spent = window.advance({"trainer-0": totals(1, 14, train=7, start=2, save=1)})["trainer-0"]
    assert (spent.wall_s, spent.work, spent.unaccounted_s) == (4, {"train": 3, "save": 1}, 0)


def test_replicas_and_ranks_of_a_role_are_one_line() -> None:
    roles = by_role(
        {
            "reward_model-0": totals(1, 10, score=5),
            "reward_model-1-3": totals(2, 30, score=5, load=1),
            "controller": totals(3, 4),
        }
    )
    assert roles.keys() == {"reward_model", "controller"}
    merged = roles["reward_model"]
    assert (merged.wall_s, merged.work, merged.unaccounted_s) == (40, {"score": 10, "load": 1}, 29)
    assert merged.began == 1


def test_shares_in_the_log_are_read_back() -> None:
    seconds: dict[tuple[str, str | None], float] = {
        ("train", None): 5,
        ("save", "disk"): 1,
        ("log", "disk"): 1,
        ("rest", "batches"): 2,
    }
    trainer = SpanTotals(began=7, wall_s=10, cpu_s=4, seconds=seconds)
    figures = trainer.figures("trainer")
    assert figures == {
        "span/trainer/unaccounted": pytest.approx(0.1),
        "span/trainer/cpu": 0.4,
        "span/trainer/work/train": 0.5,
        "span/trainer/idle/disk": 0.2,
        "span/trainer/rest/batches": 0.2,
    }
    read = SpanTotals.from_figures({"iteration": 3, "train/loss": 1.0, **figures}, 20.0)["trainer"]
    assert (read.wall_s, read.cpu_s, read.work, read.idle) == (
        20,
        8,
        {"train": 10},
        {"disk": 4, "batches": 4},
    )
    assert (read.rest_s, read.unaccounted_s) == (4, pytest.approx(2))
