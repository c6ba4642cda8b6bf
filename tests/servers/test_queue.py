"""The queue for slots: order, limits, estimates; whoever leaves it leaves nothing behind."""

import asyncio
import json
import random
from typing import Any

import pytest
from counter import AsyncCounter, Counter, SlowConstructor
from server_apps import EVERY_WAY, HEADER, STATE, action, app_of, step
from serving import ask, eventually, request, serving, socket_to
from websockets.asyncio.client import connect

from openenv_core.protocol.batch import SUBPROTOCOL
from openenv_core.protocol.errors import RefusalError
from servers.routes import websocket
from servers.sessions import FullError, SessionSlots, SlotQueue, Ticket
from servers.sessions import queue as queues

PATIENT = {"max_wait_s": 600.0}


# The queue alone


def queue_of(cap: int, per_owner: int | None = None, waiting: int = 99, wait_s: float = 600) -> SlotQueue:
    return SlotQueue(SessionSlots(cap, per_owner), waiting, wait_s)


def granted(*tickets: Ticket) -> list[bool]:
    return [ticket.holds_slots for ticket in tickets]


async def test_impossible_requests_and_a_full_queue_are_refused_at_once() -> None:
    queue = queue_of(2, per_owner=1, waiting=1)
    for count in (2, 3):
        with pytest.raises(FullError, match=f"no {count} free slots for a session"):
            await queue.enter("a", count).wait_granted()
    held, waits = queue.enter("a"), queue.enter("a")
    with pytest.raises(FullError, match=r": 1 of 1 in use, and place 2 in the queue") as full:
        await queue.enter("a").wait_granted()
    assert full.value.extra == {"active_sessions": 1, "max_sessions": 1}
    assert full.value.queue["place"] == 2
    held.leave()
    assert granted(waits) == [True]


async def test_wait_ends_by_deadline_cancellation_or_shutdown() -> None:
    hurried = queue_of(1, wait_s=0.1)
    hurried.enter("a")
    with pytest.raises(FullError):
        await hurried.enter("a", wait_s=600).wait_granted()
    queue = queue_of(1)
    first = queue.enter("a")
    with pytest.raises(
        FullError, match=r"within 0\.\d+ s: 1 of 1 in use, and place 1 in the queue"
    ) as timed_out:
        await queue.enter("a", wait_s=0.25).wait_granted()
    assert timed_out.value.queue["waited_s"] >= 0.25
    cancelled, stays, refused = (asyncio.create_task(queue.enter("a").wait_granted()) for _ in range(3))
    await asyncio.sleep(0)
    assert queue.capacity()["waiting"] == 3
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert queue.capacity()["waiting"] == 2
    first.leave()
    await stays
    queue.refuse_all(lambda: RefusalError("CAPACITY_REACHED", "stopping"))
    with pytest.raises(RefusalError, match="stopping"):
        await refused
    assert queue.capacity() == {"slots": 1, "in_use": 1, "waiting": 0, "estimate_s": None}


async def test_slot_granted_to_a_cancelled_ticket_goes_to_the_next() -> None:
    queue = queue_of(1)
    first = queue.enter("a")
    taking = asyncio.create_task(queue.enter("a").wait_granted())
    second = queue.enter("a")
    await asyncio.sleep(0)
    first.leave()
    taking.cancel()  # its slot has been granted, and it has not run since
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert granted(second) == [True]


async def test_wait_is_estimated_once_a_session_has_ended() -> None:
    queue = queue_of(2)
    tickets = [queue.enter("a") for _ in range(4)]
    assert queue.capacity() == {"slots": 2, "in_use": 2, "waiting": 2, "estimate_s": None}
    tickets[3].leave()
    queue.record_return(60.0)  # each slot is held for a minute: one of two comes back every half a minute
    assert queue.estimate_wait_s(1) == pytest.approx(30, rel=0.1)
    assert queue.capacity()["estimate_s"] == pytest.approx(60, rel=0.1)
    pair = queue.enter("b", 2)
    assert queue.estimate_wait_s(2) == pytest.approx(90, rel=0.1)  # of those that wait each wants 1.5
    for ticket in (pair, *tickets[:3]):
        ticket.leave()
    assert queue.capacity() == {"slots": 2, "in_use": 0, "waiting": 0, "estimate_s": 0.0}


