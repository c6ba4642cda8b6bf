"""Measures episodes against one server, for several numbers of sessions and two environments."""

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
"""Episodes of an assignment, as in training."""
LONGEST: Final = 64
"""Limit of turns, more than any of these episodes has."""


@dataclass(frozen=True, slots=True)
class Game:
    """An environment that is played.

    Attributes:
        name: Name in the report.
        app: The application that is served.
        client: Its client class.
        act: Returns an action for a number.
        episodes: Episodes for each session.
        least: Minimum of episodes.
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
        rounds: Measurements of each combination.
        sessions: Numbers of sessions.
        games: The environments.
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
    """Return the name of a number of sessions in tables."""
    return f"{sessions} session{'s' if sessions > 1 else ''}"


def measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    """Play every combination of a plan, and add its measurements.

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
        # Open the sessions before timing: a run opens them once.
        await _play(worker, sessions)
        async with _most_in_flight(leases) as most:
            start_time = time.perf_counter()
            results = await _play(worker, max(sessions * game.episodes, game.least))
            seconds = time.perf_counter() - start_time
    finally:
        await leases.close()
    outcomes = [outcome for result in results for outcome in result.outcomes]
    left_out = [outcome for outcome in outcomes if isinstance(outcome, NoTrajectory)]
    # A hand of 21 ends when it is dealt, without a turn of the policy; that is not a failure.
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
            counts.append(leases.leased)
            await asyncio.sleep(0.01)

    watching = asyncio.ensure_future(watch())
    try:
        yield counts
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class _Numbers(Task):
    """A task with empty prompts whose answers are numbers."""

    def __init__(self, game: Game) -> None:
        self.folder = Path()
        self._game = game

    def messages(self, observation: Any) -> list[ChatMessage]:
        return []

    def parse(self, text: str) -> Any:
        return self._game.act(int(text))

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Report nothing."""


class _Instant(ChatPolicy):
    """A policy that answers at once with its sampling seed."""

    def __init__(self) -> None:
        pass

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        return [0]

    async def answer(
        self, prompt: Sequence[int], *, temperature: float, seed: int | None = None
    ) -> tuple[Turn, str]:
        completion = Completion(tokens=[0], logprobs=[0.0], versions=[0], stopped=True)
        return Turn(prompt=prompt, completion=completion), str(seed)
