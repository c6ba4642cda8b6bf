"""Trains with each preset, and reads the logged metrics."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.parts import Parts
from benchmarks.presets.plan import CONFIG, Plan, part_name
from benchmarks.wire.measurements import Measurements
from examples.grpo_blackjack.hands import count_hands, load_metrics
from rl_bridge.config import AlgorithmConfig, Config, load_config

ITERATION: Final = "iteration"
EXACT: Final = "probe/exact_return"
RATIO: Final = "loss/ratio_mean"
LOW, HIGH = "loss/clip_fraction_low", "loss/clip_fraction_high"
CLIPPED: Final = "clipped"
"""Sum of both shares in an iteration."""
SECONDS: Final = "time/elapsed_s"
HANDS: Final = "hands"
"""Hands played, those of dropped groups included."""
_METRICS: Final = "metrics.jsonl"


def measure(plan: Plan, parts: Parts) -> None:
    """Measure every preset of a plan. Measurements are added for each iteration."""
    for name in plan.presets:
        for seed in plan.seeds:
            parts.measure(part_name(name, seed), partial(_train_and_record, plan, name, seed))


def build_config(plan: Plan, name: str, seed: int) -> Config:
    """Return the example's configuration with a preset, which keeps only the example's entropy bonus."""
    overrides = [f"seed={seed}", "trainer.checkpoint_interval=0", *plan.own.get(name, ()), *plan.words]
    config = load_config(CONFIG, overrides)
    entropy = {
        key: value for key, value in config.algorithm.model_dump().items() if key.startswith("entropy")
    }
    return config.model_copy(update={"algorithm": AlgorithmConfig.model_validate({"name": name, **entropy})})


def _train_and_record(plan: Plan, name: str, seed: int, folder: Path, measurements: Measurements) -> None:
    folder.mkdir()
    iterations, exact = asyncio.run(_train(build_config(plan, name, seed), folder, plan.seconds))
    load = f"seed {seed}"
    add_run(folder, measurements, name, load)
    if measurements.values.get((ITERATION, name, load), [0.0])[-1] != iterations:
        # The run was preempted: the last logged probe is some iterations old.
        measurements.add(EXACT, name, load, exact)
        measurements.add(ITERATION, name, load, iterations)


def add_run(run: Path, measurements: Measurements, name: str, load: str) -> None:
    """Add the logged metrics of each iteration of a run, and its exact returns."""
    rows = load_metrics(run / _METRICS)
    for row, hands in zip(rows, count_hands(rows).tolist(), strict=True):
        for metric in (RATIO, SECONDS):
            measurements.add(metric, name, load, row[metric])
        measurements.add(CLIPPED, name, load, row[LOW] + row[HIGH])
        measurements.add(HANDS, name, load, hands)
        if EXACT in row:
            measurements.add(EXACT, name, load, row[EXACT])
            measurements.add(ITERATION, name, load, row[ITERATION])


async def _train(config: Config, folder: Path, seconds: float) -> tuple[int, float]:
    """Train; returns the number of iterations and the exact return after them."""
    from rl_bridge.loops.assembly import open_run
    from rl_bridge.loops.recovery import train_with_recovery

    async with open_run(config, folder, console=Console(width=160)) as (run, fleet):
        ending = asyncio.get_running_loop().call_later(seconds, run.preempt)
        try:
            await fleet.guard(train_with_recovery(run))
        finally:
            ending.cancel()
        probed: dict[str, float] = await fleet.guard(run.probe())
        return run.version, probed[EXACT]
