"""Fine-tunes and evaluates a policy, then continues in two ways for the same time and evaluates both."""

import asyncio
import json
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.parts import Parts
from benchmarks.recipes.plan import (
    SAMPLINGS,
    Plan,
    imitation_part,
    recipe_file,
    reinforcement_part,
    sampling_part,
    teaching_part,
)
from benchmarks.wire.measurements import Measurements
from examples.sft.__main__ import POLICY, TRACES, VALIDATION, imitate, teach
from examples.sft.recipe import RecipeConfig
from examples.sft.report import summarize
from rl_bridge.config import Config, load_config, load_section
from rl_bridge.rollout import EvaluationResult

SOLVED: Final = "solved"
TASKS: Final = "tasks"
STEPS: Final = "steps"
"""Updates of fine-tuning, up to the weights that were kept; iterations of reinforcement learning."""
SECONDS: Final = "seconds"
"""Training time."""
SEED: Final = "seed"
SETTLED: Final = "settled"
"""For the taught policy: 1 if fine-tuning ended because the validation loss stopped falling, 0 if at a limit."""
GROUPS: Final = "groups"
WITHOUT_GRADIENT: Final = "without gradient"
"""How many of the `GROUPS` had rewards without variance. Both are recorded for each kind of sampling."""
TAUGHT, REINFORCED = "taught", "reinforced"
IMITATED, IMITATED_TO_THE_END = "taught for longer, best validation", "taught for longer, last validation"

_ENDLESS: Final = 1_000_000
_LAST: Final = "last"


def measure(plan: Plan, parts: Parts) -> None:
    """Measure every recipe of a plan. Results are added for each seed."""
    for name in plan.recipes:
        recipe = load_section(recipe_file(name), plan.teaching, RecipeConfig)
        folder = parts.folder / teaching_part(name)
        if not parts.measure(teaching_part(name), partial(_teach, plan, recipe, name)):
            continue  # no policy to continue from
        for seed in plan.seeds:
            for sampling in SAMPLINGS if plan.sampling else ():
                draw = partial(_train_with_sampling, plan, recipe, name, seed, sampling, folder)
                parts.measure(sampling_part(name, seed, sampling), draw)
            if not plan.sampling:
                parts.measure(
                    reinforcement_part(name, seed), partial(_reinforce, plan, recipe, name, seed, folder)
                )
                parts.measure(imitation_part(name, seed), partial(_imitate, plan, recipe, name, seed, folder))


def _teach(plan: Plan, recipe: RecipeConfig, name: str, folder: Path, measurements: Measurements) -> None:
    result = teach(recipe, folder)
    evaluation = _evaluate_policy(_config(recipe, plan, folder / POLICY), folder / "played")
    _add(
        measurements,
        TAUGHT,
        name,
        evaluation,
        steps=result.kept.update,
        seconds=result.validations[-1].seconds,
    )
    measurements.add(SETTLED, TAUGHT, name, float(result.settled))


def _reinforce(
    plan: Plan,
    recipe: RecipeConfig,
    name: str,
    seed: int,
    origin: Path,
    folder: Path,
    measurements: Measurements,
) -> None:
    config = _config(recipe, plan, origin / POLICY).model_copy(update={"seed": seed})
    folder.mkdir()
    result, iterations = asyncio.run(_train_and_evaluate(config, folder, asyncio.sleep(plan.seconds)))
    _add(measurements, REINFORCED, name, result, steps=iterations, seconds=result.train_seconds, seed=seed)


def _train_with_sampling(
    plan: Plan,
    recipe: RecipeConfig,
    name: str,
    seed: int,
    sampling: str,
    origin: Path,
    folder: Path,
    measurements: Measurements,
) -> None:
    overrides = (f"seed={seed}", f"env.tasks={plan.train_tasks}", f"env.sampling={sampling}")
    config = _config(recipe, plan, origin / POLICY, *overrides)
    folder.mkdir()

    async def wait_for_groups() -> None:
        while _count_groups(folder, plan.groups)[0] < plan.groups:  # noqa: ASYNC110 - the run's log is a file
            await asyncio.sleep(0.5)

    result, iterations = asyncio.run(_train_and_evaluate(config, folder, wait_for_groups()))
    _add(measurements, sampling, name, result, steps=iterations, seconds=result.train_seconds, seed=seed)
    groups, without_gradient = _count_groups(folder, plan.groups)
    measurements.add(GROUPS, sampling, name, groups)
    measurements.add(WITHOUT_GRADIENT, sampling, name, without_gradient)


