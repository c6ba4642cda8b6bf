"""Kills at random times, from a seed, under calls and fan-outs: every call is answered, never from the past."""

import asyncio
import random
from types import ModuleType
from typing import Any

import pytest
from service_waits import all_serve, kill, until

from rl_bridge.config.monarch import RestartPolicy

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

KILLS = 10
CALLERS = 8


async def test_calls_and_fan_outs_among_kills(roles: ModuleType, fleet: Any) -> None:
    chance = random.Random(7)
    patient = RestartPolicy(budget=KILLS, backoff_s=0.05, max_backoff_s=0.05)
    policy = await roles.Policy.options(num_replicas=3, restarts=patient).as_service()
    await policy.load.fanout(0)
    taken = 0
    done = asyncio.Event()
    answers: list[tuple[int, int]] = []

    async def call() -> None:
        while not done.is_set():
            held = taken
            _, version, _ = await policy.generate.route(0.05)
            answers.append((held, version))

    async def publish() -> None:
        nonlocal taken
        while not done.is_set():
            fanout = await policy.load.fanout(taken + 1, 0.1)
            assert set(fanout.values.values()) == {taken + 1}
            taken += 1

    async def storm() -> None:
        killed: set[int] = set()
        kills = 0
        while kills < KILLS:
            await asyncio.sleep(chance.uniform(0.05, 0.8))
            alive = [pid for status in policy.replicas for pid in status.pids if pid not in killed]
            if alive:  # all may be starting
                victim = chance.choice(alive)
                killed.add(victim)
                try:
                    kill(victim)
                except ProcessLookupError:  # it was ended while it started
                    continue
                kills += 1
        done.set()

    async with asyncio.timeout(210):
        await fleet.guard(
            asyncio.wait_for(_run_and_agree(*(call() for _ in range(CALLERS)), publish(), storm()), 200)
        )
    await until(lambda: all_serve(policy))
    assert {version for _, version, _ in [await policy.generate.route() for _ in range(6)]} == {taken}
    assert sum(event.kind == "lost" for event in fleet.events) >= KILLS // 2
    assert len(answers) > 20
    # What was asked after a fan-out had returned was answered by its state, or a later one.
    assert [pair for pair in answers if pair[1] < pair[0]] == []
    assert taken > 3


async def _run_and_agree(*works: object) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)  # type: ignore[arg-type]
