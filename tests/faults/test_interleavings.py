"""Random cancellations and broken connections: replies match their requests, slots last no longer than a lease."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import pytest
from counter import Add, Count, Counter
from counter_client import CounterEnv
from faulty_proxy import faulty_proxy
from fuzzing import EXAMPLES, LONG
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import eventually, serving, socket_to
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from openenv_core import ConnectionLostError, EpisodeLostError, RequestTimeoutError
from openenv_core.protocol.batch import decode_frame
from servers import create_app

pytestmark = pytest.mark.slow

LEASE_S = 1.0
LONG_TIMEOUT_S = 20.0
GIVEN_UP = (RequestTimeoutError, ConnectionLostError, EpisodeLostError)  # a busy machine may miss a lease

Asking: TypeAlias = list[tuple[float, int, str | None]]
"""Of one task, its steps: how long it waits, how many milliseconds the environment takes, what breaks before."""

ASKING = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.002, 0.005, LONG_TIMEOUT_S]),
        st.integers(0, 4),
        st.sampled_from([None, None, None, "cut", "half_close"]),
    ),
    min_size=1,
    max_size=10,
)


class Echo(Counter):
    """Echoes the amount after as many milliseconds as its last digit."""

    DETERMINISTIC = False

    async def step(self, action: Add) -> Count:  # type: ignore[override]
        await asyncio.sleep(action.amount % 10 / 1000)
        return Count(total=action.amount)


async def play(tasks: list[Asking], timeout_s: float, end: str) -> None:
    app = create_app(Echo, Add, Count, max_concurrent_envs=3)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, lease_s=LEASE_S) as client,
    ):
        vector = await client.vector(2)
        client._session.settings = replace(client._session.settings, message_timeout_s=timeout_s)

        async def step(task: int, amount: int) -> int:
            if task < 2:  # these share one session, the others have one each
                return (await client.step(Add(amount=amount))).observation.total
            (reply,) = await vector.ask("step", members=[task - 2], actions=[{"amount": amount}])
            if "rows" not in reply.fields:
                raise TimeoutError  # its own former request is under way
            return int(reply.fields["rows"][0]["total"])

        async def ask(task: int, asking: Asking) -> None:
            for number, (step_timeout_s, takes, fault) in enumerate(asking, 1):
                if fault is not None:
                    getattr(proxy, fault)()
                amount = 1000 * (task + 1) + 20 * number + takes
                with suppress(TimeoutError, *GIVEN_UP):
                    async with asyncio.timeout(step_timeout_s):
                        assert await step(task, amount) == amount

        calls = [asyncio.create_task(ask(*one)) for one in enumerate(tasks)]
        if end == "answered":
            await asyncio.gather(*calls)
            with suppress(*GIVEN_UP):
                assert await step(0, 7) == 7
        else:  # as Ctrl-C does, at any moment
            await asyncio.wait(calls[:1])
            for one in calls:
                one.cancel()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        await vector.close()
        if end != "vanish":
            await client.close()

        def is_gone() -> bool:
            if end == "vanish":  # also over a connection that the proxy was making just now
                proxy.cut()
            return not (app.sessions.active or app.links.registered)

        proxy.cut_after = lambda: (0, 0)
        await eventually(is_gone)


@settings(
    max_examples=3 * EXAMPLES,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.generate],  # no two runs of an example are the same
)
@given(
    tasks=st.lists(ASKING, min_size=4, max_size=4),
    timeout_s=st.sampled_from([0.003, LONG_TIMEOUT_S]),
    end=st.sampled_from(["answered", "interrupted", "vanish"]),
)
def test_each_reply_answers_its_own_request_and_no_slot_outlives_its_lease(
    tasks: list[Asking], timeout_s: float, end: str
) -> None:
    asyncio.run(play(tasks, timeout_s, end))


OVERLAP = -1
"""Noted where a step begins within another."""


class Recorded(Counter):
    """Echoes the amount from a thread; each session records its amounts in a list."""

    BLOCKING, DETERMINISTIC = True, False
    steps: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []
        self.under_way = False
        self.steps.append(self.told)

    def begin(self) -> None:
        if self.under_way:
            self.told.append(OVERLAP)
        self.under_way = True

    def note(self, action: Add) -> Count:
        self.under_way = False
        self.told.append(action.amount)
        return Count(total=action.amount)

    def step(self, action: Add) -> Any:
        self.begin()
        time.sleep(action.amount % 4 / 1000)
        return self.note(action)


class RecordedLater(Recorded):
    """A plain method in a thread that returns an awaitable for the event loop."""

    def step(self, action: Add) -> Any:
        self.begin()
        time.sleep(action.amount % 4 / 1000)
        return self.later(action)

    async def later(self, action: Add) -> Count:
        await asyncio.sleep(action.amount % 3 / 1000)
        return self.note(action)


class RecordedOnLoop(RecordedLater):
    """Declared as non-blocking, and sometimes returns an awaitable."""

    BLOCKING = False

    def step(self, action: Add) -> Any:
        self.begin()
        return self.later(action) if action.amount % 2 else self.note(action)


class RecordedInline(Recorded):
    """Never waits."""

    BLOCKING = False

    def step(self, action: Add) -> Any:
        self.begin()
        return self.note(action)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "batch", "cancel", "deadline"]),
        st.integers(0, 1),  # of the two sessions
        st.integers(0, 11),  # what decides how long it takes
        st.sampled_from([0.0, 0.0, 0.001, 0.02]),  # seconds until the next
    ),
    min_size=6,
    max_size=24,
)


async def ask_at_random(env: type[Recorded], moves: list[tuple[str, int, int, float]]) -> None:
    """Send requests to two sessions of one connection without waiting for replies."""
    env.steps.clear()
    frames: dict[int, dict[str, Any]] = {}
    sent: dict[int, tuple[int, int]] = {}  # which session was asked, and what it was told

    async def receive(connection: ClientConnection) -> None:
        async for message in connection:
            frame, _ = decode_frame(message)
            if frame.get("last", True):
                assert frame["id"] not in frames, "answered twice"
                frames[frame["id"]] = frame

    async with (
        serving(create_app(env, Add, Count, max_concurrent_envs=2)) as address,
        socket_to(address, subprotocols=[Subprotocol("ropewalk.v1")]) as connection,
    ):
        receiving = asyncio.create_task(receive(connection))
        await connection.send(json.dumps({"id": 1, "op": "open", "count": 2}))
        await eventually(lambda: 1 in frames)
        latest = 1
        for number, (kind, member, takes, pause_s) in enumerate(
            [*moves, ("step", 0, 0, 0.0), ("step", 1, 0, 0.0)], 2
        ):
            if number > 1 + len(moves):  # nothing is under way: both still answer
                await eventually(lambda number=number: len(frames) == number - 1)
            told = 12 * number + takes
            step = {"type": "step", "data": {"amount": told}, "member": member}
            if kind == "cancel":
                frame: dict[str, Any] = {"op": "cancel", "request": latest}
            elif kind == "batch":
                frame = {"op": "step", "members": [member], "actions": [{"amount": told}]}
            else:
                frame = step | ({"deadline_s": 0.001} if kind == "deadline" else {})
                latest = number
            if kind != "cancel":
                sent[number] = member, told
            await connection.send(json.dumps({"id": number, **frame}))
            await asyncio.sleep(pause_s)
        await eventually(lambda: len(frames) == len(moves) + 3)
        receiving.cancel()
    for member in (0, 1):
        done = [
            told
            for number, (asked, told) in sent.items()
            if asked == member and answered(frames[number], told)
        ]
        assert env.steps[member] == done, "in the order of the requests, each once, and those alone"
    assert all(answered(frames[number], sent[number][1]) for number in list(sent)[-2:])


def answered(frame: dict[str, Any], total: int) -> bool:
    """Whether a frame reports an executed step; otherwise it must be a refusal."""
    if frame.get("type") == "observation":
        assert frame["data"]["observation"]["total"] == total
        return True
    if "rows" in frame:
        assert frame["rows"][0]["total"] == total
        return True
    return False


@settings(max_examples=2 * EXAMPLES, derandomize=not LONG, deadline=None, phases=[Phase.generate])
@given(env=st.sampled_from([Recorded, RecordedLater, RecordedOnLoop, RecordedInline]), moves=MOVES)
def test_requests_of_a_session_run_once_in_order_or_are_refused(
    env: type[Recorded], moves: list[tuple[str, int, int, float]]
) -> None:
    asyncio.run(ask_at_random(env, moves))
