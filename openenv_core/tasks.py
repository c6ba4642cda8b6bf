"""Environments whose episodes come from a data set or a task generator."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from openenv_core.errors import EnvironmentFailureError, describe_faults

ModelT = TypeVar("ModelT", bound=BaseModel)

SPLITS: Final = ("train", "validation", "test")
"""The usual names of splits."""


class TaskProvider(Protocol):
    """Optional methods of an environment, through which callers find tasks.

    Do not subclass: the task routes of a server call these methods, `def` or `async def`, on any environment that has
    them, and return 501 for a missing one. They are called on an instance that was not reset and is closed
    afterwards, so they must not depend on an episode. Callers pass the chosen task to `reset` as options:
    `reset(split="train", index=12)`.
    """

    def list_splits(self) -> Sequence[Any]:
        """Return the splits: names, or mappings or models with `name` and `type` (train, validation or test)."""

    def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, or the first ones if there are very many."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks the split has."""

    def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            IndexError: The split has no such index.
        """

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Sequence[Any]:
        """Return the tasks of the slice `[start:stop]`."""


class IndexedTasks(ABC):
    """A mixin with the methods of `TaskProvider` for tasks that have a split and an index.

    Attributes:
        LISTED: Maximum number of tasks that `list_tasks` returns.
        RANGE: Maximum number of tasks that `get_task_range` returns.
    """

    LISTED: ClassVar[int] = 100
    RANGE: ClassVar[int] = 1000

    @property
    @abstractmethod
    def splits(self) -> Sequence[str]:
        """The names of the splits."""

    @abstractmethod
    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has.

        Raises:
            KeyError: There is no such split.
        """

    @abstractmethod
    def get_task(self, split: str, index: int) -> Any:
        """Return the public description of a task.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
        """

    def list_splits(self) -> Sequence[Any]:
        """Return the splits with their types; a split with an unusual name has the type validation."""
        return [{"name": name, "type": name if name in SPLITS else "validation"} for name in self.splits]

    def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the first tasks of a split."""
        return self.get_task_range(split, 0, self.LISTED)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Sequence[Any]:
        """Return the tasks of the slice `[start:stop]`.

        Raises:
            KeyError: There is no such split.
            ValueError: The slice has more than `RANGE` tasks.
        """
        indices = range(self.num_tasks(split))[start:stop]
        if len(indices) > self.RANGE:
            raise ValueError(f"expected at most {self.RANGE} tasks at once, got {len(indices)}; ask in parts")
        return [self.get_task(split, index) for index in indices]


class GeneratedTasks(IndexedTasks):
    """A mixin with the methods of `TaskProvider` for an environment that generates each task from a number.

    Each split has a consecutive range of numbers of its own, so no task is in two splits.

    Attributes:
        SPLITS: Number of tasks per split. Changing these changes the tasks.
    """

    LISTED = 20
    RANGE = 200
    SPLITS: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"train": 1_000_000, "validation": 10_000, "test": 10_000}
    )

    @abstractmethod
    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        """Return the public description of a task; `split` and `index` are valid."""

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        return list(self.SPLITS)

    @classmethod
    def num_tasks(cls, split: object) -> int:
        """Return how many tasks a split has.

        Raises:
            KeyError: There is no such split.
        """
        if not isinstance(split, str) or split not in cls.SPLITS:
            raise KeyError(f"expected a split ({', '.join(cls.SPLITS)}), got {split!r:.40}")
        return cls.SPLITS[split]

    @classmethod
    def task_number(cls, split: str, index: int) -> int:
        """Return the number that a task is generated from.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
        """
        size = cls.num_tasks(split)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            raise IndexError(f"expected an index below {size} of the split {split!r}, got {index!r:.40}")
        names = list(cls.SPLITS)
        return sum(cls.SPLITS[name] for name in names[: names.index(split)]) + index

    def get_task(self, split: str, index: int) -> Any:
        """Return one task; see `IndexedTasks`."""
        self.task_number(split, index)
        return {"split": split, "index": index, **self.describe_task(split, index)}


class InvalidResetOptionError(EnvironmentFailureError):
    """Reset got an unknown option or an invalid value. The current episode continues."""


def draw_seed() -> int:
    """Return a random seed of 53 bits, which JSON readers whose numbers are doubles keep exact."""
    return secrets.randbits(53)


def check_reset(known: Sequence[str], unknown: Mapping[str, Any], seed: Any, episode_id: Any) -> None:
    """Check the arguments of a reset.

    Raises:
        InvalidResetOptionError: There are unknown options, the seed is not an integer >= 0, or the id is not text.
    """
    if unknown:
        raise InvalidResetOptionError(
            f"expected no reset options but {', '.join(known[:-1])} and {known[-1]}, got "
            f"{', '.join(sorted(unknown))[:200]}; leave it out"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InvalidResetOptionError(f"expected an integer >= 0 or null for the seed, got {seed!r:.40}")
    if episode_id is not None and not isinstance(episode_id, str):
        raise InvalidResetOptionError(f"expected text or null for the episode_id, got {episode_id!r:.40}")


def read_reset(model: type[ModelT], options: Mapping[str, Any], **defaults: Any) -> ModelT:
    """Validate the options of a reset other than seed and episode_id. None means an option's default.

    Args:
        model: The model whose fields are the options.
        options: The options as received.
        defaults: Defaults that override the model's.

    Raises:
        InvalidResetOptionError: An option is unknown, or a value invalid.
    """
    names = list(model.model_fields)
    check_reset(
        ("seed", "episode_id", *names), {name: None for name in options if name not in names}, None, None
    )
    options_set = {name: value for name, value in options.items() if value is not None}
    try:
        return model.model_validate({**defaults, **options_set})
    except ValidationError as error:
        raise InvalidResetOptionError(f"reset options: {describe_faults(error, 'options')}"[:1000]) from None