async def test_random_operations_keep_slot_counts_and_order() -> None:
    """Slots are granted from the front, past owners at their cap, up to the first ticket that does not fit."""
    chance = random.Random(7)
    for _ in range(60):
        cap, per_owner = chance.randint(1, 6), chance.choice((None, 1, 2, 3))
        queue = queue_of(cap, per_owner)
        waiting: list[Ticket] = []
        held: list[Ticket] = []
        for _ in range(60):
            if chance.random() < 0.5:
                ticket = queue.enter(chance.choice("abc"), chance.randint(1, 2))
                waiting.append(ticket)
            elif waiting and chance.random() < 0.3:
                waiting.pop(chance.randrange(len(waiting))).leave()
            elif held:
                held.pop(chance.randrange(len(held))).leave()
            expected = list(held)
            passed: set[str] = set()
            for ticket in waiting:
                most = cap if per_owner is None else min(cap, per_owner)
                own = sum(one.count for one in expected if one.owner == ticket.owner)
                if ticket.count > most or ticket.owner in passed:
                    continue
                if per_owner is not None and own + ticket.count > per_owner:
                    passed.add(ticket.owner)
                elif sum(one.count for one in expected) + ticket.count > cap:
                    break
                else:
                    expected.append(ticket)
            held += [ticket for ticket in waiting if ticket.holds_slots]
            waiting = [ticket for ticket in waiting if ticket.is_waiting]
            assert {id(ticket) for ticket in held} == {id(ticket) for ticket in expected}
            assert queue.capacity()["in_use"] == sum(ticket.count for ticket in held)
            assert [queue.status_of(ticket)["place"] for ticket in waiting] == [*range(1, len(waiting) + 1)]
        for ticket in (*waiting, *held):
            ticket.leave()
        assert (queue.capacity()["in_use"], queue.capacity()["waiting"]) == (0, 0)
        assert not queue._tickets


# Behind a server


async def capacity(address: str) -> Any:
    return (await request(address, "GET", "/capacity")).json()


@EVERY_WAY
async def test_released_clients_wait_in_the_handshake_and_enter_in_order(env: type[Counter]) -> None:
    app = app_of(env, cap=1, **PATIENT)
    order: list[int] = []
    async with serving(app) as address:

        async def visit(number: int) -> None:
            async with socket_to(address) as ws:
                order.append(number)
                assert (await ask(ws, step()))["type"] == "observation"
                assert app.sessions.active == 1

        async with socket_to(address):
            visits = []
            for number in range(5):
                visits.append(asyncio.create_task(visit(number)))
                await eventually(lambda number=number: app.sessions.queue.capacity()["waiting"] == number + 1)
            assert await capacity(address) == {"slots": 1, "in_use": 1, "waiting": 5, "estimate_s": None}
            assert not order
        await asyncio.gather(*visits)
        assert order == list(range(5))
        await eventually(lambda: app.sessions.active == 0)
        assert (await capacity(address))["estimate_s"] == 0


