"""Evaluation on held-out episodes, played greedily."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from openenv_core.evaluation.records import LOST, EpisodeRecord, EvaluationFolder, ProgressBar, summarize
from openenv_core.targets import declared_reward_range, find_target
from rl_bridge.config import Config
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.metrics.sinks import environment_prefix
from rl_bridge.rollout.assignment import Absence, NoTrajectory, Outcome, held_out_seeds
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Ending, PolicyVersion, Trajectory


class Player(Protocol):
    """What plays held-out episodes: a `Run`, or the `Players` of an evaluation."""

    @property
    def config(self) -> Config:
        """The configuration."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Gives the episodes to workers."""


async def evaluate(
    run: Player, folder: Path, *, version: PolicyVersion = 0
) -> dict[str, list[EpisodeRecord]]:
    """Play `evaluation.episodes` held-out episodes in each environment; a run on a dataset has none.

    Records are kept in the folder, in the layout of `ropewalk eval`. Episodes that this policy version has already
    completed there are not repeated.

    Returns:
        The records by environment.

    Raises:
        rl_bridge.errors.BridgeError: The episodes could not be completed in any environment.
    """
    names, total = list(run.config.environments), run.config.evaluation.episodes
    if not names or not total:
        return {name: [] for name in names or [""]}
    with EvaluationFolder(folder) as evaluation_folder:
        failures = [await _evaluate(run, name, total, evaluation_folder, version) for name in names]
        results = {
            name: [evaluation_folder.records[name, index, 0] for index in range(total)] for name in names
        }
    if len(failed := [failure for failure in failures if failure is not None]) == len(names):
        raise failed[0]
    return results


async def _evaluate(
    run: Player, name: str, total: int, evaluation_folder: EvaluationFolder, version: PolicyVersion
) -> RolloutError | None:
    """Play the missing episodes of one environment; return the error that stopped them, if any."""
    completed = {
        record.group
        for record in evaluation_folder.records.values()
        if (record.environment, record.version) == (name, version) and record.ending not in LOST
    }
    missing = [index for index in range(total) if index not in completed]
    unplayed = set(missing)
    if not missing:
        return None
    with ProgressBar(f"held-out episodes of {name}" if name else "held-out episodes", total) as bar:

        def on_outcome(number: int, outcome: Outcome) -> None:
            evaluation_folder.write(_make_record(name, missing[number], outcome, version))
            unplayed.discard(missing[number])
            bar.update(total - len(unplayed))

        try:
            await run.dispatcher.play_held_out(
                [held_out_seeds(index, 1)[0] for index in missing],
                on_outcome,
                environment=name,
                understood=bool(completed),
            )
        except RolloutError as error:
            for index in unplayed:
                unplayed_outcome = NoTrajectory(absence=Absence.DROPPED, reason=str(error))
                evaluation_folder.write(_make_record(name, index, unplayed_outcome, version))
            return error
    return None


