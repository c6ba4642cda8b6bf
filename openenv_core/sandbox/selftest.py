"""The start-up self-test: a level is what a few attacks have failed against, not what the kernel says it offers."""

from typing import TYPE_CHECKING

from openenv_core.sandbox.levels import Isolation

if TYPE_CHECKING:
    from openenv_core.sandbox.sandbox import Sandbox


async def prove(sandbox: "Sandbox", isolation: Isolation) -> None:
    """TODO."""
