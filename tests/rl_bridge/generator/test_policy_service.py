"""The policy as a service of two real engines: weights to all, none lost, none on older ones."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from generator_fixtures import perturbed, policy_service, prompts
from torch import Tensor

from rl_bridge.errors import PromptRefused, WeightsError
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.types import Completion, SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

HERE = Path(__file__).parent

ONE = SamplingSettings(temperature=1.0, max_new_tokens=1)
LONG = SamplingSettings(temperature=1.0, max_new_tokens=20)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)


def checkpoint(path: Path) -> dict[str, Tensor]:
    from rl_bridge.generator.checkpoint import Checkpoint

    return Checkpoint(path).tensors()


@pytest.fixture(autouse=True)
def _roles_can_import_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


async def test_two_replicas(tiny_policy: Path, tmp_path: Path) -> None:
    """One story, since engines take seconds to start: weights, a rewind, a kill, an engine that dies."""
    first = checkpoint(tiny_policy)
    from policy_roles import BreakablePolicy

    async with policy_service(tiny_policy, tmp_path, replicas=2, actor=BreakablePolicy) as (policy, store):
        batch = prompts(8)
        # Without a seed each draws for itself, from the first number on: or siblings on two replicas would be the same.
        drawn = (await policy.generate_many.fanout([batch[0]] * 8, LONG)).values
        assert [answer.tokens for answer in drawn[0]] != [answer.tokens for answer in drawn[1]]
        before = await policy.generate_many.route(batch, GREEDY)
        assert {answer.version for answer in before} == {0}
        one: Completion = await policy.generate.route(batch[0])
        assert 1 <= len(one.tokens) <= 26  # what fits: nothing was said of how to sample

        # Weights to all.
        await store.put(1, perturbed(first, seed=1))
        fanout = await policy.update_weights.fanout(1)
        assert sorted(fanout.values) == [0, 1]
        assert not fanout.failed
        assert all(figures.version == 1 and figures.load_s > 0 for figures in fanout.values.values())
        answers = await asyncio.gather(*(policy.generate_many.route(batch, GREEDY) for _ in range(4)))
        assert answers == [answers[0]] * 4  # both replicas say the same
        assert {answer.version for answer in answers[0]} == {1}
        assert [answer.logprobs for answer in answers[0]] != [answer.logprobs for answer in before]

        # A version that is not there changes nothing, and says so.
        with pytest.raises(WeightsError, match="5"):
            await policy.update_weights.route(5)
        assert (await policy.version.fanout()).values == {0: 1, 1: 1}

        # A prompt that is refused is no lost replica.
        with pytest.raises(PromptRefused, match="token ids from 0"):
            await policy.generate_many.route([*batch, [-1]], GREEDY)

        # A kill in the middle: nobody who asks notices, and the new one serves what the other does.
        client = GeneratorClient(
            policy.generate_many.route,
            max_batch=16,
            replicas=lambda: len(policy.roster.targets),
            timeout_s=120,
        )
        asking = [asyncio.ensure_future(client.complete(prompt, LONG)) for prompt in prompts(200)]
        await asyncio.sleep(0.05)
        os.kill(policy.replicas[0].pids[0], signal.SIGKILL)
        assert len(await asyncio.gather(*asking)) == 200
        await both_serve(policy, restarts=1)
        assert (await policy.version.fanout()).values == {0: 1, 1: 1}
        assert (await policy.generate_many.route(batch, GREEDY)) == answers[0]

        # Back to the first weights.
        await policy.update_weights.fanout(0)
        again = await asyncio.gather(*(policy.generate_many.route(batch, GREEDY) for _ in range(4)))
        assert again == [before] * 4
        await client.close()

        # An engine that dies takes its process along; whoever waited is answered by another.
        await policy.break_engine.route()
        asking = [asyncio.ensure_future(policy.generate_many.route(batch, GREEDY)) for _ in range(4)]
        assert await asyncio.gather(*asking) == [before] * 4
        await both_serve(policy, restarts=2)
        again = await asyncio.gather(*(policy.generate_many.route(batch, GREEDY) for _ in range(4)))
        assert again == [before] * 4


async def both_serve(policy: Any, *, restarts: int) -> None:
    def so() -> bool:
        return (
            sum(status.restarts for status in policy.replicas) == restarts and len(policy.roster.targets) == 2
        )

    async with asyncio.timeout(250):
        while not so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
