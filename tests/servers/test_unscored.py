"""Rewards that are no finite numbers: every road says that the episode has no score, up to its end and no further."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from counter import Add, Count, Counter, Diverging
from server_apps import HEADER, action, app_of, step
from serving import ask, request, serving, socket_to

from openenv_core import GenericEnvClient
from openenv_core.rubrics import Gate, Rubric

RESET = {"type": "reset", "data": {}}


class DivergingInThreads(Diverging):
    BLOCKING = True


class DivergingAsync(Diverging):
    async def reset(self, **options: Any) -> Count:
        return super().reset(**options)

    async def step(self, action: Add) -> Count:
        await asyncio.sleep(0)
        return super().step(action)


EVERY_WAY = pytest.mark.parametrize("env", [Diverging, DivergingInThreads, DivergingAsync])
MARK = {"unscored": "the reward is nan"}


def outcome(data: Any) -> tuple[Any, Any, Any]:
    assert data["observation"]["metadata"] == (data.get("metadata") or {})
    return data["reward"], data["done"], data.get("metadata") or {}


EXPECTED = [(1, False, {}), (None, False, MARK), (None, True, MARK), (None, False, {}), (1, True, {})]


@EVERY_WAY
async def test_episode_is_unscored_from_the_reward_on_until_the_next_reset(env: Any) -> None:
    async with serving(app_of(env)) as address:
        async with socket_to(address) as ws:
            await ask(ws, RESET)
            frames = [step(1), step(0), step(9), RESET, step(10)]
            assert [outcome((await ask(ws, frame))["data"]) for frame in frames] == EXPECTED
        reset = await request(address, "POST", "/reset", {}, {HEADER: "new"})
        session = {HEADER: reset.headers[HEADER]}
        replies = [
            await request(address, "POST", path, body, session)
            for path, body in (
                *(("/step", action(amount)) for amount in (1, 0, 9)),
                ("/reset", {}),
                ("/step", action(10)),
            )
        ]
        assert [outcome(reply.json()) for reply in replies] == EXPECTED


@EVERY_WAY
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
async def test_members_of_a_batch_and_forks_of_them_are_unscored_each_by_itself(env: Any, mode: str) -> None:
    async with serving(app_of(env)) as address:
        client: GenericEnvClient = GenericEnvClient(f"http://{address}")
        members = await client.vector(2)

        async def take(*amounts: int) -> Any:
            actions = [{"amount": amount} for amount in amounts]
            (reply,) = await members.ask("step", actions=actions, autoreset=mode)
            rewards = reply.arrays[reply.fields["reward"]].tolist()
            rows = dict(zip(reply.fields["members"], reply.fields["rows"], strict=True))
            if (final := reply.fields.get("final")) is not None:
                rows |= zip(final["members"], final["rows"], strict=True)
            return str(rewards), [rows[member]["metadata"] for member in sorted(rows)]

        await members.ask("reset")
        assert await take(1, 0) == ("[1.0, nan]", [{}, MARK])
        assert await members.fork(1, 1) == [2]
        assert await take(1, 10, 1) == ("[1.0, nan, nan]", [{}, MARK, MARK])
        if mode == "next_step":
            assert await take(1, 1, 1) == ("[1.0, nan, nan]", [{}, {}, MARK])
        assert await take(1, 1, 1) == ("[1.0, 1.0, nan]", [{}, {}, MARK])
        await members.close()


class Given(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return math.nan if action.amount == 0 else 0.5


class Assigning(Counter):
    """The rewards of steps are assigned after the validation of their observations."""

    DETERMINISTIC = False
    rewards: Any = ()

    def step(self, action: Add) -> Count:
        observation = super().step(action)
        observation.reward = self.rewards[action.amount]
        return observation


class Judged(Counter):
    """A rubric of two parts, one of which is hidden from the total by the other."""

    DETERMINISTIC = False
    rubric = Gate(Given(), threshold=0.0)

    def step(self, action: Add) -> Count:
        observation = super().step(action)
        self._apply_rubric(action, observation)
        observation.reward = 1.0
        return observation


class Marking(Counter):
    """The environment itself says of a step in the middle that nobody can judge it."""

    DETERMINISTIC = False

    def step(self, action: Add) -> Count:
        observation = super().step(action)
        return observation if action.amount else Count(unscored="no judge", total=observation.total)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (type("Assigning", (Assigning,), {"rewards": [math.inf, 1]}), "the reward is inf"),
        (type("Assigning", (Assigning,), {"rewards": [np.float32("-inf"), 1]}), "the reward is -inf"),
        (
            type("Assigning", (Assigning,), {"rewards": [10**400, True]}),
            "the reward is an integer beyond the range of floats",
        ),
        (Judged, "the score of rubric is nan"),
        (Marking, "no judge"),
    ],
)
async def test_every_number_that_is_not_finite_counts_and_so_does_the_environments_mark(
    env: Any, reason: str
) -> None:
    async with serving(app_of(env)) as address, GenericEnvClient(f"http://{address}") as client:
        await client.reset()
        results = [await client.step({"amount": amount}) for amount in (1, 0, 1)]
        assert [result.reward for result in results] == [1, None, None]
        assert [result.unscored for result in results] == [None, reason, reason]
