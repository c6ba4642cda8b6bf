"""The held-out episodes, played greedily, and what they come to."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openenv_core.evaluation.records import EpisodeRecord, ProgressBar, summarize
from rl_bridge.config import Config
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.loops.settings import episode_settings
from rl_bridge.rollout.assignment import Absence, NoTrajectory, Outcome, held_out_seeds
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Ending, Trajectory

if TYPE_CHECKING:
    from rl_bridge.loops.assembly import Players
    from rl_bridge.loops.run import Run

CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


async def evaluate(run: "Run | Players") -> dict[str, list[EpisodeRecord]]:
    """Play the held-out episodes of `evaluation.episodes` in each environment, by its name; a dataset has none.

    Raises:
        rl_bridge.errors.BridgeError: They cannot be played, in any of several environments.
    """
    results: dict[str, list[EpisodeRecord]] = {}
    failure: RolloutError | None = None
    total = run.config.evaluation.episodes
    for name in run.config.environments:
        try:
            results[name] = await _evaluate(run, name, total)
        except RolloutError as error:
            failure = error
            lost = NoTrajectory(absence=Absence.DROPPED, reason=str(error))
            results[name] = [
                _record(name, place, seed, lost) for place, seed in enumerate(held_out_seeds(0, total))
            ]
    if failure is not None and all(one.reward is None for result in results.values() for one in result):
        raise failure
    return results or {"": []}


async def _evaluate(run: "Run | Players", name: str, total: int) -> list[EpisodeRecord]:
    records: list[EpisodeRecord] = []
    title = f"held-out episodes of {name}" if name else "held-out episodes"
    with ProgressBar(title, max(total, 1)) as bar:
        for first in range(0, total, CHUNK):
            seeds = held_out_seeds(first, min(CHUNK, total - first))
            outcomes: list[Outcome] = await run.dispatcher.play_held_out(
                seeds,
                episode_settings(run.config, name, temperature=0.0),
                environment=name,
                # Which is what as many episodes as a step has may take.
                timeout_s=run.config.rollout.timeout_s
                * math.ceil(len(seeds) / run.config.rollout.batch_size),
                progress=lambda done, first=first: bar.update(first + done),  # type: ignore[misc]
            )
            played = zip(seeds, outcomes, strict=True)
            records += [_record(name, first + place, *one) for place, one in enumerate(played)]
    return records


def _record(name: str, place: int, seed: int, outcome: Outcome) -> EpisodeRecord:
    record = EpisodeRecord(
        environment=name,
        group=place,
        sibling=0,
        seed=seed,
        ending=Ending.FAILED_ENVIRONMENT.value,
        reward=None,
    )
    if isinstance(outcome, Trajectory):
        record.ending, record.reward = outcome.ending.value, outcome.reward
        record.tool_calls, record.reason = outcome.tool_calls, outcome.refusal
    else:
        record.reason = outcome.reason
        if outcome.absence is Absence.UNSCORED:
            record.ending = Ending.FAILED_REWARD.value
        elif outcome.ending is not None:
            record.ending = outcome.ending.value
    return record


def result_of(records: Sequence[EpisodeRecord], *, train_seconds: float) -> EvaluationResult:
    """What a task is told of the held-out episodes."""
    scored = [(one.reward, Ending(one.ending)) for one in records if one.reward is not None]
    absent = [one for one in records if one.reward is None]
    unscored = sum(one.ending == Ending.FAILED_REWARD for one in absent)
    return EvaluationResult(
        rewards=[reward for reward, _ in scored],
        endings=[ending for _, ending in scored],
        dropped=len(absent) - unscored,
        train_seconds=train_seconds,
        unscored=unscored,
        last_absence=absent[-1].reason if absent else None,
    )


def summary_of(results: Mapping[str, Sequence[EpisodeRecord]]) -> dict[str, Any]:
    """The figures of all episodes together, see `openenv_core.evaluation.records.summarize`."""
    return summarize([record for records in results.values() for record in records])


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
