"""The training loop over environments, with any degree of asynchrony. Set a breakpoint anywhere.

With `rollout.max_staleness` of 0 it is synchronous: no episode begins before the last step's weights are served. Above
0 the dispatcher keeps playing episodes while the trainer works, as far ahead as the bound allows.
"""

from rl_bridge.buffer.ledger import GroupLease
from rl_bridge.loops.run import Run
from rl_bridge.loops.weight_sync import sync_metrics
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.groups import overlong_handling, trained_trajectories
from rl_bridge.types import PolicyVersion


async def train(run: Run) -> None:
    """Train until the configured number of iterations is reached.

    Raises:
        rl_bridge.errors.ReplicaLostError: A process of the trainer died: rewind the run, and call this again.
        rl_bridge.errors.TrainerWentBackError: Likewise, and the trainer has been restarted already.
        rl_bridge.errors.BridgeError: An error that a retry would not mend.
    """
    policy, trainer, replay_buffer = run.policy, run.trainer, run.replay_buffer

    async def synchronize(version: PolicyVersion) -> dict[str, float]:
        push_s = await trainer.push_weights.route(version)
        await run.give_gpus_to_generators()  # colocated, the trainer leaves the GPUs to them
        updates = await policy.update_weights.fanout(version)
        await run.meet_opponents(version)  # in self-play
        run.dispatcher.record_served(version)
        return sync_metrics(push_s, updates.values.values())

    while run.version < run.config.trainer.iterations:
        iteration = run.iteration()

        # 1. Take groups, whose siblings share a seed and so the deal; oldest first, none staler than allowed.
        with iteration.part("rollout", waits_for="rollout"):
            groups = await replay_buffer.sample.route(run.version, run.groups_per_step)

        # 2. Compute advantages over siblings, and take one optimizer step or a few on their tokens, which it has.
        with iteration.part("batch"):
            trained = trained_trajectories(
                groups,
                normalize_std=run.config.algorithm.normalize_std,
                overlong=overlong_handling(run.config),
                advantage_function=run.advantage,
            )
        with iteration.part("train", waits_for="trainer"):
            async with run.deadline("a step of the optimizer"):
                await run.give_gpus_to_trainer()  # colocated, the generators leave the GPUs to it
                run.require_trainer()  # a restarted one may be at this version too
                metrics = await trainer.train_step.route(run.batch_of(trained), run.version)
            run.version += 1

        # 3. Send the new weights from the trainer to the generators; above a staleness of 0 in the background.
        with iteration.part("sync", waits_for="weights"):
            await run.sync.begin(synchronize(run.version))

        # 4. Log before the checkpoint: a resumed run drops what was logged after its checkpoint.
        await run.log(iteration, groups, trained, metrics)
        await run.checkpoint()


async def collect(dispatcher: Dispatcher) -> None:
    """Play groups concurrently with `train`, as far ahead of it as admission allows: the other half of the loop."""

    async def play(lease: GroupLease) -> None:
        # 2. A worker plays all siblings at once, from one seed; a group lost with its worker is played again.
        played = await dispatcher.play(lease)

        # 3. A group worth training goes to the buffer, from which `train` samples; others are replaced.
        if played is not None:
            await dispatcher.settle(lease, played)

    while True:
        # 1. Wait for the next group: until fewer are in flight, and the served weights are new enough for it.
        lease = await dispatcher.next_group()
        dispatcher.begin(lease, play(lease))
