"""Further attempts at what failed by no fault of the policy's."""

import asyncio
from typing import Final

BACKOFF_S: Final = 0.1
"""Before the second attempt; doubles with each further one."""
MAX_BACKOFF_S: Final = 5.0
"""Before any attempt at most."""


async def back_off(failed: int) -> None:
    """Wait before the next attempt, where so many have failed; at least one."""
    doublings = min(failed - 1, 32)  # far beyond the bound; a thousand would be beyond what a float can be
    await asyncio.sleep(min(BACKOFF_S * 2**doublings, MAX_BACKOFF_S))
