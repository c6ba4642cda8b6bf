"""Teach, evaluate, go on in two ways for the same time, evaluate again."""

import asyncio
import json
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.parts import Parts
from benchmarks.recipes.plan import SAMPLINGS, Plan, imitated, recipe_file, reinforced, sampled, taught
from benchmarks.wire.figures import Figures
from examples.sft.__main__ import POLICY, TRACES, VALIDATION, imitate, teach
from examples.sft.recipe import RecipeConfig
from examples.sft.report import summarize
from rl_bridge.config import Config, load_config, load_section
from rl_bridge.rollout import EvaluationResult

SOLVED: Final = "solved"
TASKS: Final = "tasks"
STEPS: Final = "steps"
"""Updates of teaching, up to the weights that were kept; iterations of reinforcement learning."""
SECONDS: Final = "seconds"
"""That went into it."""
SEED: Final = "seed"
SETTLED: Final = "settled"
"""Whether teaching ended since the validation loss had stopped falling (1), or at a limit (0). Of the taught policy."""
GROUPS: Final = "groups"
DULL: Final = "without gradient"
"""Of those groups, how many had rewards without variance. Both of a way to draw tasks."""
TAUGHT, REINFORCED = "taught", "reinforced"
IMITATED, IMITATED_TO_THE_END = "taught for longer, best validation", "taught for longer, last validation"

_ENDLESS: Final = 1_000_000
_LAST: Final = "last"


def measure(plan: Plan, parts: Parts) -> None:
    """Measure every recipe of a plan. What is solved is added for each seed."""
    for name in plan.recipes:
        recipe = load_section(recipe_file(name), plan.teaching, RecipeConfig)
        folder = parts.folder / taught(name)
        if not parts.measure(taught(name), partial(_teach, plan, recipe, name)):
            continue  # there is nothing to go on from
        for seed in plan.seeds:
            for sampling in SAMPLINGS if plan.sampling else ():
                draw = partial(_draw, plan, recipe, name, seed, sampling, folder)
                parts.measure(sampled(name, seed, sampling), draw)
            if not plan.sampling:
                parts.measure(reinforced(name, seed), partial(_reinforce, plan, recipe, name, seed, folder))
                parts.measure(imitated(name, seed), partial(_imitate, plan, recipe, name, seed, folder))


def _teach(plan: Plan, recipe: RecipeConfig, name: str, folder: Path, figures: Figures) -> None:
    result = teach(recipe, folder)
    played = _play(_config(recipe, plan, folder / POLICY), folder / "played")
    _add(figures, TAUGHT, name, played, steps=result.kept.update, seconds=result.validations[-1].seconds)
    figures.add(SETTLED, TAUGHT, name, float(result.settled))


def _reinforce(
    plan: Plan, recipe: RecipeConfig, name: str, seed: int, origin: Path, folder: Path, figures: Figures
) -> None:
    config = _config(recipe, plan, origin / POLICY).model_copy(update={"seed": seed})
    folder.mkdir()
    result, iterations = asyncio.run(_reinforced(config, folder, asyncio.sleep(plan.seconds)))
    _add(figures, REINFORCED, name, result, steps=iterations, seconds=result.train_seconds, seed=seed)


def _draw(
    plan: Plan,
    recipe: RecipeConfig,
    name: str,
    seed: int,
    sampling: str,
    origin: Path,
    folder: Path,
    figures: Figures,
) -> None:
    drawn = (f"seed={seed}", f"env.tasks={plan.train_tasks}", f"env.sampling={sampling}")
    config = _config(recipe, plan, origin / POLICY, *drawn)
    folder.mkdir()

    async def enough() -> None:
        while _groups(folder, plan.groups)[0] < plan.groups:  # noqa: ASYNC110 - the run's log is a file
            await asyncio.sleep(0.5)

    result, iterations = asyncio.run(_reinforced(config, folder, enough()))
    _add(figures, sampling, name, result, steps=iterations, seconds=result.train_seconds, seed=seed)
    groups, dull = _groups(folder, plan.groups)
    figures.add(GROUPS, sampling, name, groups)
    figures.add(DULL, sampling, name, dull)


