"""Services of fake replicas: their hosts, answers, notifications and logs."""

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_target import FakeTarget
from service_waits import WAIT_S, until

from rl_bridge.config.monarch import RestartPolicy
from rl_bridge.errors import RoleError, WeightsError
from rl_bridge.services.placement import RankProcess

pytestmark = pytest.mark.heavy


class Processes:
    """One start of a replica, in one process, which tells where it is and ends when the test lets it."""

    def __init__(self, host: str) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.tells, self.ends, self.ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.answers = asyncio.Event()
        self._locate = RankProcess(host, 1)
        self.host = 0

    def spawn(self, actor: type[Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        async def place() -> RankProcess:
            await self.tells.wait()
            return self._locate

        async def wait_forever() -> None:
            await asyncio.Event().wait()

        async def answer() -> str:
            await self.answers.wait()
            return self._locate.host

        endpoints = {"_locate": place, "_wait_forever": wait_forever, "spans": answer}
        return (SimpleNamespace(**{name: SimpleNamespace(choose=call) for name, call in endpoints.items()}),)

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def watch_pids(self, pids: Iterable[int]) -> None:
        assert list(pids) == [1]

    async def stop(self) -> None:
        self.ending.set()
        await self.ends.wait()

    def tail(self) -> str:
        return ""


def service_of(
    actor: type[Any],
    starts: Iterable[Any] = (),
    failures: list[Exception] | None = None,
    on_left: Callable[[], None] = lambda: None,
    **options: Any,
) -> Any:
    """A service that nobody has started, with the processes of each start of a replica, or the error of making them."""
    from rl_bridge.services.placement import ServiceOptions
    from rl_bridge.services.service import Service

    coming = iter(starts)

    def start(replica: int, host: int | None) -> Any:
        if isinstance(made := next(coming), Exception):
            raise made
        return made

    return Service(
        "policy",
        actor,
        (),
        ServiceOptions(**{"restarts": RestartPolicy(backoff_s=0.0), **options}),
        start=start,
        record=lambda replica, what, detail="": None,
        on_failure=[].append if failures is None else failures.append,
        on_left=on_left,
    )


def willing(host: int = 0) -> Processes:
    """Processes that do at once what they are told."""
    processes = Processes(f"host {host}")
    processes.host = host
    processes.tells.set()
    processes.ends.set()
    return processes


@pytest.mark.parametrize("noticed_by_a_call", [True, False])
async def test_a_lost_replica_is_on_no_host_until_it_has_started_again(noticed_by_a_call: bool) -> None:
    from rl_bridge.services.actor import ServiceActor
    from rl_bridge.services.restarts import ReplicaState
    from rl_bridge.services.service import ReplicaSupervisor

    first, second = Processes("one"), Processes("two")
    supervisor = ReplicaSupervisor(0, service_of(ServiceActor, [first, second]))
    running = asyncio.ensure_future(supervisor.run())
    async with asyncio.timeout(WAIT_S):
        first.tells.set()
        await asyncio.shield(supervisor.ready)
        assert supervisor.processes == (RankProcess("one", 1),)
        if noticed_by_a_call:
            supervisor.lose(1, "it does not answer")
        else:
            first.lose("it does not answer")
            await first.ending.wait()
        assert (supervisor.state, supervisor.processes) == (ReplicaState.LOST, ())
        first.ends.set()
        await until(lambda: supervisor.state is ReplicaState.STARTING)
        assert supervisor.processes == ()
        second.tells.set()
        await until(lambda: supervisor.state is ReplicaState.SERVING)
        assert supervisor.processes == (RankProcess("two", 1),)
        supervisor.request_stop()
        second.ends.set()
        await running
    assert (supervisor.state, supervisor.processes) == (ReplicaState.STOPPED, ())


async def test_start_that_blocks_its_process_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.services import service
    from rl_bridge.services.actor import ServiceActor

    monkeypatch.setattr(service, "PING_TIMEOUT_S", 0.0)
    processes = Processes("one")
    supervisor = service.ReplicaSupervisor(0, service_of(ServiceActor, [processes]))
    running = asyncio.ensure_future(supervisor.run())
    for _ in range(20 * service.MAX_MISSED_PINGS):
        await asyncio.sleep(0)
    assert not processes.lost.done()
    async with asyncio.timeout(WAIT_S):
        processes.tells.set()
        await asyncio.shield(supervisor.ready)
        supervisor.request_stop()
        processes.ends.set()
        await running


HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


@pytest.mark.parametrize("killed", [False, True])
async def test_notification_of_generators_does_not_wait_for_starting_ones(killed: bool) -> None:
    from rl_bridge.generator.actor import PolicyActor

    service = service_of(PolicyActor)
    if killed:
        service._balancer.add(gone := FakeTarget(0))
        gone.die()
    starting = FakeTarget(0, incarnation=2)
    async with asyncio.timeout(HANG_S):
        await service.update_weights.tell(3)
        notified = await service.sleep.tell()
        assert (notified.values, service.roster.targets) == ({}, ())
        await service.catch_up(starting)
    assert starting.calls == [("sleep", ())]  # it needs no weights for that
    assert service.roster.targets == (starting,)


async def test_unresponsive_replica_hides_no_other_answer() -> None:
    from rl_bridge.services.actor import ServiceActor

    service = service_of(ServiceActor)
    targets = [FakeTarget(replica) for replica in range(3)]
    targets[1].hold()
    for target in targets:
        service._balancer.add(target)
    async with asyncio.timeout(HANG_S):
        assert await service.query_replicas("spans", timeout_s=0.05) == {0: 0, 2: 2}


async def test_starting_replica_that_refuses_the_state_is_replaced(roles: ModuleType) -> None:
    service, refusing = service_of(roles.Policy), FakeTarget(0)
    refusing.hold()
    service._balancer.add(refusing)
    async with asyncio.timeout(HANG_S):
        fanning = asyncio.ensure_future(service.load.fanout(2))
        await until(lambda: bool(refusing.calls))
        await service.catch_up(FakeTarget(1))
        refusing.error = WeightsError("the publisher cannot be reached from here")
        refusing.released.set()
        fanned = await fanning
    assert fanned.values == {1: 1}
    assert [type(error) for error in fanned.failed.values()] == [WeightsError]
    # It would answer from the past.
    assert [target.replica for target in service.roster.targets] == [1]
    assert service.roster.lost == ((0, 1),)


async def test_service_goes_on_as_long_as_enough_replicas_are_left() -> None:
    from rl_bridge.services.actor import ServiceActor

    first, joined = willing(), willing(1)
    failures: list[Exception] = []
    never = RestartPolicy(budget=0)
    service = service_of(ServiceActor, [first, joined], failures, max_replicas=2, restarts=never)
    async with asyncio.timeout(HANG_S):
        await service.start()
        service.grow(1, 1)
        service.grow(1, 1)  # there is no more than one on a host without GPUs
        await until(lambda: service.serving == 2)
        first.lose("it does not answer")
        await until(lambda: [row.id for row in service.replicas] == [1])
        assert failures == []
        joined.lose("it does not answer")
        await until(lambda: bool(failures))
        await service.stop()
    assert "replica 1 of policy is lost, and it is never restarted" in str(failures[0])


async def test_replica_that_has_no_room_any_more_waits_for_a_host_to_join() -> None:
    from rl_bridge.services.actor import ServiceActor
    from rl_bridge.services.placement import NoRoomError

    first, full = willing(), NoRoomError("expected room, got none")
    service = service_of(ServiceActor, [first, full, willing(1)], max_replicas=2, with_gpus=True)
    async with asyncio.timeout(HANG_S):
        await service.start()
        leaving = asyncio.ensure_future(service.leave_host(0, notice=True))
        await leaving
        await until(lambda: service.replicas[0].state == "starting")
        service.grow(1, 0)
        await until(lambda: service.serving == 1)
        assert [row.restarts for row in service.replicas] == [0]
        await service.stop()


async def test_spare_host_takes_over_for_one_that_is_lost() -> None:
    from rl_bridge.services.actor import ServiceActor

    joined = willing(1)
    service = service_of(
        ServiceActor, [willing(), joined, willing(2)], on_left=lambda: service.grow(2, 1), max_replicas=2
    )
    async with asyncio.timeout(HANG_S):
        await service.start()
        service.grow(1, 1)
        await until(lambda: service.serving == 2)
        service.grow(2, 1)  # which is a spare
        await service.leave_host(1, notice=False)
        await until(lambda: [row.id for row in service.replicas] == [0, 2] and service.serving == 2)
        await service.stop()


async def test_calls_that_a_leaving_replica_does_not_complete_are_made_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl_bridge.services import service as services
    from rl_bridge.services.actor import ServiceActor

    class Repeatable(ServiceActor):
        REPEATABLE = frozenset({"spans"})

    monkeypatch.setattr(services, "DRAIN_TIMEOUT_S", 0.0)
    first, second = willing(), willing(1)
    second.answers.set()
    service = service_of(Repeatable, [first, second])
    async with asyncio.timeout(HANG_S):
        await service.start()
        calling = asyncio.ensure_future(service.spans.route())
        await until(lambda: service.replicas[0].in_flight == 1)
        await service.leave_host(0, notice=True)
        assert await calling == "host 1"
        assert service.roster.lost == ((0, 1),)
        await service.stop()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_logs_are_bounded_while_processes_append_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.services import fleet, processes

    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    monkeypatch.setattr(fleet, "LOG_CHECK_INTERVAL_S", 0.02)
    for monarchs in ("supervise", "shut_down_at_exit"):
        monkeypatch.setattr(fleet, monarchs, lambda *_: None)
    (tmp_path / "small.log").write_bytes(b"s" * 1000)
    async with fleet.Fleet(tmp_path):
        writer = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", f"exec cat >>{tmp_path / 'policy-0.log'}", stdin=asyncio.subprocess.PIPE
        )
        assert writer.stdin is not None
        writer.stdin.write(b"a" * 500 + b"b" * 1000)
        await until(lambda: "policy-0.log.1" in contents(tmp_path) and not contents(tmp_path)["policy-0.log"])
        writer.stdin.write(b"after")
        writer.stdin.close()
        assert await writer.wait() == 0
    assert contents(tmp_path) == {
        "policy-0.log": b"after",
        "policy-0.log.1": b"b" * 1000,
        "small.log": b"s" * 1000,
    }


class Opened:
    """Hosts that note whether anybody has opened them, and then cannot be reached."""

    was_opened = False

    async def open(self) -> None:
        self.was_opened = True
        raise RoleError("nobody answers")


async def test_failed_start_leaves_no_open_host_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.services.fleet import Fleet

    scratch, hosts = tmp_path / "scratch", Opened()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(RoleError, match=r"temporary files, got: .*No such file.*scratch.*TMPDIR"):
        await Fleet(tmp_path / "logs", hosts=hosts).__aenter__()  # type: ignore[arg-type]
    assert not hosts.was_opened
    scratch.mkdir()
    with pytest.raises(RoleError, match="nobody answers"):
        await Fleet(tmp_path / "logs", hosts=hosts).__aenter__()  # type: ignore[arg-type]
    assert list(scratch.iterdir()) == []