async def test_disconnect_in_the_handshake_leaves_the_queue_at_once() -> None:
    app = app_of(Counter, cap=1, **PATIENT)
    async with serving(app) as address, socket_to(address) as held:
        tasks = len(asyncio.all_tasks())
        opening = asyncio.create_task(connect(f"ws://{address}/ws", proxy=None).__aenter__())
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 1)
        later = asyncio.create_task(connect(f"ws://{address}/ws", proxy=None).__aenter__())
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 2)
        opening.cancel()
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 1)
        await held.close()
        ws = await later
        assert (await ask(ws, STATE))["type"] == "state"
        await ws.close()
        await eventually(lambda: app.sessions.active == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_released_client_is_refused_before_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_WAIT_S", 0.3)
    async with (
        serving(app_of(Counter, cap=1, **PATIENT)) as address,
        socket_to(address),
        socket_to(address) as ws,
    ):
        data = json.loads(await ws.recv())["data"]
        assert set(data) == {"message", "code", "active_sessions", "max_sessions"}
        assert (data["code"], data["active_sessions"], data["max_sessions"]) == ("CAPACITY_REACHED", 1, 1)
        assert "place 1 in the queue" in data["message"]
        await ws.wait_closed()
        assert ws.close_code == 1000


async def test_requests_that_open_sessions_wait_and_get_a_retry_time() -> None:
    app = app_of(Counter, cap=1, **PATIENT)
    async with serving(app) as address:
        async with socket_to(address):
            waiting = [
                asyncio.create_task(request(address, method, path, body, headers))
                for method, path, body, headers in (
                    ("POST", "/reset", None, {}),
                    ("POST", "/step", action(), {}),
                    ("GET", "/state", None, {}),
                    ("POST", "/reset", None, {HEADER: "mine"}),
                )
            ]
            await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 4)
        assert [(await one).status_code for one in waiting] == [200] * 4
        app.sessions.queue._hold_times_s.clear()
        app.sessions.queue.record_return(17.2)
        app.sessions.queue._max_wait_s = 0.3
        refused = await request(address, "POST", "/reset", None, {HEADER: "other"})
        detail = refused.json()["detail"]
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "18")
        assert (detail["place"], detail["retry_after_s"]) == (1, 17.2)
        assert detail["waited_s"] >= 0.3


@EVERY_WAY
async def test_open_request_waits_and_gets_its_place(
    env: type[Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "NOTIFY_INTERVAL_S", 0.01)
    app = app_of(env, cap=2, **PATIENT)
    async with serving(app) as address:

        async def opening(count: int) -> Any:
            ws = await connect(f"ws://{address}/ws", subprotocols=[SUBPROTOCOL], proxy=None)  # type: ignore[list-item]
            await ws.send(json.dumps({"id": 5, "op": "open", "count": count}))
            return ws, json.loads(await ws.recv())

        (one, first), (two, second) = await opening(1), await opening(1)
        assert (first["members"], second["members"]) == ([0], [0])
        (pair, status), (last, later) = await opening(2), await opening(1)
        assert status == {"id": 5, "queue": {"place": 1, "waiting": 1, "estimate_s": None}, "last": False}
        assert later["queue"]["place"] == 2
        await one.close()
        await eventually(lambda: app.sessions.active == 1)
        await pair.send(json.dumps({"id": 6, "op": "reset"}))  # read while it waits, and answered behind it
        await pair.close()  # a departure is noticed in the queue too
        assert json.loads(await last.recv()) == {"id": 5, "members": [0], "last": True}
        assert app.sessions.active == 2
        await two.close()
        await last.close()
        await eventually(lambda: app.sessions.active == 0)
        assert app.sessions.queue.capacity()["waiting"] == 0


async def test_draining_refuses_waiting_clients_at_once() -> None:
    app = app_of(AsyncCounter, cap=1, **PATIENT)
    async with serving(app) as address, socket_to(address) as held:
        opening = asyncio.create_task(connect(f"ws://{address}/ws", proxy=None).__aenter__())
        asking = asyncio.create_task(request(address, "POST", "/reset"))
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 2)
        await app.drain(20)
        refused = await opening
        assert "stopping" in json.loads(await refused.recv())["data"]["message"]
        assert (await asking).status_code == 503
        await held.wait_closed()
        assert held.close_code == 1001
        app.sessions.draining = False


async def test_failed_constructor_lets_the_next_client_in() -> None:
    class SlowOnce(SlowConstructor):
        def __init__(self) -> None:
            if self.entered.is_set():
                self.release.set()
            super().__init__()

    env = SlowOnce.fresh()
    app = app_of(env, cap=1, step_timeout_s=0.5, **PATIENT)
    async with serving(app) as address:
        async with socket_to(address) as one:
            await eventually(env.entered.is_set)
            waiting = asyncio.create_task(connect(f"ws://{address}/ws", proxy=None).__aenter__())
            assert json.loads(await one.recv())["data"]["code"] == "SESSION_ERROR"
        ws = await waiting
        assert (await ask(ws, STATE))["type"] == "state"
        await ws.close()