async def measure_held_out(run: Player, version: PolicyVersion) -> dict[str, float]:
    """Play `evaluation.curve_tasks` held-out tasks in each environment; return metrics by their names in the log.

    `held_out/mean@k` is the mean reward over tasks of k repetitions each, `held_out/pass@1` the share of successes,
    `held_out/pass@k` the unbiased estimate that one of k attempts succeeds; `_low` and `_high` bound their 95%
    intervals, where there are any; see `openenv_core.evaluation.statistics`. Episodes lost to failures that are not the
    policy's are played again, then counted as `held_out/lost`, and are part of no mean.

    Raises:
        rl_bridge.errors.RolloutError: No episode of an environment made progress any more.
    """
    config, metrics = run.config, dict[str, float]()
    repetitions = config.evaluation.repetitions
    tasks = [index for index in range(config.evaluation.curve_tasks) for _ in range(repetitions)]
    for name in config.environments:
        records: dict[int, EpisodeRecord] = {}

        def on_outcome(
            number: int, outcome: Outcome, name: str = name, records: dict[int, EpisodeRecord] = records
        ) -> None:
            sibling = number % repetitions
            records[number] = _make_record(name, tasks[number], outcome, version, sibling=sibling)

        await run.dispatcher.play_held_out(
            [held_out_seeds(index, 1)[0] for index in tasks],
            on_outcome,
            environment=name,
            temperature=0.0 if repetitions == 1 else config.rollout.temperature,
        )
        summary = summarize(
            list(records.values()), success=config.evaluation.success, repetitions=repetitions
        )
        estimates = {
            f"mean@{repetitions}": (summary["mean_reward"], summary["ci95"]),
            "pass@1": (summary["win_rate"], summary["win_ci95"]),
            **{f"pass@{k}": (value, bounds) for k, (value, bounds, _) in summary.get("pass_at", {}).items()},
        }
        prefix = f"{environment_prefix(name)}held_out/"
        for label, (value, bounds) in estimates.items():
            if value is not None:
                metrics[prefix + label] = value
            if bounds is not None:
                metrics |= {f"{prefix}{label}_low": bounds[0], f"{prefix}{label}_high": bounds[1]}
        metrics[f"{prefix}lost"] = float(summary["dropped"] + summary["unscored"])
    return metrics


def _make_record(
    name: str, index: int, outcome: Outcome, version: PolicyVersion, *, sibling: int = 0
) -> EpisodeRecord:
    record = EpisodeRecord(
        environment=name,
        group=index,
        sibling=sibling,
        seed=held_out_seeds(index, 1)[0],
        ending=(outcome.ending or Ending.FAILED_ENVIRONMENT).value,
        reward=None,
        version=version,
    )
    if isinstance(outcome, Trajectory):
        record.reward, record.tool_calls, record.reason = outcome.reward, outcome.tool_calls, outcome.refusal
    else:
        record.reason = outcome.reason
    return record


def result_of(records: Sequence[EpisodeRecord], *, train_seconds: float) -> EvaluationResult:
    """Return the result of the held-out episodes, for the task's report."""
    scored = [(record.reward, Ending(record.ending)) for record in records if record.reward is not None]
    absent = [record for record in records if record.reward is None]
    unscored = sum(record.ending == Ending.FAILED_REWARD for record in absent)
    return EvaluationResult(
        rewards=[reward for reward, _ in scored],
        endings=[ending for _, ending in scored],
        dropped=len(absent) - unscored,
        train_seconds=train_seconds,
        unscored=unscored,
    )


def summaries_of(config: Config, results: Mapping[str, Sequence[EpisodeRecord]]) -> dict[str, dict[str, Any]]:
    """Return a summary of each environment's episodes; see `openenv_core.evaluation.records.summarize`."""
    apps = {name: env.app for name, env in config.environments.items()}
    return {
        name: summarize(
            records,
            reward_range=declared_reward_range(find_target(app)) if (app := apps.get(name)) else None,
        )
        for name, records in results.items()
    }


def summary_of(results: Mapping[str, Sequence[EpisodeRecord]]) -> dict[str, Any]:
    """Return a summary of all episodes together; see `openenv_core.evaluation.records.summarize`."""
    return summarize([record for records in results.values() for record in records])


def require_policy_folder(config: Config) -> Path:
    """Check that an evaluation can run, else ConfigError; return the folder of the policy's checkpoint."""
    if config.env is None:
        raise ConfigError("expected env.* to evaluate on, got none")
    if config.evaluation.episodes == 0:
        raise ConfigError("expected evaluation.episodes of at least 1 in an evaluation, got 0")
    if config.model.path is None:
        raise ConfigError(
            "expected model.path, the checkpoint to evaluate in the Hugging Face layout; a model that a server has is "
            "played by: ropewalk eval ENVIRONMENT --policy http://HOST:PORT/v1 --model NAME"
        )
    path = Path(os.path.expanduser(config.model.path)).absolute()
    if not path.is_dir():
        raise ConfigError(
            f"expected model.path to be a folder of this machine, there is none at {str(path)!r}"
        )
    return path
