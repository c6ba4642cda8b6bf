"""Replicas that are killed, on real Monarch: noticed, replaced, up to date before they serve; or the run ends."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from service_waits import WAIT_S, alive, descendants, held, kill, until, until_gone

from rl_bridge.config.monarch import RestartPolicy
from rl_bridge.errors import GeneratorError, ReplicaLostError, RoleError, WeightsError
from rl_bridge.services.options import START_VARIABLE, start_of

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]


def pids_of(service: object) -> list[int]:
    return [pid for status in service.replicas for pid in status.pids]  # type: ignore[attr-defined]


def all_serve(service: object) -> bool:
    return all(status.state == "serving" for status in service.replicas)  # type: ignore[attr-defined]


def began(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("began-")) for path in folder.glob("began-*")]


async def test_a_replica_killed_idle_serves_again_with_the_current_state(
    roles: ModuleType, tmp_path: Path
) -> None:
    from rl_bridge.services import processes
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2) as fleet:
        policy = await roles.Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        await policy.tune.fanout(0.5)
        await policy.load.fanout(2)
        victim, other = pids_of(policy)
        kill(victim)
        await until(lambda: policy.replicas[0].state != "serving")
        # Meanwhile the other has it all.
        assert {(await policy.generate.route())[0] for _ in range(3)} == {other}
        await until(lambda: all_serve(policy))
        assert [status.restarts for status in policy.replicas] == [1, 0]
        answers = {await policy.generate.route() for _ in range(4)}
        assert answers == {(pid, 2, 0.5) for pid in pids_of(policy)}
        happened = [event.kind for event in fleet.events if event.replica == 0]
        assert happened == ["starting", "serving", "lost", "restarting", "starting", "serving"]
        (how,) = (event.detail for event in fleet.events if event.kind == "lost")
        assert how == processes.PROCESS_ENDED or "Killed(sig=9)" in how  # whoever saw it first tells


async def test_each_start_of_each_replica_is_told_which_it_is(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        ranks = await roles.Ranks.options(num_replicas=2).as_service()
        assert (await ranks.variable.fanout(START_VARIABLE)).values == {
            0: start_of(0, 0, 0),
            1: start_of(1, 0, 0),
        }
        kill(pids_of(ranks)[1])
        await until(lambda: not all_serve(ranks))
        await until(lambda: all_serve(ranks))
        assert (await ranks.variable.fanout(START_VARIABLE)).values == {
            0: start_of(0, 0, 0),
            1: start_of(1, 0, 1),
        }


async def test_calls_of_a_killed_replica_are_repeated_only_where_they_may_be(
    roles: ModuleType, tmp_path: Path
) -> None:
    from rl_bridge.services.fleet import Fleet

    wait = tmp_path / "wait"
    wait.touch()
    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await roles.Policy.options(num_replicas=2).as_service()
        victim, other = pids_of(policy)
        twice = [asyncio.ensure_future(policy.generate.route(wait)) for _ in range(2)]
        once = [asyncio.ensure_future(policy.once.route(wait)) for _ in range(2)]
        await until(lambda: held(tmp_path) == 4)
        assert [status.in_flight for status in policy.replicas] == [2, 2]
        kill(victim)
        await until(lambda: held(tmp_path) > 4)  # one is repeated while the other replica is at its own
        wait.unlink()
        async with asyncio.timeout(WAIT_S):
            assert {pid for pid, _, _ in await asyncio.gather(*twice)} == {other}
            ends = await asyncio.gather(*once, return_exceptions=True)
        assert {type(end) for end in ends} == {int, ReplicaLostError}


async def test_all_replicas_killed_during_a_fan_out_take_it_when_they_start(
    roles: ModuleType, tmp_path: Path
) -> None:
    from rl_bridge.services.fleet import Fleet

    wait = tmp_path / "wait"
    wait.touch()
    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await roles.Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        fanning = asyncio.ensure_future(policy.load.fanout(2, wait))
        await until(lambda: held(tmp_path) == 2)
        kill(*pids_of(policy))
        wait.unlink()
        async with asyncio.timeout(WAIT_S):
            fanout = await fanning
        assert set(fanout.values.values()) == {2}
        assert set(fanout.failed) == {0, 1}
        await until(lambda: all_serve(policy))
        assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {2}


async def test_a_replica_that_refuses_a_fan_out_is_replaced(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await roles.Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        refusing, other = pids_of(policy)
        fanout = await policy.load.fanout(2, 0.0, refusing)
        assert fanout.values == {1: 2}
        assert isinstance(fanout.failed[0], GeneratorError)
        # It never answers with the old state.
        assert {(await policy.generate.route())[:2] for _ in range(3)} == {(other, 2)}
        await until(lambda: all_serve(policy))
        assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {2}
        assert refusing not in pids_of(policy)
        # What everybody refuses is the caller's error, and the state before it holds.
        with pytest.raises(GeneratorError, match="no weights 3"):
            await policy.load.fanout(3, 0.0, 0)
        async with asyncio.timeout(WAIT_S):
            assert (await policy.generate.route())[1] == 2
        await until(lambda: all_serve(policy))
        assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {2}


async def test_a_state_that_cannot_be_had_costs_no_restart(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    gone = tmp_path / "gone"
    async with Fleet(tmp_path / "logs", heartbeat_s=0.2) as fleet:
        once = RestartPolicy(budget=1, backoff_s=0.0)
        policy = await roles.Policy.options(num_replicas=2, restarts=once).as_service()
        await policy.load.fanout(1, 0.0, None, gone)
        killed, other = pids_of(policy)
        gone.touch()  # whoever published is no more: neither what was fanned out, nor anything new
        kill(killed)
        await until(lambda: policy.replicas[0].restarts == 1)
        with pytest.raises(WeightsError, match="publisher of 2 has died"):
            await policy.load.fanout(2, 0.0, None, gone)
        assert (await policy.generate.route())[:2] == (other, 1)  # as before
        gone.unlink()
        assert (await fleet.guard(policy.load.fanout(0, 0.0, None, gone))).values[1] == 0
        await until(lambda: all_serve(policy))
        assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {0}
        assert [replica.restarts for replica in policy.replicas] == [1, 0]


async def test_starting_replica_that_refuses_the_state_is_replaced(roles: ModuleType) -> None:
    """Over targets that are no processes, so that each answers in its turn."""

    from rl_bridge.services.options import ServiceOptions
    from rl_bridge.services.processes import Incarnation
    from rl_bridge.services.service import Service

    def start(replica: int) -> Incarnation:
        raise AssertionError("nothing is started here")

    class Replica:
        incarnation = 1

        def __init__(self, replica: int, *, refuses: bool) -> None:
            self.replica = replica
            self._refuses = refuses

        async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
            if self._refuses:
                called.set()
                await taken.wait()
                raise WeightsError(f"the publisher of {args[0]} cannot be reached from here")
            return int(args[0])

    called, taken = asyncio.Event(), asyncio.Event()
    service = Service(
        "policy",
        roles.Policy,
        (),
        ServiceOptions(),
        start=start,
        record=lambda replica, what, detail="": None,
        on_failure=lambda failure: None,
    )
    service._balancer.add(Replica(0, refuses=True))
    starting: Any = Replica(1, refuses=False)
    async with asyncio.timeout(WAIT_S):
        fanning = asyncio.ensure_future(service.load.fanout(2))
        await called.wait()
        await service.catch_up(starting)
        taken.set()
        fanned = await fanning
    assert fanned.values == {1: 2}
    assert [type(error) for error in fanned.failed.values()] == [WeightsError]
    # It would answer from the past.
    assert [target.replica for target in service.roster.targets] == [1]
    assert service.roster.lost == ((0, 1),)


async def test_killed_during_setup_at_the_start_and_at_a_restart(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    (tmp_path / "wait").touch()
    async with Fleet(tmp_path / "logs", heartbeat_s=0.2):
        starting = asyncio.ensure_future(roles.Policy.as_service(tmp_path))
        await until(lambda: len(began(tmp_path)) == 1)
        kill(*began(tmp_path))
        await until(lambda: len(began(tmp_path)) == 2)
        (tmp_path / "wait").unlink()
        async with asyncio.timeout(WAIT_S):
            policy = await starting
        assert [status.restarts for status in policy.replicas] == [1]
        await policy.load.fanout(1)
        (tmp_path / "wait").touch()
        kill(*pids_of(policy))
        await until(lambda: len(began(tmp_path)) == 3)
        kill(*pids_of(policy))
        (tmp_path / "wait").unlink()
        async with asyncio.timeout(WAIT_S):
            assert (await policy.generate.route())[1] == 1
        assert [status.restarts for status in policy.replicas] == [3]


async def test_the_run_ends_when_the_budget_is_gone(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path, heartbeat_s=0.2) as fleet:
        restarts = RestartPolicy(budget=1, backoff_s=0.0)
        policy = await roles.Policy.options(restarts=restarts).as_service()
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        guarded = asyncio.ensure_future(fleet.guard(work()))
        kill(*pids_of(policy))
        await until(lambda: policy.replicas[0].restarts == 1 and all_serve(policy))
        assert not guarded.done()
        last = pids_of(policy)
        kill(*last)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleError, match=r"replica 0 of policy was lost more than 1 times") as caught:
                await guarded
        assert cancelled.is_set()
        assert f"setting up {last[0]}" in str(caught.value)  # the end of its log
        assert policy.replicas[0].state == "failed"
        # Nothing waits for what will not come.
        with pytest.raises(RoleError, match="was lost more than 1 times"):
            await policy.generate.route()
        with pytest.raises(RoleError):
            await fleet.guard(asyncio.sleep(600))
        started = descendants() - before
    await until_gone(started)


async def test_the_loss_of_an_actor_is_final(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2) as fleet:
        ranks = await roles.Ranks.options(procs=2).as_actor()
        first, second = pids_of(ranks)

        async def train() -> None:
            waiting = asyncio.ensure_future(ranks.step.route(1))
            await waiting
            kill(second)
            while True:
                await ranks.step.route(2)

        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleError, match="replica 0 of ranks is lost, and it is never restarted"):
                await fleet.guard(train())
        await until_gone([first, second])  # what is left of it cannot go on alone


async def test_processes_of_a_killed_replica_end_with_it(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        parent = await roles.Parent.as_service()
        child = await parent.fork_interpreter.route()
        assert alive(child)
        kill(*pids_of(parent))
        await until_gone([child])
        await until(lambda: all_serve(parent))
        late = await parent.fork_interpreter.route()
    await until_gone([late])


@pytest.mark.usefixtures("silence_is_a_loss")
async def test_hanging_replica_is_replaced(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await roles.Policy.as_service()
        stopped = pids_of(policy)[0]
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            await until(lambda: policy.replicas[0].restarts >= 1 and all_serve(policy))
        await until_gone([stopped])
        assert (await policy.generate.route())[0] != stopped


async def test_replica_whose_event_loop_is_blocked_is_replaced(
    roles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.services import service
    from rl_bridge.services.fleet import Fleet

    for name, value in {"PING_INTERVAL_S": 0.1, "PING_TIMEOUT_S": 0.5, "MAX_MISSED_PINGS": 4}.items():
        monkeypatch.setattr(service, name, value)
    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await roles.Policy.as_service()
        blocked = pids_of(policy)[0]
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ReplicaLostError, match="it is blocked: 4 pings in a row"):
                await policy.block.route()
            await until(lambda: all_serve(policy))
        await until_gone([blocked])
        assert (await policy.generate.route())[0] != blocked


@pytest.mark.parametrize("sick", [True, False])
async def test_a_replica_whose_calls_all_fail_is_asked_for_its_health(
    roles: ModuleType, tmp_path: Path, sick: bool
) -> None:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2) as fleet:
        policy = await roles.Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        broken, _ = pids_of(policy)
        await policy.break_down.fanout(broken, sick)
        outcomes = [await asyncio.gather(policy.generate.route(), return_exceptions=True) for _ in range(40)]
        errors = sum(isinstance(outcome, GeneratorError) for (outcome,) in outcomes)
        # It fails at once, so it is always the least loaded. It does not get the calls for that.
        assert 3 <= errors <= 6
        if sick:
            await until(lambda: policy.replicas[0].restarts == 1 and all_serve(policy))
            assert broken not in pids_of(policy)
            assert "the engine is dead" in next(
                event.detail for event in fleet.events if event.kind == "lost"
            )
            assert {version for _, version, _ in [await policy.generate.route() for _ in range(4)]} == {1}
        else:
            assert [status.restarts for status in policy.replicas] == [0, 0]
            assert [event.kind for event in fleet.events if event.replica == 0][-1] == "suspect"
