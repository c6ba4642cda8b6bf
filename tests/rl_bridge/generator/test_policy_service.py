"""The policy as a service of real engines: weights reach all replicas, and lost replicas are replaced."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from generator_fixtures import perturbed_weights, policy_service, prompts

from rl_bridge.errors import PromptRefusedError, WeightsError
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.types import Completion, SamplingSettings

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("importable_modules"),
]

LONG = SamplingSettings(temperature=1.0, max_new_tokens=20)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)
BATCH = prompts(8)


async def ask(policy: Any) -> list[Completion]:
    """The same greedy answers from whichever replicas: asked four times at once."""
    answers = await asyncio.gather(*(policy.generate_many.route(BATCH, GREEDY) for _ in range(4)))
    assert answers == [answers[0]] * 4
    found: list[Completion] = answers[0]
    return found


async def until_restarted(policy: Any, restarts: int) -> None:
    async with asyncio.timeout(250):
        while (  # noqa: ASYNC110 - it is about other processes
            sum(status.restarts for status in policy.replicas) != restarts or len(policy.roster.targets) < 2
        ):
            await asyncio.sleep(0.05)


async def test_two_replicas(tiny_policy: Path, tmp_path: Path) -> None:
    """One story, since engines take seconds to start: weights, a rewind, a kill, an engine that dies."""
    from policy_roles import BreakablePolicy

    async with policy_service(tiny_policy, tmp_path, replicas=2, actor=BreakablePolicy) as (policy, store):
        # Without a seed each draws for itself: or siblings on two replicas would be the same.
        unseeded = (await policy.generate_many.fanout([BATCH[0]] * 8, LONG)).values
        assert [answer.tokens for answer in unseeded[0]] != [answer.tokens for answer in unseeded[1]]
        before = await ask(policy)
        assert {answer.version for answer in before} == {0}
        one: Completion = await policy.generate.route(BATCH[0])
        assert 1 <= len(one.tokens) <= 26  # what fits: nothing was said of how to sample

        # Weights to all.
        await store.put(1, perturbed_weights(tiny_policy, seed=1))
        fanout = await policy.update_weights.fanout(1)
        assert (sorted(fanout.values), fanout.failed) == ([0, 1], {})
        assert all(metrics.version == 1 and metrics.load_s > 0 for metrics in fanout.values.values())
        answers = await ask(policy)
        assert {answer.version for answer in answers} == {1}
        assert [answer.logprobs for answer in answers] != [answer.logprobs for answer in before]

        # A version that is not there changes nothing; a prompt that is refused is no lost replica.
        with pytest.raises(WeightsError, match="5"):
            await policy.update_weights.route(5)
        assert (await policy.version.fanout()).values == {0: 1, 1: 1}
        with pytest.raises(PromptRefusedError, match="token ids from 0"):
            await policy.generate_many.route([*BATCH, [-1]], GREEDY)

        # A kill in the middle: nobody who asks notices, and the new one serves what the other does.
        client = GeneratorClient(policy, max_batch=16, timeout_s=120)
        asking = [asyncio.ensure_future(client.complete(prompt, LONG)) for prompt in prompts(200)]
        await asyncio.sleep(0.05)
        os.kill(policy.replicas[0].pids[0], signal.SIGKILL)
        assert len(await asyncio.gather(*asking)) == 200
        await until_restarted(policy, restarts=1)
        assert (await policy.version.fanout()).values == {0: 1, 1: 1}
        assert await ask(policy) == answers
        await client.close()

        # Back to the first weights; and an engine that dies takes its process along, whoever waited is answered.
        await policy.update_weights.fanout(0)
        assert await ask(policy) == before
        await policy.break_engine.route()
        assert await ask(policy) == before
        await until_restarted(policy, restarts=2)
        assert await ask(policy) == before


async def test_only_replica_recovers(tiny_policy: Path, tmp_path: Path) -> None:
    """It breaks at new weights, at a step, and hangs at one; nobody who asks is told."""
    from policy_roles import BreakablePolicy

    async with policy_service(tiny_policy, tmp_path, actor=BreakablePolicy, generate_timeout_s=30.0) as (
        policy,
        store,
    ):
        await store.put(1, perturbed_weights(tiny_policy, seed=1))
        await policy.break_load.route()
        fanout = await policy.update_weights.fanout(1)
        assert (sorted(fanout.values), policy.replicas[0].restarts) == ([0], 1)
        answers = await ask(policy)
        assert {answer.version for answer in answers} == {1}
        await policy.break_engine.route()
        assert await ask(policy) == answers
        assert policy.replicas[0].restarts == 2
        await policy.hang_engine.route()
        assert await policy.generate_many.route(BATCH, GREEDY) == answers
        assert policy.replicas[0].restarts == 3


async def test_deterministic_answers_do_not_depend_on_the_shapes_of_batches(
    long_policy: Path, tmp_path: Path
) -> None:
    # With two threads even this small model's last bits would depend on them.
    settings = {"max_length": 512, "deterministic": True}
    warm = SamplingSettings(temperature=0.8, max_new_tokens=8)
    many, seeds = prompts(12, length=300), list(range(12))
    async with policy_service(long_policy, tmp_path, threads=2, **settings) as (policy, _):
        several = await policy.generate_many.route(many, warm, seeds)
        for place in (0, 3, 11):
            assert await policy.generate.route(many[place], warm, seeds[place]) == several[place]
        unseeded, backwards = await asyncio.gather(
            policy.generate_many.route(many[8:], warm),
            policy.generate_many.route(many[1:4][::-1], warm, seeds[1:4][::-1]),
        )
        assert backwards == several[1:4][::-1]
        assert len(unseeded) == 4
