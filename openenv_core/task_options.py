"""What a reset of generated tasks can be told, and which task it means."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, Literal, TypeVar, cast

from openenv_core.errors import EnvironmentFailure
from openenv_core.tasks import GeneratedTasks

LevelT = TypeVar("LevelT", bound=StrEnum)

MAX_CALLS: Final = 200

# Seeds that are drawn here must survive a JSON reader whose integers are doubles.
_DRAWN_SEED_BITS: Final = 53


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value that cannot be. The episode before goes on."""


@dataclass(frozen=True, slots=True)
class TaskOptions(Generic[LevelT]):
    """A reset, read.

    Attributes:
        seed: What chose the index; None where that was given.
        level: The difficulty that was asked for; None leaves it to the task.
        max_calls: After how many calls the episode ends.
    """

    seed: int | None
    split: Literal["train", "validation", "test"]
    index: int
    level: LevelT | None
    max_calls: int


def read_task_options(
    tasks: type[GeneratedTasks],
    levels: type[LevelT],
    default_calls: int,
    *,
    seed: Any,
    episode_id: Any,
    split: Any,
    index: Any,
    difficulty: Any,
    max_calls: Any,
    unknown: Mapping[str, Any],
) -> TaskOptions[LevelT]:
    """Check the options of a reset and choose its task.

    Args:
        tasks: Of the usual three splits.
        levels: The difficulties that there are.
        default_calls: How many calls an episode has, unless reset says otherwise.
        seed: Chooses the task where `index` does not; None draws one.
        episode_id: Text, or None.
        split: One of those of `tasks`; None is train.
        index: The task of the split.
        difficulty: One of the levels, or None.
        max_calls: 1 to `MAX_CALLS`, or None.
        unknown: Whatever else came.

    Raises:
        InvalidResetOption: One of them is not what it may be.
    """
    if unknown:
        raise InvalidResetOption(
            "expected no reset options but seed, episode_id, split, index, difficulty and max_calls, "
            f"got {', '.join(sorted(unknown))[:200]}; leave it out"
        )
    if episode_id is not None and not isinstance(episode_id, str):
        raise InvalidResetOption(f"expected text or null for the episode_id, got {episode_id!r:.40}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InvalidResetOption(f"expected an integer >= 0 or null for the seed, got {seed!r:.40}")
    if difficulty is not None and (not isinstance(difficulty, str) or difficulty not in set(levels)):
        known = ", ".join(levels)
        raise InvalidResetOption(f"expected {known} or null for the difficulty, got {difficulty!r:.40}")
    calls = default_calls if max_calls is None else max_calls
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
    level = None if difficulty is None else levels(difficulty)
    return TaskOptions(seed, cast(Literal["train", "validation", "test"], split), index, level, calls)