def _count_groups(folder: Path, at_least: int) -> tuple[float, float]:
    """Return the groups played up to the iteration that reached `at_least`, and how many of them had no gradient."""
    groups = without_gradient = 0.0
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        row = json.loads(line)
        new_groups = row["rollout/groups"] + row["rollout/refused_groups"]
        if groups < at_least and new_groups:
            groups, without_gradient = (
                groups + new_groups,
                without_gradient + new_groups * row["rollout/zero_variance_share"],
            )
    return groups, without_gradient


def _imitate(
    plan: Plan,
    recipe: RecipeConfig,
    name: str,
    seed: int,
    origin: Path,
    folder: Path,
    measurements: Measurements,
) -> None:
    folder.mkdir()
    for file in (TRACES, VALIDATION):
        (folder / file).write_bytes((origin / file).read_bytes())
    result = imitate(for_longer(recipe, seed, plan.seconds), folder, origin / POLICY, last=folder / _LAST)
    newest = result.validations[-1]
    for subject, validation, policy in (
        (IMITATED, result.kept, POLICY),
        (IMITATED_TO_THE_END, newest, _LAST),
    ):
        evaluation = _evaluate_policy(_config(recipe, plan, folder / policy), folder / f"{policy}-played")
        _add(
            measurements,
            subject,
            name,
            evaluation,
            steps=validation.update,
            seconds=newest.seconds,
            seed=seed,
        )


def for_longer(recipe: RecipeConfig, seed: int, seconds: float) -> RecipeConfig:
    """Return the recipe with a time limit instead of early stopping by the validation loss."""
    sft = recipe.sft.model_copy(
        update={"seed": seed, "patience": None, "max_seconds": seconds, "max_updates": _ENDLESS}
    )
    return recipe.model_copy(update={"sft": sft})


def _config(recipe: RecipeConfig, plan: Plan, policy: Path, *overrides: str) -> Config:
    return load_config(
        recipe.world,
        [f"model.path={policy}", f"evaluation.episodes={plan.tasks}", *plan.learning, *overrides],
    )


def _add(
    measurements: Measurements,
    subject: str,
    name: str,
    result: EvaluationResult,
    *,
    steps: int,
    seconds: float,
    seed: int = 0,
) -> None:
    report = summarize(result)
    row = {SEED: seed, SOLVED: report["solved"], TASKS: report["tasks"], STEPS: steps, SECONDS: seconds}
    for metric, value in row.items():
        measurements.add(metric, subject, name, value)


def _evaluate_policy(config: Config, folder: Path) -> EvaluationResult:
    folder.mkdir()
    return asyncio.run(_evaluate_in_run(config, folder))


async def _evaluate_in_run(config: Config, folder: Path) -> EvaluationResult:
    """Play the held-out tasks with a policy, without training."""
    from rl_bridge.loops.assembly import open_run
    from rl_bridge.loops.evaluation import evaluate, result_of

    async with open_run(config, folder, console=_console()) as (run, fleet):
        records = (await fleet.guard(evaluate(run, folder / "evaluation")))[""]
    return result_of(records, train_seconds=run.train_seconds)


async def _train_and_evaluate(
    config: Config, folder: Path, until: Coroutine[Any, Any, None]
) -> tuple[EvaluationResult, int]:
    """Train until `until` ends, then play the held-out tasks; returns their result and the iterations trained."""
    from rl_bridge.loops.assembly import open_run
    from rl_bridge.loops.evaluation import evaluate, result_of
    from rl_bridge.loops.recovery import train_with_recovery

    trainer = config.trainer.model_copy(update={"iterations": _ENDLESS, "checkpoint_interval": 0})
    config = config.model_copy(update={"trainer": trainer})
    async with open_run(config, folder, console=_console()) as (run, fleet):
        ending = asyncio.create_task(until)
        # As when a run is preempted: it finishes the current iteration and stops.
        ending.add_done_callback(lambda _: run.preempt())
        try:
            await fleet.guard(train_with_recovery(run))
        finally:
            ending.cancel()
        await run.sync.finish()
        records = (await fleet.guard(evaluate(run, folder / "evaluation")))[""]
        return result_of(records, train_seconds=run.train_seconds), run.version


def _console() -> Console:
    """Return a console that prints to stdout, which is the part's log."""
    return Console(width=160)
