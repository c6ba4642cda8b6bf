"""An actor for the tests of the policy as a service; processes of the run import it by name."""

from monarch.actor import concurrent_endpoint

from rl_bridge.generator.actor import PolicyActor


class BreakablePolicy(PolicyActor):
    """A policy whose engine breaks on request, as a bug in it would."""

    @concurrent_endpoint
    async def break_engine(self) -> None:
        self._replica._engine._batches.step = _break


def _break() -> None:
    raise RuntimeError("it broke")
