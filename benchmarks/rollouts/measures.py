"""Episodes in flight against one server, for a number of sessions and two environments."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.rollouts.app import Go, WaitingClient
from benchmarks.wire.measurements import Measurements
from envs.blackjack_env import BlackjackAction, BlackjackEnv
from openenv_core import EnvClient, LocalProcessProvider
from rl_bridge.environments.leases import SessionLeases
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, EpisodeSettings, NoTrajectory
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import EvaluationResult, Policy, Task
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, Turn

RATE: Final = "episodes/s"
FAILED: Final = "failed attempts"
LEFT_OUT: Final = "episodes without a trajectory"
IN_FLIGHT: Final = "in flight"
MESSAGE_TIMEOUT_S: Final = 60.0
GROUP: Final = 8
"""Episodes that a worker is asked for at once, as in training."""
LONGEST: Final = 64
"""Turns that no episode of these needs."""


@dataclass(frozen=True, slots=True)
class Game:
    """One environment.

    Attributes:
        name: In the report.
        app: What is served.
        client: Plays it.
        act: Makes an action of a number.
        episodes: How many are played for each session.
        least: How many are played at least.
    """

    name: str
    app: str
    client: type[EnvClient[Any, Any, Any]]
    act: Callable[[int], Any]
    episodes: int
    least: int = 0


WAITING: Final = "four steps that wait 0.1 s"
GAMES: Final = (
    Game(WAITING, "benchmarks.rollouts.app:app", WaitingClient, lambda number: Go(number=number), 6),
    Game(
        "BlackJack",
        "envs.blackjack_env.server.app:app",
        BlackjackEnv,
        lambda number: BlackjackAction(action="hit" if number % 2 else "stand"),
        20,
        least=500,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: How often everything has its turn.
        sessions: Numbers of sessions.
        games: What is played.
    """

    rounds: int = 3
    sessions: tuple[int, ...] = (1, 16, 64, 256)
    games: tuple[Game, ...] = GAMES

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return replace(
            self,
            rounds=1,
            sessions=(1, 8),
            games=tuple(replace(game, episodes=2, least=0) for game in self.games),
        )


def load(sessions: int) -> str:
    """What a number of sessions is called in tables."""
    return f"{sessions} session{'s' if sessions > 1 else ''}"


def measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    """Play everything of a plan, and add its measurements.

    Raises:
        openenv_core.ProviderError: A server could not be started.
    """
    for game in plan.games:
        with LocalProcessProvider(game.app) as provider:
            url = str(provider.url)
            for number in range(1, plan.rounds + 1):
                for sessions in plan.sessions:
                    progress(f"{game.name}, round {number} of {plan.rounds}: {load(sessions)}")
                    asyncio.run(_measure(game, sessions, url, measurements))


async def _measure(game: Game, sessions: int, url: str, measurements: Measurements) -> None:
    leases = SessionLeases(
        lambda address: game.client(address, message_timeout_s=MESSAGE_TIMEOUT_S),
        sessions=sessions,
        urls=[url],
    )
    worker = RolloutWorker(leases, task=_Numbers(game), policy=_Instant(), max_attempts=3)
    try:
        # Sessions are opened before the clock runs: a run opens them once.
        await _play(worker, sessions)
        async with _most_in_flight(leases) as most:
            start_time = time.perf_counter()
            results = await _play(worker, max(sessions * game.episodes, game.least))
            seconds = time.perf_counter() - start_time
    finally:
        await leases.close()
    outcomes = [outcome for result in results for outcome in result.outcomes]
    left_out = [outcome for outcome in outcomes if isinstance(outcome, NoTrajectory)]
    # A hand of 21 is over when it is dealt: the policy has no turn, and nothing went wrong.
    lost = [outcome for outcome in left_out if outcome.absence is not Absence.NO_TURN]
    measurements.add(RATE, game.name, load(sessions), len(outcomes) / seconds)
    measurements.add(IN_FLIGHT, game.name, load(sessions), max(most))
    measurements.add(FAILED, game.name, load(sessions), sum(result.retried for result in results))
    measurements.add(LEFT_OUT, game.name, load(sessions), len(lost))


async def _play(worker: RolloutWorker, episodes: int) -> list[AssignmentResult]:
    groups = range(0, episodes, GROUP)
    return await asyncio.gather(
        *(worker.play(_assignment(first, min(GROUP, episodes - first))) for first in groups)
    )


def _assignment(first: int, episodes: int) -> Assignment:
    return Assignment(
        lease=first,
        seeds=(first,) * episodes,
        siblings=tuple(range(episodes)),
        settings=EpisodeSettings(temperature=1.0, num_turns=LONGEST, illegal_reward=0.0),
        sampling_key=(0, first),
    )


@asynccontextmanager
async def _most_in_flight(leases: SessionLeases) -> AsyncIterator[list[int]]:
    counts = [0]

    async def watch() -> None:
        while True:
            counts.append(leases.lent)
            await asyncio.sleep(0.01)

    watching = asyncio.ensure_future(watch())
    try:
        yield counts
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class _Numbers(Task):
    """Shows nothing, and takes every answer for a number."""

    def __init__(self, game: Game) -> None:
        self.folder = Path()
        self._game = game

    def messages(self, observation: Any) -> list[ChatMessage]:
        return []

    def parse(self, text: str) -> Any:
        return self._game.act(int(text))

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """There is nothing to say."""


class _Instant(ChatPolicy):
    """Answers at once, with the seed that it is to sample by."""

    def __init__(self) -> None:
        pass

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        return [0]

    async def answer(
        self, prompt: Sequence[int], *, temperature: float, seed: int | None = None
    ) -> tuple[Turn, str]:
        completion = Completion(tokens=[0], logprobs=[0.0], versions=[0], stopped=True)
        return Turn(prompt=prompt, completion=completion), str(seed)
