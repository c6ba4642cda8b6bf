"""Back to the newest checkpoint: after a loss of the trainer, and at the beginning of a resumed run."""

from rl_bridge.data.dataset import require_same
from rl_bridge.loops.run import Run
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import PolicyVersion


async def rewind(run: Run) -> PolicyVersion:
    """Take the whole run back to where its trainer stands.

    A trainer that is started again loads its newest checkpoint by itself. Everything else follows it: what is being
    played is recalled, groups, counts and logs are those of the checkpoint, and the generators take its weights.

    Returns:
        The version that the run goes on from.

    Raises:
        ConfigError: The checkpoint knows another dataset than the run has.
        rl_bridge.errors.BridgeError: A part of the run cannot go back, or the trainer cannot be had again.
    """
    await run.sync.cancel()
    async with run.deadline("the checkpoint's weights"):
        state: ResumeState = await run.trainer.resumed.route()
        _require_its_dataset(run, state)
        run.trainer_lost.clear()  # it is there again; of a further loss we want to know
        version = state.version
        await run.trainer.push_weights.route(version)
        await run.policy.update_weights.fanout(version)
    await run.dispatcher.rewind(version, state.run_state or None, state.attachments)
    run.went_back(
        version,
        seconds=float(state.run_state.get("seconds", 0.0)),
        fates=state.run_state.get("fates", ()),
    )
    return version


def _require_its_dataset(run: Run, state: ResumeState) -> None:
    known = state.run_state.get("dataset")  # older checkpoints say nothing of it
    if known is not None and run.dataset is not None:
        require_same(known, run.dataset)
