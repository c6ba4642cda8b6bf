"""Requests to many sessions of one connection, in the dialect `ropewalk.v1`."""

import asyncio
import json
import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from counter import (
    Add,
    Awkward,
    BlockingCounter,
    Count,
    Counter,
    SlowAsync,
    SlowBlocking,
    Unbuildable,
)
from server_apps import EVERY_WAY, HEADER, Deaf, app_of, step
from serving import WAIT_TIMEOUT_S, ask, eventually, open_session, serving, socket_to, wait_close_code
from serving import request as http
from v1_frames import validated_frames  # noqa: F401 - a fixture
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from openenv_core.protocol.batch import MAX_MEMBERS, Array, decode_frame, encode_frame
from servers.routes import link
from servers.routes.link import MAX_REQUESTS, Link, SentFrames

pytestmark = pytest.mark.usefixtures("validated_frames")
V1 = Subprotocol("ropewalk.v1")
INT64 = 8


@asynccontextmanager
async def batch_of(
    address: str, size: int = 0, *, query: str = "", **options: Any
) -> AsyncIterator[ClientConnection]:
    async with socket_to(address, query, subprotocols=[V1], max_size=None, **options) as connection:
        assert connection.subprotocol == V1
        if size:
            assert await request(connection, op="open", count=size) == {
                "members": list(range(size)),
                "last": True,
            }
        yield connection


async def answer(connection: ClientConnection) -> dict[str, Any]:
    """Return the next reply, with lists for arrays."""
    header, arrays = decode_frame(await asyncio.wait_for(connection.recv(), WAIT_TIMEOUT_S))
    for part in ("reward", "terminated", "truncated"):
        if part in header:
            header[part] = arrays[header[part]].tolist()
    return header


async def request(
    connection: ClientConnection, arrays: tuple[Array, ...] = (), **fields: Any
) -> dict[str, Any]:
    """Send a request; return its reply."""
    header = {name: json.dumps(value).encode() for name, value in {"id": 7, **fields}.items()}
    await connection.send(encode_frame(header, list(arrays)))
    reply = await answer(connection)
    assert reply.pop("id") == 7
    return reply


def totals(reply: dict[str, Any]) -> list[int]:
    return [row["total"] for row in reply["rows"]]


def add(*amounts: int) -> list[dict[str, int]]:
    return [{"amount": amount} for amount in amounts]


@EVERY_WAY
async def test_members_are_reset_and_stepped_together_by_rows_and_columns(env: Any) -> None:
    async with serving(app_of(env)) as address, batch_of(address, 3) as connection:
        reply = await request(connection, op="reset", seeds=[1, 2, None], options={"start": 3})
        assert totals(reply) == [4, 5, 3]
        assert reply["members"] == [0, 1, 2]
        assert [str(one) for one in reply["reward"]] == ["nan"] * 3
        reply = await request(connection, op="step", members=[2, 0], actions=add(1, 2))
        assert (reply["members"], sorted(totals(reply)), reply["reward"]) == ([2, 0], [4, 6], [1.0, 1.0])
        amounts = Array("int64", (3,), b"".join(n.to_bytes(INT64, "little") for n in (1, 2, 6)))
        reply = await request(connection, (amounts,), op="step", actions={"amount": 0})
        by_member = dict(zip(reply["members"], totals(reply), strict=True))
        assert by_member == {0: 7, 1: 7, 2: 10}
        assert dict(zip(reply["members"], reply["terminated"], strict=True)) == {0: False, 1: False, 2: True}
        reply = await request(connection, op="state", members=[1])
        assert (reply["rows"][0]["step_count"], reply["rows"][0]["total"]) == (1, 7)


