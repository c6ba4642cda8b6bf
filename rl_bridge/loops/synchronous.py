"""The synchronous loop: collect, train, synchronise, again. Set a breakpoint anywhere."""

import time

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.errors import RolloutError
from rl_bridge.loops.run import Run
from rl_bridge.rollout.groups import (
    into_groups,
    rollout_figures,
    siblings,
    training_samples,
    training_seeds,
)

MIN_COMPLETE_SHARE = 0.5
"""With fewer of the groups than this left by failures, something is broken that going on would hide."""


async def train(run: Run) -> None:
    """Train until the configured number of iterations is reached.

    Raises:
        rl_bridge.errors.BridgeError: Something is wrong that trying on would not mend.
    """
    rollout, algorithm = run.config.rollout, run.config.algorithm
    groups_wanted = rollout.batch_size // rollout.group_size

    while run.version < run.config.trainer.iterations:
        iteration, started = run.version, time.perf_counter()

        # 1. Many episodes at once; siblings of a group share a seed, and so the deal.
        seeds = training_seeds(run.config.seed, iteration, groups_wanted)
        trajectories = await run.play(siblings(seeds, rollout.group_size))
        run.buffer.put(into_groups(trajectories, rollout.group_size))
        groups = run.buffer.take(groups_wanted, version=run.version)
        if len(groups) < groups_wanted * MIN_COMPLETE_SHARE:
            raise RolloutError(
                f"expected {groups_wanted} groups in iteration {iteration + 1}, got {len(groups)}; "
                f"the last failure of an episode was: {run.workers.last_failure}; "
                f"the last that had no reward, because: {run.workers.last_unscored}"
            )
        rolled = time.perf_counter()

        # 2. How much better than its siblings was each; and one step of the optimizer or a few.
        samples = training_samples(groups, normalize_std=algorithm.normalize_std)
        batch = TrainBatch.from_samples(samples)
        async with run.deadline("a step of the optimizer"):
            if run.reference is not None:
                batch = batch.with_reference(await run.reference.logprobs.call_one(batch))
            figures = await run.trainer.step.call_one(batch)
        trained = time.perf_counter()

        # 3. The new weights, to the generator.
        async with run.deadline("the generator's new weights"):
            snapshot = await run.trainer.publish.call_one()
            run.version = await run.generator.load.call_one(snapshot)
        synchronised = time.perf_counter()

        await run.log(
            {
                **rollout_figures(groups, version=iteration),
                **run.task.figures([t for group in groups for t in group.trajectories]),
                **figures,
                "rollout/stale_groups_dropped": float(run.buffer.dropped_stale),
                "rollout/episodes_retried": float(run.workers.retried),
                "rollout/episodes_dropped": float(run.workers.dropped),
                "rollout/episodes_unscored": float(run.workers.unscored),
                "time/rollout_s": rolled - started,
                "time/train_s": trained - rolled,
                "time/sync_s": synchronised - trained,
            }
        )
        # Last: what a checkpoint knows of has been logged, and a resumed run drops what was logged after it.
        async with run.deadline("a checkpoint"):
            await run.trainer.save.call_one(run.version == run.config.trainer.iterations)
