"""The policy's opponents in self-play: how they play a seat, and the pool of its versions that they are drawn from."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic_core import PydanticSerializationError

from openenv_core.errors import ValidationFailedError
from openenv_core.evaluation.statistics import is_success
from rl_bridge.config import SelfPlayConfig
from rl_bridge.errors import EpisodeUnscoredError
from rl_bridge.rollout.assignment import EpisodeSettings, draw_by_weight, sampling_seed
from rl_bridge.rollout.episode import convert_task_errors
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session, Task
from rl_bridge.types import Ending, Group, PolicyVersion

Player: TypeAlias = ChatPolicy | Callable[[Any], Any]
"""An opponent: weights behind a chat template, or a function of an observation that returns an action."""

ATTEMPTS: Final = 8
"""How often an opponent's answer that is no action, or one that the environment refuses, is sampled anew: it is not
trained, so its answers may be chosen."""


async def play_opponent(
    session: Session,
    player: Player,
    task: Task,
    *,
    seed: int,
    settings: EpisodeSettings,
    sampling_key: tuple[int, int, int] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Play a seat to the end of its game, or until the opponent gives no action. Nothing of it is kept.

    For the arguments see `play_episode`, whose errors it raises, too; a table that another seat has left is no error.
    """
    try:
        result = await session.reset(seed=seed, **settings.reset_options)
        on_progress()
        if not isinstance(player, ChatPolicy):
            while not result.done:
                with convert_task_errors():
                    action = player(result.observation)
                    action = await action if inspect.isawaitable(action) else action
                result = await session.step(action)
                on_progress()
            return
        with convert_task_errors():
            dialogue = await task.begin(session, player, result.observation)
        attempts, answers, failures = 1 if task.chat_grows else ATTEMPTS, 0, 0
        while not result.done and failures < attempts:
            if not failures:
                with convert_task_errors():
                    prompt = dialogue.prompt()
            if prompt is None:
                return
            number = None if sampling_key is None else sampling_seed(*sampling_key, answers)
            turn, text = await player.answer(prompt, temperature=settings.temperature, seed=number)
            answers += 1
            failures += 1  # until an action is taken
            try:
                with convert_task_errors():
                    actions = dialogue.read(turn.completion, text)
            except (ValueError, LookupError):
                continue
            for action in () if isinstance(actions, Ending) else actions:
                try:
                    result = await session.step(action)
                except (ValidationFailedError, PydanticSerializationError):  # nothing has changed by it
                    if task.chat_grows:
                        return
                    break
                failures = 0
                on_progress()
                if result.done:
                    return
                with convert_task_errors():
                    dialogue.add_observation(result.observation)
    except EpisodeUnscoredError:
        return


POOL_DRAWS: Final = 2**31 + 1
"""Third part of a draw's seed; see `rl_bridge.rollout.assignment.ENVIRONMENT_DRAWS`."""


@dataclass(slots=True)
class OpponentPool:
    """The versions of the policy that play its opponents, and how often it has won against each.

    Attributes:
        seed: The run's.
        success: The least reward of a win; None is any above 0.
        is_saved: Whether there is a version: a run that is resumed with another interval lacks some before that.
        results: Wins and games against each version; those of earlier iterations count half with every further one.
    """

    self_play: SelfPlayConfig
    seed: int = 0
    success: float | None = None
    is_saved: Callable[[PolicyVersion], bool] = lambda _: True
    results: dict[PolicyVersion, tuple[float, float]] = field(default_factory=dict)

    def versions(self, iteration: PolicyVersion) -> list[PolicyVersion]:
        """Return the versions that are drawn from once these weights are served: the initial one and those since."""
        interval = self.self_play.pool_interval
        saved = (
            [each for each in range(interval, iteration, interval) if self.is_saved(each)] if interval else []
        )
        return [0, *saved[-self.self_play.pool_size :]]

    def draw(self, iteration: PolicyVersion) -> PolicyVersion:
        """Draw the version that plays against these weights."""
        by_win_rate = self.self_play.draw == "win_rate"
        weights = {
            version: (1.0 - self.win_rate(version)) ** 2 if by_win_rate else 1.0
            for version in self.versions(iteration)
        }
        return draw_by_weight([self.seed, iteration, POOL_DRAWS], weights)

    def win_rate(self, version: PolicyVersion) -> float:
        """Return the estimated share of games that the policy wins against a version, a half without any.

        It is that of two more games, one of them won (Laplace's rule of succession), so never 0 or 1.
        """
        wins, games = self.results.get(version, (0.0, 0.0))
        return (wins + 1.0) / (games + 2.0)

    def add_results(self, groups: Iterable[Group]) -> dict[str, float]:
        """Count the games of an iteration; return metrics of its opponents by their names in the log."""
        won: dict[PolicyVersion, list[bool]] = {}
        for group in groups:
            if group.opponent is not None:
                won.setdefault(group.opponent, []).extend(
                    is_success(reward, self.success) for reward in group.rewards
                )
        for version, wins in won.items():
            before = self.results.get(version, (0.0, 0.0))
            self.results[version] = before[0] / 2 + sum(wins), before[1] / 2 + len(wins)
        metrics = {
            f"opponent/{version}/win_rate": sum(wins) / len(wins) for version, wins in won.items() if wins
        }
        return metrics | ({"opponent/version": float(max(won))} if won else {})

    def state(self) -> Mapping[str, Any]:
        """Return the results as a JSON object, for a checkpoint."""
        return {str(version): list(counts) for version, counts in self.results.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to the results of a checkpoint."""
        self.results = {int(version): (wins, games) for version, (wins, games) in state.items()}
