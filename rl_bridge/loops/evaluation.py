"""The held-out episodes, played greedily, and what they come to."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_bridge.config import Config
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.loops.settings import episode_settings
from rl_bridge.metrics.console import ProgressBar
from rl_bridge.metrics.intervals import mean_interval, wilson_interval
from rl_bridge.rollout.assignment import Absence, Outcome, held_out_seeds
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Ending, Trajectory

if TYPE_CHECKING:
    from rl_bridge.loops.assembly import Players
    from rl_bridge.loops.run import Run

CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


async def evaluate(run: "Run | Players") -> dict[str, EvaluationResult]:
    """Play the held-out episodes of `evaluation.episodes` in each environment, by its name; a dataset has none.

    Raises:
        rl_bridge.errors.BridgeError: They cannot be played, in any of several environments.
    """
    results: dict[str, EvaluationResult] = {}
    failure: RolloutError | None = None
    train_seconds = run.train_seconds
    for name in run.config.environments:
        try:
            results[name] = await _evaluate(run, name, run.config.evaluation.episodes, train_seconds)
        except RolloutError as error:
            failure = error
            results[name] = EvaluationResult(
                rewards=[],
                endings=[],
                dropped=run.config.evaluation.episodes,
                train_seconds=train_seconds,
                last_absence=str(error),
            )
    if failure is not None and not any(result.rewards for result in results.values()):
        raise failure
    return results or {"": await _evaluate(run, "", 0, train_seconds)}


def together(results: Mapping[str, EvaluationResult]) -> EvaluationResult:
    """The results of several environments as one."""
    several = list(results.values())
    return EvaluationResult(
        rewards=[reward for result in several for reward in result.rewards],
        endings=[ending for result in several for ending in result.endings],
        dropped=sum(result.dropped for result in several),
        train_seconds=several[0].train_seconds,
        unscored=sum(result.unscored for result in several),
        last_absence=next(filter(None, (result.last_absence for result in several)), None),
    )


async def _evaluate(run: "Run | Players", name: str, total: int, train_seconds: float) -> EvaluationResult:
    rewards: list[float] = []
    endings: list[Ending] = []
    absent: Counter[Absence] = Counter()
    last_absence: str | None = None
    title = f"held-out episodes of {name}" if name else "held-out episodes"
    with ProgressBar(title, max(total, 1), run.console) as bar:
        for first in range(0, total, CHUNK):
            count = min(CHUNK, total - first)
            outcomes: list[Outcome] = await run.dispatcher.play_held_out(
                held_out_seeds(first, count),
                episode_settings(run.config, name, temperature=0.0),
                environment=name,
                # Which is what as many episodes as a step has may take.
                timeout_s=run.config.rollout.timeout_s * math.ceil(count / run.config.rollout.batch_size),
                progress=lambda done, first=first: bar.update(first + done),  # type: ignore[misc]
            )
            trajectories = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
            rewards.extend(trajectory.reward for trajectory in trajectories)
            endings.extend(trajectory.ending for trajectory in trajectories)
            for outcome in outcomes:
                if not isinstance(outcome, Trajectory):
                    absent[outcome.absence] += 1
                    last_absence = outcome.reason
    return EvaluationResult(
        rewards=rewards,
        endings=endings,
        dropped=absent.total() - absent[Absence.UNSCORED],
        train_seconds=train_seconds,
        unscored=absent[Absence.UNSCORED],
        last_absence=last_absence,
    )


def summary(result: EvaluationResult) -> dict[str, Any]:
    """An evaluation in numbers.

    The mean and its interval are of the episodes that have a reward, none of which was dropped or unscored.
    """
    count = len(result.rewards)
    interval = _interval(result.rewards)
    return {
        "episodes": count,
        "mean_reward": statistics.fmean(result.rewards) if count else None,
        "ci95": None if interval is None else list(interval),
        "endings": dict(sorted(Counter(str(ending) for ending in result.endings).items())),
        "dropped": result.dropped,
        "unscored": result.unscored,
        "last_absence": result.last_absence,
    }


def _interval(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Wilson's where all rewards are 0 or 1, Student's otherwise; see `mean_interval` for where it is None."""
    if rewards and set(rewards) <= {0.0, 1.0}:
        return wilson_interval(round(sum(rewards)), len(rewards))
    return mean_interval(rewards)


def missing(result: EvaluationResult) -> str:
    """What is said of the episodes that have no reward."""
    return (
        f"{result.dropped + result.unscored} episodes are no part of the mean, {result.dropped} dropped and "
        f"{result.unscored} unscored, the last one because: {result.last_absence}"
    )


def ready_to_evaluate(config: Config) -> Path:
    """Require what an evaluation needs; returns the folder of the policy's checkpoint.

    Raises:
        ConfigError: It is not there.
    """
    if config.env is None:
        raise ConfigError("expected env.* to evaluate on, got none")
    if config.evaluation.episodes == 0:
        raise ConfigError("expected evaluation.episodes of at least 1 in an evaluation, got 0")
    if config.model.path is None:
        raise ConfigError(
            "expected model.path, the checkpoint to evaluate in the Hugging Face layout; where a server has it "
            "(generator.url), a folder with its tokenizer, since chats are made into tokens here"
        )
    path = Path(config.model.path).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"expected model.path to be a folder of this machine, there is none at {str(path)!r}"
        )
    return path
