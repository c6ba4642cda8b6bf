"""Replicas that are killed, on real Monarch: noticed, replaced, up to date before they serve; or the run ends."""

import asyncio
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from service_waits import WAIT_S, alive, all_serve, held, kill, pids_of, until, until_gone

from rl_bridge.config.monarch import RestartPolicy
from rl_bridge.errors import GeneratorError, ReplicaLostError, RoleError, WeightsError
from rl_bridge.services.own_process import START_VARIABLE, start_of

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
async def policy(roles: ModuleType, fleet: Any) -> Any:
    """Two replicas, which hold version 1."""
    policy = await roles.Policy.options(num_replicas=2).as_service()
    await policy.load.fanout(1)
    return policy


async def versions(policy: Any) -> set[int | None]:
    """What all replicas answer by, once all of them serve."""
    await until(lambda: all_serve(policy))
    return {version for _, version, _ in [await policy.generate.route() for _ in range(4)]}


def began(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("began-")) for path in folder.glob("began-*")]


async def test_a_replica_killed_idle_serves_again_with_the_current_state(policy: Any, fleet: Any) -> None:
    from rl_bridge.services import processes

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
    starts = (await policy.variable.fanout(START_VARIABLE)).values
    assert starts == {0: start_of(0, 0, 1), 1: start_of(1, 0, 0)}
    happened = [event.kind for event in fleet.events if event.replica == 0]
    assert happened == ["starting", "serving", "lost", "restarting", "starting", "serving"]
    (how,) = (event.detail for event in fleet.events if event.kind == "lost")
    assert how == processes.PROCESS_ENDED or "Killed(sig=9)" in how  # whoever saw it first tells


async def test_calls_under_way_at_a_kill_are_repeated_only_where_they_may_be(
    policy: Any, tmp_path: Path
) -> None:
    wait = tmp_path / "wait"
    wait.touch()
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

    # When all are killed during a fan-out, they take it when they start.
    await until(lambda: all_serve(policy))
    wait.touch()
    begun = held(tmp_path)
    fanning = asyncio.ensure_future(policy.load.fanout(2, wait))
    await until(lambda: held(tmp_path) == begun + 2)
    kill(*pids_of(policy))
    wait.unlink()
    async with asyncio.timeout(WAIT_S):
        fanout = await fanning
    assert set(fanout.values.values()) == {2}
    assert set(fanout.failed) == {0, 1}
    assert await versions(policy) == {2}


async def test_a_replica_that_refuses_a_fan_out_is_replaced(policy: Any) -> None:
    refusing, other = pids_of(policy)
    fanout = await policy.load.fanout(2, 0.0, refusing)
    assert fanout.values == {1: 2}
    assert isinstance(fanout.failed[0], GeneratorError)
    # It never answers with the old state.
    assert {(await policy.generate.route())[:2] for _ in range(3)} == {(other, 2)}
    assert await versions(policy) == {2}
    assert refusing not in pids_of(policy)
    # What everybody refuses is the caller's error, and the state before it holds.
    with pytest.raises(GeneratorError, match="no weights 3"):
        await policy.load.fanout(3, 0.0, 0)
    async with asyncio.timeout(WAIT_S):
        assert (await policy.generate.route())[1] == 2
    assert await versions(policy) == {2}


async def test_a_state_that_cannot_be_had_costs_no_restart(
    roles: ModuleType, fleet: Any, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
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
    assert await versions(policy) == {0}
    assert [replica.restarts for replica in policy.replicas] == [1, 0]


async def test_killed_during_setup_at_the_start_and_at_a_restart(
    roles: ModuleType, fleet: Any, tmp_path: Path
) -> None:
    (tmp_path / "wait").touch()
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


async def test_the_run_ends_when_the_budget_is_gone(roles: ModuleType, fleet: Any) -> None:
    restarts = RestartPolicy(budget=1, backoff_s=0.0)
    policy = await roles.Policy.options(restarts=restarts).as_service()
    work = asyncio.ensure_future(asyncio.sleep(600))

    async def wait_for_work() -> None:
        await work

    guarded = asyncio.ensure_future(fleet.guard(wait_for_work()))
    kill(*pids_of(policy))
    await until(lambda: policy.replicas[0].restarts == 1 and all_serve(policy))
    assert not guarded.done()
    last = pids_of(policy)
    kill(*last)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RoleError, match=r"replica 0 of policy was lost more than 1 times") as caught:
            await guarded
    assert work.cancelled()
    assert f"setting up {last[0]}" in str(caught.value)  # the end of its log
    assert policy.replicas[0].state == "failed"
    # Nothing waits for what will not come.
    for waits in (policy.generate.route(), fleet.guard(asyncio.sleep(600))):
        with pytest.raises(RoleError, match="was lost more than 1 times"):
            await waits


async def test_the_loss_of_an_actor_is_final(roles: ModuleType, fleet: Any) -> None:
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


async def test_processes_of_a_killed_replica_end_with_it(roles: ModuleType, fleet: Any) -> None:
    parent = await roles.Parent.as_service()
    child = await parent.fork_interpreter.route()
    assert alive(child)
    kill(*pids_of(parent))
    await until_gone([child])
    await until(lambda: all_serve(parent))
    await parent.fork_interpreter.route()  # this one ends with the fleet


@pytest.mark.usefixtures("silence_is_a_loss")
async def test_hanging_replica_is_replaced(roles: ModuleType, fleet: Any) -> None:
    policy = await roles.Policy.as_service()
    stopped = pids_of(policy)[0]
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        await until(lambda: policy.replicas[0].restarts >= 1 and all_serve(policy))
    await until_gone([stopped])
    assert (await policy.generate.route())[0] != stopped


async def test_replica_whose_event_loop_is_blocked_is_replaced(
    roles: ModuleType, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.services import service

    for name, value in {"PING_INTERVAL_S": 0.1, "PING_TIMEOUT_S": 0.5, "MAX_MISSED_PINGS": 4}.items():
        monkeypatch.setattr(service, name, value)
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
    policy: Any, fleet: Any, sick: bool
) -> None:
    broken, _ = pids_of(policy)
    await policy.break_down.fanout(broken, sick)
    outcomes = [await asyncio.gather(policy.generate.route(), return_exceptions=True) for _ in range(40)]
    errors = sum(isinstance(outcome, GeneratorError) for (outcome,) in outcomes)
    # It fails at once, so it is always the least loaded. It does not get the calls for that.
    assert 3 <= errors <= 6
    if sick:
        await until(lambda: policy.replicas[0].restarts == 1 and all_serve(policy))
        assert broken not in pids_of(policy)
        assert "the engine is dead" in next(event.detail for event in fleet.events if event.kind == "lost")
        assert await versions(policy) == {1}
    else:
        assert [status.restarts for status in policy.replicas] == [0, 0]
        assert [event.kind for event in fleet.events if event.replica == 0][-1] == "suspect"
