"""What a reset may ask for: limits, packages, a task."""

import asyncio
import base64
import binascii
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox import Limits, LimitsError

from ..grading import JsonlTasks, Task
from ..models import MAX_PATH_CHARS, InvalidResetOptionError
from ..tasks import SHIPPED as SHIPPED_TASKS
from .settings import NO_TASKS, PREFIX, SHIPPED, InterpreterSettings

NAMES: Final = ("packages", "limits", "files", "snapshot", "task", "split", "index")
"""The options beside seed and episode_id."""

_CONTENT: Final = "content_base64"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetChoice:
    """What one reset asked for.

    Attributes:
        packages: Imported beforehand.
        limits: Of the session.
        files: Content by path, put into the workspace.
        snapshot: Keeps the state of before an execution that had to be killed.
        task: As it was asked for: an id, or a mapping of split and index; None: no task.
    """

    packages: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    files: Mapping[str, bytes] = field(default_factory=dict)
    snapshot: bool = False
    task: Any = None


def read_options(options: Mapping[str, Any], settings: InterpreterSettings) -> ResetChoice:
    """Read the options of a reset; None leaves one to the server.

    Raises:
        InvalidResetOptionError: One that does not exist, or a value that cannot be.
    """
    if unknown := sorted(set(options) - set(NAMES)):
        raise InvalidResetOptionError(
            f"expected no reset options but seed, episode_id, {', '.join(NAMES)}, got {', '.join(unknown)}; "
            "leave it out"
        )
    given = {name: value for name, value in options.items() if value is not None}
    limits = _limits(given.get("limits", {}), settings)
    return ResetChoice(
        packages=_packages(given["packages"], settings) if "packages" in given else settings.preload,
        limits=limits,
        files=_files(given.get("files", {}), limits),
        snapshot=_snapshot(given, settings),
        task=_task(given),
    )


def _snapshot(given: Mapping[str, Any], settings: InterpreterSettings) -> bool:
    wanted = _flag("snapshot", given.get("snapshot", False))
    if wanted and not settings.max_snapshot:
        raise InvalidResetOptionError(
            "expected no snapshot, which this server does not keep, got snapshot=true; leave it out, or set "
            f"{PREFIX}MAX_SNAPSHOT=true where the server runs"
        )
    return wanted


def _task(given: Mapping[str, Any]) -> Any:
    """Return the task that is asked for, by itself or as the task routes count them."""
    place = {name: given[name] for name in ("split", "index") if name in given}
    if place and "task" in given:
        raise InvalidResetOptionError(
            "expected the reset option task, or split and index, got both; leave one of them out"
        )
    return place or given.get("task")


def _limits(value: Any, settings: InterpreterSettings) -> Limits:
    if not isinstance(value, Mapping):
        raise InvalidResetOptionError(
            f"expected limits by name for the reset option limits, got {value!r:.80}; "
            'give for example {"timeout_s": 5}'
        )
    try:
        return settings.limits.changed(value).within(settings.ceilings)
    except LimitsError as error:
        raise InvalidResetOptionError(f"reset option limits: {error}") from None


def _packages(value: Any, settings: InterpreterSettings) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InvalidResetOptionError(
            f"expected a list of names for the reset option packages, got {value!r:.80}"
        )
    if unknown := sorted(set(value) - set(settings.packages)):
        raise InvalidResetOptionError(
            f"expected packages that this server preloads ({', '.join(settings.packages) or 'none'}), got "
            f"{', '.join(unknown)[:200]}; leave it out, what is installed can be imported without"
        )
    return tuple(sorted(set(value)))


def _files(value: Any, limits: Limits) -> dict[str, bytes]:
    if not isinstance(value, Mapping):
        raise InvalidResetOptionError(
            f"expected content by path for the reset option files, got {value!r:.80}"
        )
    found = {_path(path): _content(path, content) for path, content in value.items()}
    sizes = [len(content) for content in found.values()]
    for name, got in (
        ("files", len(found)),
        ("file_bytes", max(sizes, default=0)),
        ("disk_bytes", sum(sizes)),
    ):
        if got > (most := getattr(limits, name)):
            raise InvalidResetOptionError(
                f"expected files within the limit {name} of {most}, got {got}; leave some out, or raise the limit"
            )
    return found


def _path(path: Any) -> str:
    """Refuse what no interpreter would take, before the episode before is ended."""
    if (
        not isinstance(path, str)
        or not 0 < len(path) <= MAX_PATH_CHARS
        or path.startswith("/")
        or "\0" in path
        or any(part in ("", ".", "..") for part in path.split("/"))
    ):
        raise InvalidResetOptionError(
            "expected paths relative to the workspace, such as data/input.csv, in the reset option files, got "
            f"{path!r:.80}"
        )
    return path


def _content(path: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Mapping) and set(value) == {_CONTENT} and isinstance(value[_CONTENT], str):
        try:
            return base64.b64decode(value[_CONTENT], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidResetOptionError(
                f"expected base64 for the file {path!r:.80}, got: {error}"
            ) from None
    raise InvalidResetOptionError(
        f'expected text or {{"{_CONTENT}": ...}} for the file {path!r:.80}, got {type(value).__name__}'
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidResetOptionError(
            f"expected true or false for the reset option {name}, got {value!r:.80}"
        )
    return value


def open_tasks(source: str) -> JsonlTasks | None:
    """Return the tasks that the settings name; None where there are to be none.

    Raises:
        ConfigurationError: There is no such folder or file.
    """
    if source == NO_TASKS:
        return None
    return JsonlTasks(SHIPPED_TASKS if source == SHIPPED else Path(source))


async def choose_task(tasks: JsonlTasks | None, option: Any, seed: int | None) -> Task:
    """Return the task that a reset means.

    Args:
        tasks: All that there are; None where the server has none.
        option: An id; or a mapping with `split`, and `index` or `id`, or neither of them.
        seed: Chooses one of the split where the option does not; None chooses at random.

    Raises:
        InvalidResetOptionError: There is no such task.
    """
    if tasks is None:
        raise InvalidResetOptionError(
            "expected a server with tasks for the reset option task, got one without; set CODE_INTERPRETER_TASKS "
            "where it is started"
        )
    try:
        return await asyncio.to_thread(_find, tasks, option, seed)  # it reads files
    except (KeyError, IndexError) as error:
        raise InvalidResetOptionError(f"reset option task: {error.args[0]}") from None


def _find(tasks: JsonlTasks, option: Any, seed: int | None) -> Task:
    if isinstance(option, str):
        for split in tasks.splits:
            try:
                return tasks.task(split, tasks.find(split, option))
            except KeyError:
                continue
        raise KeyError(f"expected the id of a task, got {option!r:.80}")
    if (
        not isinstance(option, Mapping)
        or not set(option) <= {"split", "index", "id"}
        or "split" not in option
    ):
        raise InvalidResetOptionError(
            f'expected an id, or a mapping such as {{"split": "train", "index": 3}}, for the reset option task, got '
            f"{option!r:.80}"
        )
    split = option["split"]
    if "id" in option:
        return tasks.task(split, tasks.find(split, option["id"]))
    if "index" in option:
        return tasks.task(split, option["index"])
    return tasks.task(split, random.Random(seed).randrange(tasks.num_tasks(split)))
