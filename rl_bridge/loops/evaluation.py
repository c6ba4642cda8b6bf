"""The held-out episodes at the end of a run, played greedily."""

import math
from collections import Counter
from typing import Protocol

from rich.console import Console

from rl_bridge.config import Config
from rl_bridge.loops.settings import episode_settings
from rl_bridge.metrics.console import ProgressBar
from rl_bridge.rollout.assignment import Absence, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.seeds import held_out_seeds
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Ending, Trajectory

CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


class Looked(Protocol):
    """What is looked at: a `Run`, or a policy that is not trained at all."""

    @property
    def config(self) -> Config:
        """How episodes are played, and how many."""

    @property
    def console(self) -> Console:
        """What a person watches."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Has episodes played."""

    @property
    def train_seconds(self) -> float:
        """Wall time of the training so far."""


async def evaluate(run: Looked) -> EvaluationResult:
    """Play the held-out episodes of `evaluation.episodes`, with a progress bar; a dataset has none.

    Raises:
        rl_bridge.errors.BridgeError: They cannot be played.
    """
    train_seconds = run.train_seconds
    total = 0 if run.config.env is None else run.config.evaluation.episodes
    rewards: list[float] = []
    endings: list[Ending] = []
    absent: Counter[Absence] = Counter()
    last_absence: str | None = None
    with ProgressBar("held-out episodes", max(total, 1), run.console) as bar:
        for first in range(0, total, CHUNK):
            count = min(CHUNK, total - first)
            outcomes: list[Outcome] = await run.dispatcher.play_held_out(
                held_out_seeds(first, count),
                episode_settings(run.config, temperature=0.0),
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