def _groups(folder: Path, enough: int) -> tuple[float, float]:
    """How many were played until an iteration after which there were enough, and how many had no gradient."""
    groups = dull = 0.0
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        row = json.loads(line)
        played = row["rollout/groups"] + row["rollout/refused_groups"]
        if groups < enough and played:
            groups, dull = groups + played, dull + played * row["rollout/zero_variance_share"]
    return groups, dull


def _imitate(
    plan: Plan, recipe: RecipeConfig, name: str, seed: int, origin: Path, folder: Path, figures: Figures
) -> None:
    folder.mkdir()
    for file in (TRACES, VALIDATION):
        (folder / file).write_bytes((origin / file).read_bytes())
    result = imitate(for_longer(recipe, seed, plan.seconds), folder, origin / POLICY, last=folder / _LAST)
    newest = result.validations[-1]
    for who, validation, policy in ((IMITATED, result.kept, POLICY), (IMITATED_TO_THE_END, newest, _LAST)):
        played = _play(_config(recipe, plan, folder / policy), folder / f"{policy}-played")
        _add(figures, who, name, played, steps=validation.update, seconds=newest.seconds, seed=seed)


def for_longer(recipe: RecipeConfig, seed: int, seconds: float) -> RecipeConfig:
    """The recipe going on for a time, whatever the validation loss says."""
    sft = recipe.sft.model_copy(
        update={"seed": seed, "patience": None, "max_seconds": seconds, "max_updates": _ENDLESS}
    )
    return recipe.model_copy(update={"sft": sft})


def _config(recipe: RecipeConfig, plan: Plan, policy: Path, *others: str) -> Config:
    return load_config(
        recipe.world, [f"model.path={policy}", f"evaluation.episodes={plan.tasks}", *plan.learning, *others]
    )


def _add(
    figures: Figures,
    who: str,
    name: str,
    result: EvaluationResult,
    *,
    steps: int,
    seconds: float,
    seed: int = 0,
) -> None:
    report = summarize(result)
    found = {SEED: seed, SOLVED: report["solved"], TASKS: report["tasks"], STEPS: steps, SECONDS: seconds}
    for figure, value in found.items():
        figures.add(figure, who, name, value)


def _play(config: Config, folder: Path) -> EvaluationResult:
    folder.mkdir()
    return asyncio.run(_played(config, folder))


async def _played(config: Config, folder: Path) -> EvaluationResult:
    """The held-out tasks, by a policy as it is."""
    from rl_bridge.loops.assembly import open_run
    from rl_bridge.loops.evaluation import evaluate, result_of

    async with open_run(config, folder, console=_console()) as (run, fleet):
        records = (await fleet.guard(evaluate(run, folder / "evaluation")))[""]
    return result_of(records, train_seconds=run.train_seconds)


async def _reinforced(
    config: Config, folder: Path, enough: Coroutine[Any, Any, None]
) -> tuple[EvaluationResult, int]:
    """The held-out tasks after training until there is enough of it, and the iterations that it took."""
    from rl_bridge.loops.assembly import open_run
    from rl_bridge.loops.evaluation import evaluate, result_of
    from rl_bridge.loops.recovery import train_to_the_end

    trainer = config.trainer.model_copy(update={"iterations": _ENDLESS, "checkpoint_interval": 0})
    config = config.model_copy(update={"trainer": trainer})
    async with open_run(config, folder, console=_console()) as (run, fleet):
        ending = asyncio.create_task(enough)
        # As for a run whose machine is taken away: the iteration that it is in is its last.
        ending.add_done_callback(lambda _: run.preempt())
        try:
            await fleet.guard(train_to_the_end(run))
        finally:
            ending.cancel()
        await run.sync.finish()
        records = (await fleet.guard(evaluate(run, folder / "evaluation")))[""]
        return result_of(records, train_seconds=run.train_seconds), run.version


def _console() -> Console:
    """Where the part's log is."""
    return Console(width=160)
