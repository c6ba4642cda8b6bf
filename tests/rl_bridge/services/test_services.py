"""Services on real Monarch: calls, fan-outs, starts and ends."""

import asyncio
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import psutil
import pytest
from service_waits import WAIT_S, all_serve, descendants, kill, pids_of, until, until_gone

from rl_bridge.errors import RemoteError, RoleError, TrainingError

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


async def test_services_end_side_by_side_and_all_of_them_though_the_run_is_told_to_go_meanwhile(
    roles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.services import processes
    from rl_bridge.services.fleet import Fleet

    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", WAIT_S)
    pids: set[int] = set()
    before = descendants()

    async def run() -> None:
        async with Fleet(tmp_path / "logs"):
            for name in ("first", "second"):
                service = await roles.Leaving.options(name=name).as_service(tmp_path, 3)
                pids.add(await service.pid.route())

    running = asyncio.ensure_future(run())
    async with asyncio.timeout(WAIT_S):
        # One after the other the second would not have begun with it.
        await until(lambda: len(names(tmp_path, "leaving-*")) == 2 or running.done())
    started = pids | (descendants() - before)
    running.cancel()
    (tmp_path / "leaving-last").touch()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert names(tmp_path, "left-*") == {f"left-{pid}" for pid in pids}
    await until_gone(started)


@pytest.mark.usefixtures("fleet")
async def test_calls_leave_nothing_in_the_memory_of_their_caller(roles: ModuleType) -> None:
    policy = await roles.Policy.as_service()
    sizes = []
    for _ in range(2):
        for _ in range(3000):
            await policy.once.route()
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[1] - sizes[0] < 1 << 21  # a week has hundreds of millions


async def test_replicas_share_calls_take_fan_outs_and_are_restarted_when_killed(
    roles: ModuleType, tmp_path: Path
) -> None:
    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path / "logs", heartbeat_s=0.2) as fleet:
        policy = await roles.Policy.options(num_replicas=2).as_service(tmp_path)
        taken = await policy.load.fanout(3)
        assert (taken.values, taken.failed) == ({0: 3, 1: 3}, {})
        answers = await asyncio.gather(*(policy.generate.route(0.3) for _ in range(4)))
        pids = pids_of(policy)
        assert sorted(pid for pid, _, _ in answers) == sorted([*pids, *pids])
        assert {version for _, version, _ in answers} == {3}
        for status in policy.replicas:
            log = tmp_path / "logs" / f"policy-{status.id}.log"
            assert f"setting up {status.pids[0]}" in log.read_text()
        assert fleet.services == {"policy": policy}

        # An error of ours comes as what it was, never as the call's value, and loses no replica.
        with pytest.raises(TrainingError, match="the loss is strange"):
            await policy.fail.route(True)
        with pytest.raises(RemoteError, match="ZeroDivisionError: not one of ours") as caught:
            await policy.fail.route(False)
        assert "in fail" in str(caught.value)  # where it happened
        with pytest.raises(TrainingError):
            await policy.fail.fanout(True)
        with pytest.raises(AttributeError, match=r"one of the endpoints .*generate.*, got 'generte'"):
            _ = policy.generte
        assert [(status.id, status.state, status.restarts) for status in policy.replicas] == [
            (0, "serving", 0),
            (1, "serving", 0),
        ]

        # A session stays with its replica until that is killed; the next one holds the weights before it serves.
        session = policy.session()
        (home,) = {(await session.generate.route())[0] for _ in range(4)}
        started = set(pids) | (descendants() - before)
        kill(home)
        async with asyncio.timeout(WAIT_S):
            (other,) = {(await session.generate.route())[0] for _ in range(4)}
        assert (other, session.moves) == ((set(pids) - {home}).pop(), 1)
        await until(lambda: all_serve(policy))
        assert sum(status.restarts for status in policy.replicas) == 1
        pids = pids_of(policy)
        assert home not in pids
        assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {3}
        started |= set(pids) | (descendants() - before)
    # They were told that the end comes, and it came.
    assert names(tmp_path, "closed-*") == {f"closed-{pid}" for pid in pids}
    await until_gone(started)
    with pytest.raises(RoleError, match="the service policy has been stopped"):
        await policy.generate.route()


