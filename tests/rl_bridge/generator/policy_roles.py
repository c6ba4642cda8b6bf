"""An actor for the tests of the policy as a service; processes of the run import it by name."""

import time
from typing import Any

from monarch.actor import concurrent_endpoint

from rl_bridge.generator.actor import PolicyActor


class BreakablePolicy(PolicyActor):
    """A policy whose engine breaks on request, as a bug in it would."""

    @concurrent_endpoint
    async def break_engine(self) -> None:
        """Its next step raises."""
        self._engine._llm._engine.step = _break

    @concurrent_endpoint
    async def break_load(self) -> None:
        """Replacing its weights raises half-way."""
        self._engine._llm._engine.collective_rpc = _break

    @concurrent_endpoint
    async def hang_engine(self) -> None:
        """Its next step does not end."""
        self._engine._llm._engine.step = _hang


def _break(*_: Any, **__: Any) -> None:
    raise RuntimeError("it broke")


def _hang() -> None:
    time.sleep(3600)
