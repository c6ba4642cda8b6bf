"""Forks and snapshots of sessions, in the dialect `ropewalk.v1`."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from counter import Add, AsyncCounter, BlockingCounter, Counter
from counter_client import CounterEnv
from server_apps import app_of
from serving import eventually, serving
from v1_frames import validated_frames  # noqa: F401 - a fixture

from openenv_core import EnvClient
from openenv_core.client.vector import VectorClient
from openenv_core.errors import (
    CapacityError,
    ClientClosedError,
    ConfigurationError,
    ExecutionError,
    FactoryError,
    SessionError,
    ValidationFailedError,
)
from servers.sessions import DeadlineExceededError, snapshots


@dataclass
class Held:
    """A state that must be closed."""

    total: int
    closed: ClassVar[int] = 0

    async def close(self) -> None:
        Held.closed += 1


class AsyncState(AsyncCounter):
    """Has its own async methods for snapshots; the others copy their attributes."""

    async def snapshot(self) -> Held:
        await asyncio.sleep(0)
        return Held(self._state.total)

    async def restore(self, state: Held) -> None:
        await asyncio.sleep(0)
        self._state.total = state.total


pytestmark = pytest.mark.usefixtures("validated_frames")

EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncState])


@asynccontextmanager
async def vector(address: str, count: int = 1, **options: Any) -> AsyncIterator[VectorClient]:
    client: EnvClient[Any, Any, Any] = EnvClient(f"http://{address}", **options)
    members = await client.vector(count)
    try:
        yield members
    finally:
        await members.close()


async def totals(client: VectorClient, members: list[int], *amounts: int) -> list[int]:
    """Step members by their amounts; return their totals."""
    (reply,) = await client.ask("step", members=members, actions=[{"amount": one} for one in amounts])
    return [row["total"] for row in reply.fields["rows"]]


@EVERY_WAY
async def test_forks_start_from_the_members_state_and_then_diverge(env: Any) -> None:
    app, closed = app_of(env, 8), Held.closed
    async with serving(app) as address, vector(address, 2) as client:
        await client.ask("reset", seeds=[2, 0])
        assert await totals(client, [0], 1) == [3]

        assert await client.fork(0, 3) == [2, 3, 4]
        assert await totals(client, [0, 2, 3, 4], 1, 2, 3, 1) == [4, 5, 6, 4]
        assert await client.fork(3, 1) == [5]
        assert await totals(client, [3, 5, 0], 1, 2, 1) == [7, 8, 5]
        with pytest.raises(CapacityError):  # all or none
            await client.fork(0, 3)
        assert app.sessions.active == 6
    await eventually(lambda: app.sessions.active == 0)
    assert Held.closed - closed == (3 if env is AsyncState else 0)


@EVERY_WAY
async def test_concurrent_forks_keep_the_member_limit_of_a_connection(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv_core.protocol.batch.MAX_MEMBERS", 6)
    app = app_of(env, 16)
    async with serving(app) as address, vector(address, 2) as client:
        await client.ask("reset")
        forks = await asyncio.gather(*(client.fork(at, 3) for at in (0, 1)), return_exceptions=True)
        assert forks[0] == [2, 3, 4]
        assert isinstance(forks[1], ValidationFailedError)
        assert await client.fork(1, 1) == [5]
        assert app.sessions.active == 6


async def test_restore_at_a_full_server_waits_for_a_slot() -> None:
    app = app_of(Counter, 3, max_wait_s=60.0)
    async with serving(app) as address, vector(address, 2) as client:
        await client.ask("reset", seeds=[1, 5])
        snapshot = await client.snapshot(1)
        async with vector(address):
            read = client._conversation._frames_read
            restoring = asyncio.create_task(client.restore(snapshot))
            await eventually(lambda: client._conversation._frames_read > read)  # its place in the queue
        assert await restoring == [2]
        assert await totals(client, [2], 1) == [6]


@EVERY_WAY
async def test_snapshot_outlives_its_connection_and_belongs_to_its_owner(env: Any) -> None:
    tokens = ("first-token-0123456789", "other-token-0123456789")
    app, closed = app_of(env, 4, tokens=tokens), Held.closed
    async with serving(app) as address:
        async with vector(address, token=tokens[0]) as client:
            await client.ask("reset", seeds=[5])
            snapshot = await client.snapshot(0)
            assert await totals(client, [0], 2) == [7]
        async with vector(address, token=tokens[1]) as stranger:
            for ask in (stranger.restore(snapshot), stranger.end(snapshots=[snapshot])):
                with pytest.raises(ValidationFailedError, match="kept for you"):
                    await ask
        async with vector(address, token=tokens[0]) as client:
            assert await client.restore(snapshot, 2) == [1, 2]
            assert await totals(client, [1, 2], 1, 2) == [6, 7]
            assert await client.restore(snapshot) == [3]
            assert await totals(client, [3], 0) == [5]
            await client.end([1, 2], [snapshot])
            await eventually(lambda: app.sessions.active == 2)
            with pytest.raises(ValidationFailedError, match="kept for you"):
                await client.restore(snapshot)
        assert len(app.sessions.snapshots) == 0
    assert Held.closed - closed == (1 if env is AsyncState else 0)


async def test_finished_episode_is_finished_in_its_forks() -> None:
    async with serving(app_of(Counter)) as address, vector(address) as client:
        await client.ask("reset", seeds=[9])
        assert await totals(client, [0], 1) == [10]
        await client.fork(0, 1)
        await client.restore(await client.snapshot(0))
        (reply,) = await client.ask("step", actions=[{"amount": 1}] * 3, autoreset="next_step")
        assert [row["total"] for row in reply.fields["rows"]] == [0, 0, 0]


class Unforkable(Counter):
    FORKABLE = False


class Unrestorable(Counter):
    closed = 0

    def close(self) -> None:
        Unrestorable.closed += 1

    def restore(self, state: Any) -> None:
        raise OSError("no disk")


class Unreadable(Counter):
    def snapshot(self) -> Any:
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("env", "error", "expected"),
    [
        (Unforkable, ExecutionError, "FORKABLE"),
        (Unreadable, ExecutionError, "no disk"),
        (Unrestorable, FactoryError, "no disk"),
    ],
)
async def test_environment_that_cannot_be_forked_reports_it_and_continues(
    env: Any, error: type[Exception], expected: str
) -> None:
    app = app_of(env)
    async with serving(app) as address, vector(address) as client:
        await client.ask("reset", seeds=[1])
        with pytest.raises(error, match=expected):
            await client.fork(0, 2)
        assert app.sessions.active == 1
        assert Unrestorable.closed == 2 * (env is Unrestorable)  # those that were to be restored
        assert await totals(client, [0], 1) == [2]


class Stuck(BlockingCounter):
    """Its snapshots or its restores never end, depending on the total."""

    held = threading.Event()

    def snapshot(self) -> Any:
        if self._state.total == 1:
            self.held.wait()
        return super().snapshot()

    def restore(self, state: Any) -> None:
        super().restore(state)
        if self._state.total == 2:
            self.held.wait()


@pytest.mark.slow
async def test_snapshot_or_restore_over_its_deadline_ends_only_its_own_session() -> None:
    Stuck.held.clear()
    app = app_of(Stuck, 8, step_timeout_s=1.0)
    try:
        async with serving(app) as address, vector(address, 3) as client:
            await client.ask("reset", seeds=[1, 2, 3])
            with pytest.raises(SessionError, match="its session has been ended"):
                await client.fork(0, 2)  # the member has ended
            with pytest.raises(SessionError, match="its session has been ended"):
                await client.fork(1, 2)  # its forks have
            await eventually(lambda: app.sessions.active == 2)
            (reply,) = await client.ask("step", actions=[{"amount": 1}] * 3)
            assert list(reply.fields["errors"]) == ["0"]
            assert [row["total"] for row in reply.fields["rows"]] == [3, 4]
    finally:
        Stuck.held.set()


class Sized(Counter):
    """Has snapshots of known size."""

    def snapshot(self) -> Any:
        return bytes(self._state.total)

    def restore(self, state: bytes) -> None:
        self._state.total = len(state)


async def test_snapshots_are_bounded_in_number_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOTS", 3)
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOT_BYTES", 12)
    app = app_of(Sized, 4, idle_timeout_s=600.0)
    table = app.sessions.snapshots
    async with serving(app) as address, vector(address) as client:
        await client.ask("reset", seeds=[5])
        first, _ = [await client.snapshot(0) for _ in range(2)]
        with pytest.raises(CapacityError, match="15 bytes"):
            await client.snapshot(0)
        await client.ask("reset", seeds=[1])
        await client.snapshot(0)
        with pytest.raises(CapacityError, match="3 snapshots"):
            await client.snapshot(0)
        await client.end(snapshots=[first])
        assert len(table) == 2
        table._lease_s = 0.1  # for the last one only
        last = await client.snapshot(0)
        await eventually(lambda: len(table) == 2)
        with pytest.raises(ValidationFailedError, match="kept for you"):
            await client.restore(last)


class SlowState(AsyncState):
    """Its snapshots wait for an event."""

    entered: asyncio.Event
    go: asyncio.Event

    async def snapshot(self) -> Held:
        self.entered.set()
        await self.go.wait()
        return await super().snapshot()


async def test_busy_member_is_neither_forked_nor_ended_and_disconnect_frees_it() -> None:
    SlowState.entered, SlowState.go = asyncio.Event(), asyncio.Event()
    app = app_of(SlowState)
    async with serving(app) as address:
        async with vector(address) as client:
            await client.ask("reset", seeds=[1])
            forking = asyncio.create_task(client.fork(0, 1))
            await SlowState.entered.wait()
            for ask in (client.fork(0, 1), client.end([0])):
                with pytest.raises(ExecutionError, match="the session is busy"):
                    await ask
            forking.cancel()
        await eventually(lambda: app.sessions.active == 0)


class ThreadState(BlockingCounter):
    """Its snapshots wait for an event in a thread."""

    entered: threading.Event
    go: threading.Event

    def snapshot(self) -> Any:
        self.entered.set()
        self.go.wait()
        return Held(self._state.total)


@pytest.mark.parametrize(
    ("env", "standing", "deadline_s"),
    [
        (SlowState, True, None),
        (ThreadState, True, None),
        (ThreadState, False, None),
        (ThreadState, True, 1.0),
    ],
)
async def test_snapshot_that_finishes_after_its_request_ended_is_closed(
    env: Any, standing: bool, deadline_s: float | None
) -> None:
    kind = asyncio if env is SlowState else threading
    env.entered, env.go, closed = kind.Event(), kind.Event(), Held.closed
    table = app_of(env, step_timeout_s=deadline_s).sessions
    session = await table.open("") if standing else (await table.admit(table.queue.enter("", 1)))[0]
    asking = asyncio.create_task(snapshots.SessionState.take(session, episode_ended=False))
    await eventually(env.entered.is_set)
    if deadline_s is None:
        asking.cancel()
    await asyncio.wait([asking])
    env.go.set()
    await eventually(lambda: Held.closed == closed + 1)
    await table.drop(session)
    await table.shut_down()
    table.executor.close()


class SlowRestore(BlockingCounter):
    """Its restores wait for an event in a thread."""

    go: threading.Event
    entered: int
    closed: int

    def snapshot(self) -> Any:
        return Held(self._state.total)

    def restore(self, state: Held) -> None:
        type(self).entered += 1
        self.go.wait()

    def close(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_interrupted_restore_is_closed_once_it_finishes(leaves: bool) -> None:
    env, held = SlowRestore, Held.closed
    env.go, env.entered, env.closed = threading.Event(), 0, 0
    app = app_of(env, 4, step_timeout_s=None if leaves else 1.0)
    try:
        async with serving(app) as address, vector(address) as client:
            await client.ask("reset")
            forking = asyncio.create_task(client.fork(0, 1))
            await eventually(lambda: env.entered == 1)
            if leaves:
                await client.close()
            await asyncio.wait([forking])
            await eventually(lambda: app.sessions.active == (0 if leaves else 1))
            assert isinstance(forking.exception(), ClientClosedError if leaves else SessionError)
            await eventually(lambda: env.closed == leaves)  # the member's own
            assert Held.closed == held
            env.go.set()
            await eventually(lambda: (env.closed, Held.closed) == (1 + leaves, held + 1))
    finally:
        env.go.set()


async def test_snapshot_lives_while_in_use_and_then_for_its_lease() -> None:
    app = app_of(AsyncState, 4, idle_timeout_s=600.0)
    table = app.sessions.snapshots
    async with serving(app) as address, vector(address) as client:
        await client.ask("reset", seeds=[1])
        snapshot, closed = await client.snapshot(0), Held.closed
        with table.use("", snapshot) as state:
            table._lease_s = 0.1
            with table.use("", snapshot):
                pass  # renews the lease, which expires while the state is in use
            await asyncio.sleep(0.5)
            assert (len(table), state.users) == (1, 1)
            table.drop("", [snapshot])
            await asyncio.sleep(0)
            assert Held.closed == closed
        await eventually(lambda: (len(table), Held.closed) == (0, closed + 1))


async def test_exclusive_class_keeps_its_slot_until_an_interrupted_restore_ends() -> None:
    env = type("Alone", (SlowRestore,), {"SUPPORTS_CONCURRENT_SESSIONS": False})
    env.go, env.entered, env.closed = threading.Event(), 0, 0
    app = app_of(env, 1, step_timeout_s=1.0)
    table = app.sessions
    try:
        state = snapshots.SessionState(Held(3))
        with pytest.raises(DeadlineExceededError):
            await table.admit(table.queue.enter(""), state=state)
        assert (env.entered, table.active) == (1, 1)
        env.go.set()
        await eventually(lambda: (table.active, env.closed) == (0, 1))
    finally:
        env.go.set()


@EVERY_WAY
async def test_forked_clients_close_with_their_parent(env: Any) -> None:
    app = app_of(env, 4)
    async with serving(app) as address:
        async with CounterEnv(f"http://{address}") as client:
            await client.reset(seed=2)
            await client.step(Add(amount=1))
            first, second = await client.fork(2)
            assert len(app.sessions.snapshots) == 0
            for one, amount, total in ((first, 1, 4), (second, 2, 5), (client, 3, 6), (first, 1, 5)):
                assert (await one.step(Add(amount=amount))).observation.total == total
            (deeper,) = await first.fork(1)
            await first.close()
            await eventually(lambda: app.sessions.active == 2)  # and what was forked of it
            assert (await second.step(Add(amount=1))).observation.total == 6
            with pytest.raises(ClientClosedError):
                await deeper.state()
            with pytest.raises(CapacityError):
                await client.fork(3)
            await eventually(lambda: app.sessions.active == 2 and not len(app.sessions.snapshots))
        await eventually(lambda: app.sessions.active == 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_forks_open_or_end_even_if_dropping_the_snapshot_fails(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = asyncio.Event()

    def drop(*_: Any) -> None:
        dropping.set()
        raise snapshots.UnknownSnapshotError("gone")

    monkeypatch.setattr(snapshots.SnapshotTable, "drop", drop)
    app = app_of(Counter, 4)
    async with serving(app) as address, CounterEnv(f"http://{address}") as client:
        await client.reset(seed=2)
        forking = asyncio.create_task(client.fork(2))
        if leaves:
            await dropping.wait()
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            await eventually(lambda: app.sessions.active == 1)
        else:
            assert [(await one.step(Add(amount=1))).observation.total for one in await forking] == [3, 3]


async def test_the_released_dialect_has_no_forks() -> None:
    async with (
        serving(app_of(Counter)) as address,
        CounterEnv(f"http://{address}", transport="http") as client,
    ):
        with pytest.raises(ConfigurationError, match="over WebSocket"):
            await client.fork(1)
