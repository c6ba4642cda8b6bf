"""The held-out episodes at the end of a run, played greedily."""

import math

from rl_bridge.loops.run import Run
from rl_bridge.loops.settings import episode_settings
from rl_bridge.metrics.console import ProgressBar
from rl_bridge.rollout.assignment import Absence, Outcome
from rl_bridge.rollout.seeds import held_out_seeds
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Ending, Trajectory

CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


async def evaluate(run: Run) -> EvaluationResult:
    """Play the held-out episodes of `evaluation.episodes`, with a progress bar; a dataset has none.

    Raises:
        rl_bridge.errors.BridgeError: They cannot be played.
    """
    train_seconds = run.train_seconds
    total = 0 if run.config.env is None else run.config.evaluation.episodes
    rewards: list[float] = []
    endings: list[Ending] = []
    dropped = unscored = 0
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
            absent = [outcome.absence for outcome in outcomes if not isinstance(outcome, Trajectory)]
            unscored += absent.count(Absence.UNSCORED)
            dropped += len(absent) - absent.count(Absence.UNSCORED)
    return EvaluationResult(
        rewards=rewards,
        endings=endings,
        dropped=dropped,
        train_seconds=train_seconds,
        unscored=unscored,
    )
