"""Which worker a session lives in: its id says so, whoever drew it."""

import zlib
from collections.abc import Callable
from uuid import uuid4


def worker_of(session_id: str, workers: int) -> int:
    """Return the index of a session's worker."""
    return zlib.crc32(session_id.encode(errors="surrogatepass")) % workers


def ids_of(worker: int, workers: int) -> Callable[[], str]:
    """Return what draws ids of one worker; on average it takes as many uuid4s as there are workers."""

    def draw() -> str:
        while worker_of(drawn := str(uuid4()), workers) != worker:
            pass
        return drawn

    return draw
