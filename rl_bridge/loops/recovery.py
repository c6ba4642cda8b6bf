"""Recovery: when the trainer is lost, the run goes back to the newest checkpoint and goes on from there."""

import asyncio
import contextlib

from rl_bridge.data.examples import require_same
from rl_bridge.errors import ReplicaLostError, TrainerWentBackError, WeightsError
from rl_bridge.loops.grpo import train
from rl_bridge.loops.run import PreemptedError, Run
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import PolicyVersion


async def rewind(run: Run) -> PolicyVersion:
    """Reset the whole run to its trainer's checkpoint; return the version that it continues from.

    A restarted trainer loads its newest checkpoint by itself. The rest follows: episodes in progress are recalled,
    groups, counts and logs are restored to the checkpoint, and the generators load its weights.

    Raises:
        ConfigError: The checkpoint belongs to another dataset than the run's.
        rl_bridge.errors.BridgeError: A part of the run cannot go back, or the trainer cannot be restarted.
    """
    await run.sync.cancel()
    async with run.deadline("the checkpoint's weights"):
        await run.give_gpus_to_trainer()  # or a restarted trainer would wait for the GPUs
        state: ResumeState = await run.trainer.get_resume_state.route()
        for line in state.damaged:
            run.console.print(line, highlight=False, markup=False, soft_wrap=True)
        checkpoint_dataset = state.run_state.get("dataset")  # missing in older checkpoints
        if checkpoint_dataset is not None and run.dataset is not None:
            require_same(checkpoint_dataset, run.dataset)
        run.trainer_lost.clear()  # the trainer is back; from here on a loss is a new one
        version = state.version
        await run.trainer.push_weights.route(version)
        await run.give_gpus_to_generators()
        await run.policy.update_weights.tell(version)  # no generator may serve yet; later ones load it
    if run.opponents is not None:
        await run.opponents.rewind(version, state.run_state.get("opponents"))
    await run.dispatcher.rewind(version, state.run_state or None)
    run.restore(
        version, seconds=float(state.run_state.get("seconds", 0.0)), fates=state.run_state.get("fates", ())
    )
    return version


MAX_NOTICE_HEARTBEATS = 5.0
"""Heartbeats within which a death is noticed; processes are checked once per heartbeat."""


async def train_with_recovery(run: Run) -> bool:
    """Train, recovering from each loss of the trainer, and export the policy; return False if preempted."""
    try:
        await _train(run)
    except PreemptedError:
        try:
            await run.checkpoint(now=True)
        except (ReplicaLostError, TrainerWentBackError) as lost:
            run.console.print(
                f"{lost}; the newest checkpoint is an older one", highlight=False, soft_wrap=True
            )
    return not run.preempted


async def _train(run: Run) -> None:
    losses, furthest = 0, run.version
    needs_rewind = False
    while True:
        try:
            if needs_rewind:
                needs_rewind = False
                version = await rewind(run)
                run.console.print(f"going on after iteration {version}", highlight=False, soft_wrap=True)
            await train(run)
            await run.export("policy")
            await run.sync.finish()
            return
        except (ReplicaLostError, TrainerWentBackError, WeightsError) as lost:
            if isinstance(lost, WeightsError) and not await _trainer_is_gone(run):
                raise
            # The trainer's restart budget bounds losses in quick succession. This bounds those without a new iteration
            # in between: of a trainer that the same step always ends, and errors that only look like a loss.
            losses = 1 if run.version > furthest else losses + 1
            furthest = max(furthest, run.version)
            if losses > run.config.monarch.restarts.budget + 1:
                raise
            run.console.print(f"{lost}; going back to the newest checkpoint", highlight=False, soft_wrap=True)
            needs_rewind = True


async def _trainer_is_gone(run: Run) -> bool:
    """Whether missing weights are due to the trainer's death, which is noticed a little later."""
    timeout_s = MAX_NOTICE_HEARTBEATS * run.config.monarch.heartbeat_interval
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await run.trainer_lost.wait()
    return run.trainer_lost.is_set()
