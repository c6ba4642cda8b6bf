"""Further attempts at what failed by no fault of the policy's."""

import asyncio
from typing import Final

BACKOFF_S: Final = 0.1
"""Before the second attempt; doubles with each further one."""


async def back_off(failed: int) -> None:
    """Wait before the next attempt, where so many have failed; at least one."""
    await asyncio.sleep(BACKOFF_S * 2 ** (failed - 1))
