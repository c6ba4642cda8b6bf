"""A group that is cancelled ends at the engine: worker, client, Monarch, generator and vLLM, each in its process."""

import asyncio
from pathlib import Path

import pytest
from worker_fixtures import HERE, absences, trajectories

from openenv_core import LocalProcessProvider
from rl_bridge.config import Config
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, EpisodeSettings
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), pytest.mark.usefixtures("importable_modules")]

ANSWER_TOKENS = 3000
SIBLINGS = 4
WAIT_S = 200.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def make_endless_policy(folder: Path) -> Path:
    """A random checkpoint that never ends an answer by itself."""
    from safetensors.torch import load_file, save_file

    from rl_bridge.tiny_policy import make_tiny_policy
    from rl_bridge.tokens.chat import ChatTokenizer

    make_tiny_policy(folder, ["some words to say"], seed=1, max_length=2 * ANSWER_TOKENS)
    (end,) = ChatTokenizer(folder).stop_token_ids
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 10.0
    weights["lm_head.weight"][end] = 0.0
    weights["lm_head.weight"][end, 0] = -100.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assignment(lease: int) -> Assignment:
    settings = EpisodeSettings(temperature=1.0, num_turns=1, illegal_reward=0.0)
    numbers = tuple(range(SIBLINGS))
    return Assignment(lease=lease, seeds=numbers, siblings=numbers, settings=settings)


async def test_cancelled_group_is_generated_no_longer_and_the_other_one_to_its_end(tmp_path: Path) -> None:
    from rl_bridge.generator.actor import PolicyActor
    from rl_bridge.rollout.actor import RolloutActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.weights.store import WeightStore

    path = make_endless_policy(tmp_path / "policy")
    store = WeightStore.create()
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        config = Config.model_validate(
            {
                "env": {"url": str(provider.url), "sessions": 2 * SIBLINGS},
                "rollout": {
                    "task": "rollout_fixtures:NotebookTask",
                    "max_new_tokens": ANSWER_TOKENS,
                    "max_length": 2 * ANSWER_TOKENS,
                    "kv_cache_mb": 64,
                },
            }
        )
        async with asyncio.timeout(WAIT_S), Fleet(tmp_path / "logs"):
            policy = await PolicyActor.as_service(config, path, store)
            rollout = await RolloutActor.as_service(config, tmp_path, path)
            await rollout.take_policy.fanout(policy.roster)
            await rollout.take_servers.fanout({"": (str(provider.url),)})
            cancelled, other = [
                asyncio.ensure_future(rollout.play.route(assignment(lease))) for lease in (1, 2)
            ]
            while (  # noqa: ASYNC110 - it is about another process
                await policy.statistics.route()
            ).generated_tokens < 100 * SIBLINGS:
                await asyncio.sleep(0.05)
            await rollout.cancel.fanout((1,))
            result: AssignmentResult = await cancelled
            assert absences(result) == [Absence.UNFINISHED] * SIBLINGS
            answers = [one.summarize() for one in trajectories(await other)]
            assert [answer.tokens for answer in answers] == [ANSWER_TOKENS] * SIBLINGS
            # The statistics are those of the engine's last step, so one is needed in which nothing else is left.
            one_token = SamplingSettings(temperature=1.0, max_new_tokens=1)
            await policy.generate_many.route([[1, 2, 3]], one_token)
            totals = await policy.statistics.route()
            assert totals.kv_cache_usage == 0.0
            assert totals.generated_tokens < 1.5 * SIBLINGS * ANSWER_TOKENS
    await store.close()
