"""Which of a service's processes one is, told to it by its environment, and what follows for its random numbers."""

import hashlib
import os

VARIABLE = "ROPEWALK_START"
FIRST = "0.0.0"
_SEED_BITS = 31  # what every generator of random numbers takes


def start_of(replica: int, rank: int, before: int) -> str:
    """What a process is told.

    Args:
        replica: Of the service.
        rank: Of the process in the replica.
        before: How often the replica has been started before.
    """
    return f"{replica}.{rank}.{before}"


def own_seed(seed: int) -> int:
    """A seed of this process's own, of the run's.

    Replicas of one seed would draw the same numbers: siblings, which have the same prompt and are spread over them,
    would get the same answers. And one that is started again would draw what it has drawn before. The first process of
    all, and one that is no service's, keeps the run's seed.
    """
    start = os.environ.get(VARIABLE, FIRST)
    if start == FIRST:
        return seed
    digest = hashlib.sha256(f"{seed}/{start}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)
