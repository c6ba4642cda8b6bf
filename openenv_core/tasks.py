"""Environments whose episodes come from a data set, or from a generator of tasks."""

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar, cast

from openenv_core.errors import EnvironmentFailureError

LISTED: Final = 20
"""Generated tasks that `list_tasks` returns at most."""

RANGE: Final = 200
"""Generated tasks that `get_task_range` returns at most."""


class TaskProvider(Protocol):
    """What an environment may offer beside `reset` and `step`, so that callers can look for tasks.

    Nothing is inherited: an environment that has these methods, `def` or `async def`, answers the task routes of
    its server; a route whose method is missing answers 501. They are called on an instance that was not reset and
    is closed afterwards, so they must not depend on an episode. The chosen task goes to `reset` as options:
    `reset(split="train", index=12)`.
    """

    def list_splits(self) -> Sequence[Any]:
        """Return the splits: names, or mappings or models with `name` and `type` (train, validation or test)."""

    def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, or the first of them where there are very many."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks the split has."""

    def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            IndexError: The split has no such index.
        """

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Sequence[Any]:
        """Return the tasks from `start` to before `stop`, with the meaning that a slice gives them."""


class GeneratedTasks:
    """The methods of `TaskProvider` for an environment that makes tasks from numbers, to be inherited beside its own.

    Each split has numbers of its own, one after the other, so no task is in two of them.

    Attributes:
        SPLITS: How many tasks each split has. To change these numbers is to change which tasks there are.
    """

    SPLITS: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"train": 1_000_000, "validation": 10_000, "test": 10_000}
    )

    @abstractmethod
    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        """Return what may be told of a task; `split` and `index` are there."""

    @classmethod
    def split_size(cls, split: object) -> int:
        """Return how many tasks a split has.

        Raises:
            KeyError: There is no such split.
        """
        if not isinstance(split, str) or split not in cls.SPLITS:
            raise KeyError(f"expected a split ({', '.join(cls.SPLITS)}), got {split!r:.40}")
        return cls.SPLITS[split]

    @classmethod
    def task_number(cls, split: str, index: int) -> int:
        """Return the number that a task is made from.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
        """
        size = cls.split_size(split)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            raise IndexError(
                f"expected an index from 0 to {size - 1} of the split {split!r}, got {index!r:.40}"
            )
        names = list(cls.SPLITS)
        return sum(cls.SPLITS[name] for name in names[: names.index(split)]) + index

    def list_splits(self) -> Sequence[Any]:
        """Return the splits with their types: one of another name than the usual counts as validation."""
        usual = ("train", "validation", "test")
        return [{"name": name, "type": name if name in usual else "validation"} for name in self.SPLITS]

    def num_tasks(self, split: str) -> int:
        """Return how many tasks the split has.

        Raises:
            KeyError: There is no such split.
        """
        return self.split_size(split)

    def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the first tasks of a split."""
        return self.get_task_range(split, 0, LISTED)

    def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
        """
        self.task_number(split, index)
        return {"split": split, "index": index, **self.describe_task(split, index)}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Sequence[Any]:
        """Return the tasks from `start` to before `stop`, with the meaning that a slice gives them.

        Raises:
            KeyError: There is no such split.
            ValueError: They are more than `RANGE`.
        """
        indices = range(self.split_size(split))[start:stop]
        if len(indices) > RANGE:
            raise ValueError(
                f"expected at most {RANGE} tasks at once, got {len(indices)}; ask for them in parts"
            )
        return [self.get_task(split, index) for index in indices]


LevelT = TypeVar("LevelT", bound=StrEnum)

MAX_CALLS: Final = 200

# Seeds that are drawn here must survive a JSON reader whose integers are doubles.
_DRAWN_SEED_BITS: Final = 53


class InvalidResetOptionError(EnvironmentFailureError):
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
        InvalidResetOptionError: One of them is not what it may be.
    """
    if unknown:
        raise InvalidResetOptionError(
            "expected no reset options but seed, episode_id, split, index, difficulty and max_calls, "
            f"got {', '.join(sorted(unknown))[:200]}; leave it out"
        )
    if episode_id is not None and not isinstance(episode_id, str):
        raise InvalidResetOptionError(f"expected text or null for the episode_id, got {episode_id!r:.40}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InvalidResetOptionError(f"expected an integer >= 0 or null for the seed, got {seed!r:.40}")
    if difficulty is not None and (not isinstance(difficulty, str) or difficulty not in set(levels)):
        known = ", ".join(levels)
        raise InvalidResetOptionError(f"expected {known} or null for the difficulty, got {difficulty!r:.40}")
    calls = default_calls if max_calls is None else max_calls
    if isinstance(calls, bool) or not isinstance(calls, int) or not 1 <= calls <= MAX_CALLS:
        raise InvalidResetOptionError(
            f"expected 1 to {MAX_CALLS} or null for max_calls, got {max_calls!r:.40}"
        )
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
        raise InvalidResetOptionError(str(error.args[0])) from None
    level = None if difficulty is None else levels(difficulty)
    return TaskOptions(seed, cast(Literal["train", "validation", "test"], split), index, level, calls)