async def test_consecutive_batches_are_stepped_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is started where it is read, and yields to other tasks before it ends."""
    monkeypatch.setattr("servers.sessions.batch._YIELD_INTERVAL_S", 0.0)
    size = 200
    async with serving(app_of(Counter, size)) as address, batch_of(address, size) as connection:
        await request(connection, op="reset", seeds=[0] * size)
        await asyncio.sleep(0.05)  # until the server waits for a frame
        ones = Array("int64", (size,), (1).to_bytes(INT64, "little") * size)
        for number in (8, 9, 10):
            members = [*range(size)] if number == 8 else [*reversed(range(size))]
            header = {"id": number, "op": "step", "members": members, "actions": {"amount": 0}}
            await connection.send(
                encode_frame({name: json.dumps(value).encode() for name, value in header.items()}, [ones])
            )
            await asyncio.sleep(0.0005)  # in which the server reads it
        # A request about one is executed after the batches before it.
        await connection.send(json.dumps({"id": 11, "type": "state", "member": 0}))
        for number in (8, 9, 10):
            reply = await answer(connection)
            assert (reply["id"], totals(reply)) == (number, [number - 7] * size)
        assert (await answer(connection))["data"]["total"] == 3


async def test_batches_sent_before_the_sessions_are_open_are_stepped_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servers.sessions.batch._YIELD_INTERVAL_S", 0.0)
    size = 100
    async with serving(app_of(Counter, size)) as address, batch_of(address) as connection:
        for fields in (
            {"op": "open", "count": size},
            {"op": "reset", "seeds": [5] * size},
            {"op": "step", "members": [*reversed(range(size))], "actions": add(*[1] * size)},
        ):
            await connection.send(json.dumps({"id": 7, **fields}))
        assert "members" in await answer(connection)
        for total in (5, 6):
            assert totals(await answer(connection)) == [total] * size


@EVERY_WAY
async def test_failure_of_one_member_is_a_typed_error_of_its_own(env: Any) -> None:
    async with serving(app_of(env)) as address, batch_of(address, 4) as connection:
        await request(connection, op="reset", seeds=[0, 9, 0, 0])
        await request(connection, op="step", members=[1], actions=add(1))
        reply = await request(connection, op="step", actions=[*add(13, 1, 1), {"amount": "many"}])
        assert (reply["members"], totals(reply)) == ([2], [1])
        errors = reply["errors"]
        assert {member: error["code"] for member, error in errors.items()} == {
            "0": "VALIDATION_ERROR",
            "1": "EXECUTION_ERROR",
            "3": "VALIDATION_ERROR",
        }
        assert "thirteen" in errors["0"]["errors"][0]["msg"]
        assert "reset()" in errors["1"]["message"]
        reply = await request(connection, op="step", actions=add(1, 1, 1, 1))
        assert (sorted(reply["members"]), list(reply["errors"])) == ([0, 2, 3], ["1"])


class BlockingAwkward(Awkward):
    BLOCKING = True


@pytest.mark.parametrize("env", [Awkward, BlockingAwkward])
async def test_unencodable_result_of_one_member_is_its_error(env: Any) -> None:
    async with serving(app_of(env, cap=6)) as address, batch_of(address, 6) as connection:
        reply = await request(connection, op="step", actions=add(8, 3, 4, 5, 6, 9))
        assert (reply["members"], reply["reward"], reply["rows"][0]["metadata"]) == (
            [0],
            [1.0],
            {"why": "because"},
        )
        assert {error["code"] for error in reply["errors"].values()} == {"EXECUTION_ERROR"}
        assert "Observation" in reply["errors"]["2"]["message"]
        reply = await request(connection, op="step", actions=add(*[0] * 6))
        assert len(reply["members"]) == 6


@EVERY_WAY
@pytest.mark.parametrize("mode", ["next_step", "same_step", None])
async def test_finished_episode_is_reset_by_autoreset_mode(env: Any, mode: str | None) -> None:
    async with serving(app_of(env)) as address, batch_of(address, 2) as connection:
        await request(connection, op="reset", seeds=[9, 0])
        reply = await request(connection, op="step", members=[0], actions=add(2), autoreset=mode)
        assert (reply["reward"], reply["terminated"]) == ([1.0], [True])
        if mode == "same_step":
            assert totals(reply) == [0]
            assert (reply["final"]["members"], totals(reply["final"])) == ([0], [11])
            reply = await request(connection, op="step", members=[0], actions=add(2), autoreset=mode)
            assert (totals(reply), reply["terminated"], "final" in reply) == ([2], [False], False)
        elif mode == "next_step":
            assert totals(reply) == [11]
            # The action of the step that is a reset is not looked at.
            reply = await request(connection, op="step", members=[0], actions=[{}], autoreset=mode)
            assert (totals(reply), str(reply["reward"]), reply["terminated"]) == ([0], "[nan]", [False])
            assert totals(await request(connection, op="step", members=[0], actions=add(2))) == [2]
        else:
            reply = await request(connection, op="step", members=[0], actions=add(2))
            assert list(reply["errors"]) == ["0"]


class Reusing(Counter):
    """Returns the same observation, with the same list in it, again and again; and the same state."""

    kept: Count

    def reset(self, **options: Any) -> Count:
        return self._show(super().reset(**options))

    def step(self, action: Add) -> Count:
        return self._show(super().step(action))

    def _show(self, observation: Count) -> Count:
        if not hasattr(self, "kept"):
            self.kept = Count(extra=[0], metadata={"totals": [0]})
        self.kept.total, self.kept.done, self.kept.reward = (
            observation.total,
            observation.done,
            observation.reward,
        )
        self.kept.extra[0] = self.kept.metadata["totals"][0] = observation.total
        return self.kept


class ReusingInThreads(Reusing):
    BLOCKING = True


class Sharing(Reusing):
    """All members return the same object."""

    kept = Count(extra=[0], metadata={"totals": [0]})


class SharingAsync(Sharing):
    async def step(self, action: Add) -> Count:
        return super().step(action)


@pytest.mark.parametrize("env", [Reusing, ReusingInThreads, Sharing, SharingAsync])
async def test_objects_that_the_environment_returns_again_are_encoded_before(env: Any) -> None:
    async with serving(app_of(env)) as address, batch_of(address, 3) as connection:
        reply = await request(connection, op="reset", seeds=[7, 8, 9])
        assert totals(reply) == [7, 8, 9]
        reply = await request(connection, op="step", actions=add(1, 2, 1), autoreset="same_step")
        assert reply["members"] == [0, 1, 2]
        assert (reply["reward"], reply["terminated"]) == ([1.0] * 3, [False, True, True])
        assert totals(reply) == [row["extra"][0] for row in reply["rows"]] == [8, 0, 0]
        final = [(row["total"], row["extra"], row["metadata"]) for row in reply["final"]["rows"]]
        assert final == [(10, [10], {"totals": [10]})] * 2


async def test_opening_more_members_than_slots_is_refused_whole() -> None:
    app = app_of(BlockingCounter, cap=4)
    async with serving(app) as address, batch_of(address, 2) as connection:
        async with batch_of(address) as other:
            refused = (await request(other, op="open", count=3))["error"]
            assert (refused["code"], refused["active_sessions"], refused["max_sessions"]) == (
                "CAPACITY_REACHED",
                2,
                4,
            )
            # A busy machine has it wait for a moment, which it tells.
            assert re.search(
                r"no 3 free slots for a session( within [\d.]+ s)?: 2 of 4 in use", refused["message"]
            )
            assert app.sessions.active == 2
            assert (await request(other, op="open", count=2))["members"] == [0, 1]
        await eventually(lambda: app.sessions.active == 2)
        assert (await request(connection, op="open", count=2))["members"] == [2, 3]
    await eventually(lambda: app.sessions.active == 0)


async def test_members_count_against_the_cap_of_their_token() -> None:
    token = "a-token-of-some-length"
    app = app_of(Counter, cap=8, tokens=(token,), max_sessions_per_token=3)
    headers = {"Authorization": f"Bearer {token}"}
    async with serving(app) as address, batch_of(address, additional_headers=headers) as connection:
        assert "token: 0 of 3" in (await request(connection, op="open", count=4))["error"]["message"]
        assert len((await request(connection, op="open", count=3))["members"]) == 3


async def test_failed_construction_of_one_member_opens_none() -> None:
    app = app_of(Unbuildable)
    async with serving(app) as address, batch_of(address) as connection:
        refused = (await request(connection, op="open", count=3))["error"]
        assert (refused["code"], refused["factory_name"]) == ("FACTORY_ERROR", "Unbuildable")
        await eventually(lambda: app.sessions.active == 0)
        assert (await request(connection, op="step", actions=[]))["error"]["code"] == "SESSION_ERROR"


class Held(Counter):
    """All but the first instance are constructed once the gate is open; the 30th fails."""

    BLOCKING = True
    numbers: Iterator[int]
    built: set[int]
    closed: set[int]
    gate: threading.Event

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.numbers)
        self.built.add(self.number)
        if self.number > 1:
            self.gate.wait(60)
        if self.number == 30:
            raise RuntimeError("no further counter")

    def close(self) -> None:
        self.closed.add(self.number)


@pytest.mark.parametrize("leaves", [True, False])
async def test_abandoned_or_failed_wave_frees_its_slots(leaves: bool) -> None:
    env = type(
        "Held", (Held,), {"numbers": count(1), "built": set(), "closed": set(), "gate": threading.Event()}
    )
    app = app_of(env, cap=100)
    async with serving(app) as address, batch_of(address) as connection:
        await connection.send(json.dumps({"id": 7, "op": "open", "count": 100}))
        await eventually(lambda: len(env.built) == 17)
        assert app.sessions.active == 100
        if leaves:
            connection.transport.abort()
            await eventually(lambda: app.sessions.active == 0)
        env.gate.set()
        if not leaves:
            assert (await answer(connection))["error"]["code"] == "FACTORY_ERROR"
        await eventually(lambda: app.sessions.active == 0)
        await eventually(lambda: env.closed == env.built - {30})
        assert app.sessions.executor.abandoned == 0
        assert len(env.built) == (17 if leaves else 33)


class LaterCounter(Counter):
    """Plain methods that return awaitables."""

    def step(self, action: Add) -> Any:
        async def later() -> Count:
            await asyncio.sleep(0)
            return Counter.step(self, action)

        return later()


class LaterBlocking(LaterCounter):
    BLOCKING = True


@pytest.mark.parametrize("env", [LaterCounter, LaterBlocking])
async def test_plain_step_may_return_an_awaitable(env: Any) -> None:
    async with serving(app_of(env)) as address:
        async with batch_of(address, 2) as connection:
            await request(connection, op="reset", seeds=[9, 0])
            reply = await request(connection, op="step", actions=add(2, 3), autoreset="same_step")
            by_member = dict(zip(reply["members"], totals(reply), strict=True))
            assert (by_member, totals(reply["final"])) == ({0: 0, 1: 3}, [11])
            assert "reset()" not in str(reply)
        async with socket_to(address) as single:
            await ask(single, {"type": "reset"})
            reply = await ask(single, step(4))
            assert reply["data"]["observation"]["total"] == 4


@pytest.mark.parametrize("slow", [SlowBlocking, SlowAsync])
async def test_disconnect_during_a_step_frees_all_slots(slow: Any) -> None:
    env = slow.fresh()
    app = app_of(env)
    async with serving(app) as address:
        async with batch_of(address, 4) as connection:
            await connection.send(json.dumps({"id": 1, "op": "step", "actions": add(1, 1, 1, 1)}))
            await eventually(lambda: env.stepping == 4)  # all at once
            connection.transport.abort()
            await eventually(lambda: app.sessions.active == 0)
        env.release.set()
        await eventually(lambda: env.closed == 4)
        await eventually(lambda: app.sessions.executor.abandoned == 0)


class Patient(SlowBlocking):
    """Hangs at amounts above 1."""

    def step(self, action: Add) -> Count:
        return super().step(action) if action.amount > 1 else Counter.step(self, action)


class PatientAsync(SlowAsync):
    async def step(self, action: Add) -> Count:
        return await super().step(action) if action.amount > 1 else Counter.step(self, action)


@pytest.mark.parametrize("slow", [Patient, PatientAsync])
async def test_member_over_its_deadline_is_ended_and_the_other_steps_count(slow: Any) -> None:
    env = slow.fresh()
    app = app_of(env, step_timeout_s=1.0)
    async with serving(app) as address, batch_of(address, 3) as connection:
        reply = await request(connection, op="step", actions=add(1, 9, 1))
        assert (sorted(reply["members"]), totals(reply)) == ([0, 2], [1, 1])
        assert reply["errors"]["1"]["code"] == "SESSION_ERROR"
        assert "within 1 s" in reply["errors"]["1"]["message"]
        assert app.sessions.active == 2
        reply = await request(connection, op="step", actions=add(1, 1, 1))
        assert (sorted(reply["members"]), list(reply["errors"])) == ([0, 2], ["1"])
        env.release.set()
        await eventually(lambda: env.closed == 1)


class PatientDeaf(Deaf):
    """Waits on the event loop at amounts above 1, and ignores cancellation."""

    BLOCKING = True

    def step(self, action: Add) -> Any:
        return super().step(action) if action.amount > 1 else Counter.step(self, action)


class PatientOnLoop(PatientDeaf):
    """Declared as non-blocking, but waits."""

    BLOCKING = False


async def test_calls_that_ignore_cancellation_no_longer_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_REQUESTS", 2)
    env = PatientDeaf.fresh()
    async with serving(app_of(env, step_timeout_s=1.0)) as address, batch_of(address, 3) as connection:
        for member in (0, 1):
            await connection.send(json.dumps({"id": 50 + member, "member": member, **step(9)}))
        codes = [(await answer(connection))["data"]["code"] for _ in range(2)]
        assert codes == ["SESSION_ERROR", "SESSION_ERROR"]
        await connection.send(json.dumps({"id": 52, "member": 2, **step(1)}))
        assert (await answer(connection))["data"]["observation"]["total"] == 1
        env.release.set()
        await eventually(lambda: env.closed == 2)


@pytest.mark.parametrize("slow", [Patient, PatientAsync, PatientDeaf, PatientOnLoop])
async def test_request_over_its_deadline_is_answered_once_and_ends_its_session(
    slow: Any,
) -> None:
    env = slow.fresh()
    app = app_of(env, step_timeout_s=1.0)
    async with serving(app) as address, batch_of(address, 2) as connection:
        for request_id, member, amount in ((50, 0, 9), (51, 0, 1), (52, 1, 1)):
            await connection.send(json.dumps({"id": request_id, "member": member, **step(amount)}))
        reply = {frame["id"]: frame for frame in [await answer(connection) for _ in range(3)]}
        assert reply[52]["data"]["observation"]["total"] == 1
        assert reply[50]["data"]["code"] == reply[51]["data"]["code"] == "SESSION_ERROR"
        assert "within 1 s" in reply[50]["data"]["message"]
        assert app.sessions.active == 1
        env.release.set()
        await eventually(lambda: env.closed == 1)
        await connection.send(json.dumps({"id": 53, "member": 1, **step(1)}))
        assert (await answer(connection))["data"]["observation"]["total"] == 2


@pytest.mark.parametrize("slow", [Patient, PatientAsync])
async def test_slow_member_does_not_delay_the_others(slow: Any) -> None:
    env = slow.fresh()
    async with serving(app_of(env)) as address, batch_of(address, 3) as connection:
        reply = await request(connection, op="step", actions=add(9, 1, 1), at_least=2)
        assert (sorted(reply["members"]), reply["last"]) == ([1, 2], False)
        # It is still at the first; others can be asked.
        reply = await request(connection, op="step", members=[1], actions=add(1))
        assert (totals(reply), reply["last"]) == ([2], True)
        busy = (await request(connection, op="step", members=[0], actions=add(1)))["errors"]["0"]
        assert "one call at a time" in busy["message"]
        if slow is Patient:
            env.release.set()
            last = await answer(connection)
            assert (last["id"], last["members"], last["last"]) == (7, [0], True)


async def test_call_without_a_thread_by_its_deadline_is_not_executed() -> None:
    env = Patient.fresh()
    app = app_of(env, step_timeout_s=1.0)
    app.sessions.executor.pool.size = 1
    async with serving(app) as address, batch_of(address, 3) as connection:
        reply = await request(connection, op="step", members=[0, 1], actions=add(9, 9))
        assert {error["code"] for error in reply["errors"].values()} == {"SESSION_ERROR"}
        assert len(reply["errors"]) == 2
        assert app.sessions.active == 1
        assert totals(await request(connection, op="step", members=[2], actions=add(1))) == [1]
        assert env.stepping == 1
        env.release.set()
        await eventually(lambda: (env.closed, env.stepping) == (2, 0))


@EVERY_WAY
async def test_every_member_is_answered_once_for_any_at_least(env: Any) -> None:
    async with serving(app_of(env, cap=12)) as address, batch_of(address, 12) as connection:
        for at_least in range(1, 14):
            request_fields = {"id": 7, "op": "reset", "at_least": at_least}
            await connection.send(json.dumps(request_fields))
            members, last = [], {"last": False}
            while not last["last"]:
                last = await answer(connection)
                members += last["members"]
                assert len(last["members"]) >= min(at_least, 12) or last["last"]
            assert sorted(members) == list(range(12))


async def test_batch_waits_for_its_turn_at_a_shared_session() -> None:
    env = SlowBlocking.fresh()
    async with serving(app_of(env)) as address:
        session = await open_session(address)
        async with batch_of(address, query=f"?session_id={session}") as connection:
            assert (await request(connection, op="open", count=1))["members"] == [0]
            body, headers = {"action": {"amount": 1}}, {HEADER: session}
            other = asyncio.create_task(http(address, "POST", "/step", body, headers))
            await asyncio.to_thread(env.entered.wait, WAIT_TIMEOUT_S)
            await connection.send(json.dumps({"id": 1, "op": "step", "actions": add(1)}))
            assert (await request(connection, op="state"))["errors"]  # the step is under way
            await asyncio.sleep(0.05)  # what did not wait for its turn would have begun
            assert env.stepping == 1
            env.release.set()
            assert (await answer(connection))["members"] == [0]
            assert (await other).status_code == 200


async def test_bytes_of_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_RUNNING_CHARS", 200)
    app = app_of(Counter, cap=1, max_wait_s=20.0)
    async with serving(app) as address, batch_of(address, 1) as first, batch_of(address) as second:
        await second.send(json.dumps({"id": 0, "op": "open", "wait_s": 20}))
        assert "queue" in await answer(second)
        for number in range(1, 9):
            await second.send(json.dumps({"id": number, "op": "state"}) + 100 * " ")
        conversations: Any = app.sockets._conversations
        (waiting,) = [one for one in conversations if one._link._opening_count]
        await eventually(lambda: len(waiting._link.running) == 3)
        await asyncio.sleep(0.05)  # in which more would be read
        assert len(waiting._link.running) == 3
        await first.close()
        reply = [await answer(second) for _ in range(9)]
        assert sorted(one["id"] for one in reply) == [*range(9)]


async def test_ended_member_gets_no_requests_and_is_garbage_collected() -> None:
    app = app_of(Counter, cap=2)
    async with serving(app) as address, batch_of(address, 2) as connection:
        (conversation,) = app.sockets._conversations
        sessions = [member.session for member in conversation._link.batch.members.values()]  # type: ignore[attr-defined]
        ended, failed = (weakref.ref(session.environment) for session in sessions)
        await request(connection, op="close", members=[0])
        for member, kind in ((0, "error"), (1, "observation")):
            await connection.send(
                json.dumps({"id": 8, "type": "step", "data": {"amount": 1}, "member": member})
            )
            assert (await answer(connection))["type"] == kind
        assert (await request(connection, op="step", actions=add(1)))["members"] == [1]
        for request_fields in ({"op": "state", "members": [0, 1]}, {"op": "close", "members": [0]}):
            assert (await request(connection, **request_fields))["error"]["code"] == "SESSION_ERROR"
        await eventually(lambda: ended() is None)  # nobody keeps it for its number
        assert (await request(connection, op="open"))["members"] == [2]
        app.sessions.drop(sessions[1])
        await eventually(lambda: failed() is None)
        reply = await request(connection, op="state")
        assert (reply["members"], list(reply["errors"])) == ([2], ["1"])


async def test_requests_over_the_limit_are_refused_by_id() -> None:
    size = MAX_REQUESTS + 1
    async with serving(app_of(SlowAsync.fresh(), cap=size)) as address, batch_of(address, size) as connection:
        for member in range(size):
            request_fields = {"id": member, "op": "step", "members": [member], "actions": add(1)}
            await connection.send(json.dumps(request_fields))
        reply = await answer(connection)
        assert (reply["id"], reply["error"]["code"]) == (MAX_REQUESTS, "EXECUTION_ERROR")


WRONG: list[tuple[Any, str]] = [
    ("no json", "INVALID_JSON"),
    ("[]", "VALIDATION_ERROR"),
    (b"", "INVALID_JSON"),
    (b"\xff\xff\xff\xff{}", "INVALID_JSON"),
    ({"id": 1, "op": "run"}, "UNKNOWN_TYPE"),
    ({"id": 1, "op": "fork", "count": 1}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "fork", "member": 2, "count": 1}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "fork", "member": 0, "count": MAX_MEMBERS}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "snapshot", "member": 0, "count": 1}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "close", "members": [2]}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "close", "snapshots": ["none"]}, "VALIDATION_ERROR"),
    ({"op": "state"}, "VALIDATION_ERROR"),
    ({"id": -1, "op": "state"}, "VALIDATION_ERROR"),
    ({"id": True, "op": "state"}, "VALIDATION_ERROR"),
    ({"id": 2**53, "op": "state"}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "state", "deadline_s": 0}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "open", "count": 0}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "open", "count": MAX_MEMBERS}, "VALIDATION_ERROR"),  # two are there
    ({"id": 1, "op": "state", "members": [2]}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "state", "members": [0, 0]}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "state", "members": []}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "reset", "seeds": [1]}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "reset", "seeds": [-1, 1]}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "reset", "options": {"episode_id": 7}}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "step", "actions": add(1)}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "step", "actions": {"amount": 0}}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "step", "actions": add(1, 1), "autoreset": "yes"}, "VALIDATION_ERROR"),
    ({"id": 1, "op": "step", "actions": add(1, 1), "at_least": 0}, "VALIDATION_ERROR"),
]


async def test_malformed_requests_are_refused_and_the_sessions_stay() -> None:
    async with serving(app_of(Counter)) as address, batch_of(address, 2) as connection:
        for sent, code in WRONG:
            await connection.send(sent if isinstance(sent, str | bytes) else json.dumps(sent))
            reply = await answer(connection)
            assert (reply["error"]["code"], reply["last"]) == (code, True), sent
        assert totals(await request(connection, op="step", actions=add(1, 2))) == [1, 2]


async def test_released_dialect_is_the_default_and_production_mode_has_no_reset() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address) as connection:
        assert connection.subprotocol is None
        assert (await ask(connection, {"type": "reset"}))["type"] == "observation"
    async with (
        serving(app_of(Counter, mode="production")) as address,
        batch_of(address, 1) as connection,
    ):
        assert (await request(connection, op="reset"))["error"]["code"] == "UNKNOWN_TYPE"
        reply = await request(connection, type="reset")
        assert (reply["type"], reply["data"]["code"]) == ("error", "UNKNOWN_TYPE")


@pytest.mark.parametrize(
    ("request_fields", "key", "value"),
    [({"op": "step", "actions": add(1, 1)}, "members", [0, 1]), (step(1), "type", "observation")],
)
async def test_draining_server_answers_running_requests_first(
    request_fields: dict[str, Any], key: str, value: Any
) -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address, batch_of(address, 2) as connection:
        await connection.send(json.dumps({"id": 1, **request_fields}))
        await asyncio.to_thread(env.entered.wait, WAIT_TIMEOUT_S)
        draining = asyncio.create_task(app.drain(WAIT_TIMEOUT_S))
        env.release.set()
        assert (await answer(connection))[key] == value
        assert await wait_close_code(connection) == 1001
        await draining


@pytest.mark.parametrize(("others_keep", "kept"), [(0, 3), (1, 1)])
def test_clients_share_the_memory_for_kept_frames(
    others_keep: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_ALL_KEPT_BYTES", 3000)
    clients: dict[str, Any] = {}
    clients |= {str(number): SimpleNamespace(frames=SentFrames(clients)) for number in range(3)}
    for number, size in (("1", 1000 * others_keep), ("2", 1000 * others_keep)):
        clients[number].frames.keep(bytes(size))
    frames = clients["0"].frames
    for _ in range(3):
        frames.keep(bytes(900))
    assert len(frames.unread()) == kept
    assert frames.has_all_after(3 - kept)
    assert frames.has_all_after(0) is (kept == 3)


async def test_batch_does_not_overtake_a_request_that_waits_for_its_member() -> None:
    app = app_of(BlockingCounter)
    async with app.running():
        one = Link(app.links, "")
        one.receive(json.dumps({"id": 1, "op": "open", "lease_s": 60}))
        await eventually(lambda: one.batch.members)
        one.receive(json.dumps({"id": 2, **step(1)}))
        one.receive(json.dumps({"id": 3, "op": "step", "actions": add(1)}))
        await eventually(lambda: not one.running)
        replies = {reply["id"]: reply for reply in (decode_frame(frame)[0] for frame in one.frames.unread())}
        assert (replies[2]["type"], list(replies[3]["errors"])) == ("observation", ["0"])
        await one.close()


async def test_request_that_waits_for_a_batch_in_turns_comes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servers.sessions.batch._YIELD_INTERVAL_S", 0.0)
    size = 100
    app = app_of(Counter, size)
    async with app.running():
        one = Link(app.links, "")
        one.receive(json.dumps({"id": 1, "op": "open", "count": size, "lease_s": 60}))
        await eventually(lambda: one.batch.opened_count == size)
        one.receive(json.dumps({"id": 2, "op": "reset"}))  # it has many turns to go
        one.receive(json.dumps({"id": 3, "op": "reset"}))
        await eventually(lambda: not one.running)
        assert [decode_frame(frame)[0]["id"] for frame in one.frames.unread()] == [1, 2, 3]
        await one.close()
