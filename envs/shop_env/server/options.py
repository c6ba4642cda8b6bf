"""What a reset can be told, and which task it means."""

import secrets
from dataclasses import dataclass
from typing import Any, Final, cast

from openenv_core.tasks import GeneratedTasks

from ..errors import InvalidResetOption
from ..models import Split
from ..tasks import CALLS, Level

MAX_CALLS: Final = 200

# Seeds that are drawn here must survive a JSON reader whose integers are doubles.
_DRAWN_SEED_BITS: Final = 53


@dataclass(frozen=True, slots=True)
class Options:
    """A reset, read.

    Attributes:
        seed: What chose the index; None where that was given.
    """

    seed: int | None
    split: Split
    index: int
    level: Level | None
    max_calls: int


def read_options(
    tasks: type[GeneratedTasks], *, seed: Any, split: Any, index: Any, difficulty: Any, max_calls: Any
) -> Options:
    """Check the options of a reset and choose its task.

    Raises:
        InvalidResetOption: One of them is not what it may be.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InvalidResetOption(f"expected an integer >= 0 or null for the seed, got {seed!r:.40}")
    if difficulty is not None and (not isinstance(difficulty, str) or difficulty not in set(Level)):
        known = ", ".join(Level)
        raise InvalidResetOption(f"expected {known} or null for the difficulty, got {difficulty!r:.40}")
    calls = CALLS if max_calls is None else max_calls
    if isinstance(calls, bool) or not isinstance(calls, int) or not 1 <= calls <= MAX_CALLS:
        raise InvalidResetOption(f"expected 1 to {MAX_CALLS} or null for max_calls, got {max_calls!r:.40}")
    split = "train" if split is None else split
    try:
        size = tasks.split_size(split)
        if index is None:
            seed = secrets.randbits(_DRAWN_SEED_BITS) if seed is None else seed
            index = seed % size
        else:
            seed = None
            tasks.task_number(split, index)
    except (KeyError, IndexError) as error:
        raise InvalidResetOption(str(error.args[0])) from None
    level = None if difficulty is None else Level(difficulty)
    return Options(seed, cast(Split, split), index, level, calls)