@pytest.mark.soak
async def test_failed_start_is_an_error(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.errors import ModelError
    from rl_bridge.services.fleet import Fleet

    with pytest.raises(RoleError, match="expected an open fleet to start Policy in"):
        await roles.Policy.as_service()
    before = descendants()
    async with asyncio.timeout(WAIT_S), Fleet(tmp_path / "logs") as fleet:
        (tmp_path / "refuse").touch()
        with pytest.raises(ModelError, match="expected a model"):
            await roles.Policy.options(num_replicas=2).as_service(tmp_path)
        (tmp_path / "refuse").unlink()
        (tmp_path / "wait").touch()
        with pytest.raises(RoleError, match="replica 0 of policy did not serve within 2 s"):
            await roles.Policy.options(start_timeout_s=2.0).as_service(tmp_path)
        (tmp_path / "wait").unlink()
        with pytest.raises(RoleError, match="never made"):
            await roles.Unmakable.as_actor()
        with pytest.raises(TypeError, match="pickle"):
            await roles.Policy.as_service(Lock())
        await until_gone(descendants() - before)
        assert fleet.services == {}
        # The name is free again, until it is taken.
        await roles.Policy.as_service(tmp_path)
        with pytest.raises(ValueError, match="a name that no other service has, got 'policy'"):
            await roles.Policy.as_service(tmp_path)


@pytest.mark.soak
async def test_the_ranks_of_a_replica_act_as_one(roles: ModuleType, fleet: Any, tmp_path: Path) -> None:
    environment = {"ROPEWALK_TEST": "set"}
    ranks = await roles.Ranks.options(procs=2, name="crew", environment=environment).as_actor()
    status = ranks.replicas[0]
    assert len(set(status.pids)) == 2
    assert await fleet.guard(ranks.step.route(7)) == (0, status.pids[0], 7)
    assert (await ranks.step.fanout(8)).values == {0: (0, status.pids[0], 8)}
    assert await ranks.variable.route("ROPEWALK_TEST") == "set"
    assert names(tmp_path / "logs", "*.log") == {"crew-0-0.log", "crew-0-1.log"}
    # The first rank waits for the second, which failed: that ends the call, not the wait.
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(TrainingError, match="cannot go on"):
            await ranks.wait_for_others.route()


async def test_second_signal_still_ends_everything_and_returns_the_hosts(tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.hosts import Hosts

    events: list[str] = []

    class Rented(Hosts):
        async def close(self) -> None:
            events.append("hosts")

    class Stopped:
        def __init__(self, name: str, *, hangs: bool) -> None:
            self.name, self.hangs = name, hangs

        async def stop(self) -> None:
            events.append(self.name)
            if self.hangs:
                await asyncio.Event().wait()

    async def run() -> None:
        async with Fleet(tmp_path / "logs", hosts=Rented(())) as fleet:
            first, last = Stopped("first", hangs=False), Stopped("last", hangs=True)
            fleet._services = {"first": first, "last": last}  # type: ignore[dict-item]

    running = asyncio.ensure_future(run())
    await until(lambda: events == ["first", "last"])
    while not running.done():  # the first time it waits on for who has not ended
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events == ["first", "last", "hosts"]


async def test_a_job_is_given_back_though_its_hosts_do_not_end_in_time() -> None:
    from rl_bridge.services.hosts import Hosts

    events: list[str] = []

    class Mesh:
        async def stop(self) -> None:
            events.append("stop")
            await asyncio.Event().wait()

    class Job:
        def kill(self) -> None:
            events.append("kill")

    hosts = Hosts.from_job(Job(), mesh="hosts")
    hosts._meshes = (Mesh(),)  # type: ignore[attr-defined]
    closing = asyncio.ensure_future(hosts.close())
    await until(lambda: events == ["stop"])
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert events == ["stop", "kill"]
