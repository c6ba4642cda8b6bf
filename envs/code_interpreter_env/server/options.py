"""The reset options: limits, packages, files, snapshot and task."""

import asyncio
import base64
import binascii
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StrictBool

from openenv_core.sandbox import Limits, LimitsError
from openenv_core.tasks import InvalidResetOptionError, read_reset

from ..grading import JsonlTasks, Task
from ..models import MAX_PATH_CHARS
from ..tasks import SHIPPED as SHIPPED_TASKS
from .settings import NO_TASKS, PREFIX, SHIPPED, InterpreterSettings


def _check_path(path: str) -> str:
    """Reject paths that no interpreter accepts, while the previous episode can still continue."""
    parts = path.split("/")
    if len(path) > MAX_PATH_CHARS or "\0" in path or any(name in ("", ".", "..") for name in parts):
        raise ValueError("expected paths relative to the workspace, such as data/input.csv")
    return path


def _read_content(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if (
        isinstance(value, Mapping)
        and [*value] == ["content_base64"]
        and isinstance(value["content_base64"], str)
    ):
        try:
            return base64.b64decode(value["content_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"expected base64, got: {error}") from None
    raise ValueError(f'expected text or {{"content_base64": ...}}, got {type(value).__name__}')


class _RawOptions(BaseModel):
    """The reset options as the caller gives them, without seed and episode_id."""

    model_config = ConfigDict(extra="forbid")

    packages: list[str] | None = None
    limits: dict[str, Any] = {}
    files: dict[
        Annotated[str, AfterValidator(_check_path)], Annotated[bytes, BeforeValidator(_read_content)]
    ] = {}
    snapshot: StrictBool = False
    task: Any = None
    split: Any = None
    index: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetChoice:
    """The validated options of one reset.

    Attributes:
        packages: Packages to preload.
        limits: Limits of the session.
        files: Content by path of the files to put into the workspace.
        snapshot: Whether to keep the state from before an execution that had to be killed.
        task: The requested task: an id, or a mapping with split and index; None for no task.
    """

    packages: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    files: Mapping[str, bytes] = field(default_factory=dict)
    snapshot: bool = False
    task: Any = None


def read_options(options: Mapping[str, Any], settings: InterpreterSettings) -> ResetChoice:
    """Validate the options of a reset; None selects the server's default.

    Raises:
        InvalidResetOptionError: An option is unknown or has an invalid value.
    """
    raw = read_reset(_RawOptions, options)
    try:
        limits = settings.limits.changed(raw.limits).within(settings.ceilings)
    except LimitsError as error:
        raise InvalidResetOptionError(f"reset option limits: {error}") from None
    _check_files(raw.files, limits)
    packages = settings.preload if raw.packages is None else tuple(sorted(set(raw.packages)))
    if unknown := sorted(set(packages) - set(settings.packages)):
        raise InvalidResetOptionError(
            f"expected packages that this server preloads ({', '.join(settings.packages) or 'none'}), got "
            f"{', '.join(unknown)[:200]}; leave it out, what is installed can be imported without"
        )
    if raw.snapshot and not settings.max_snapshot:
        raise InvalidResetOptionError(
            "expected no snapshot, which this server does not keep, got snapshot=true; leave it out, or set "
            f"{PREFIX}MAX_SNAPSHOT=true where the server runs"
        )
    # A task is given either by the option `task`, or by split and index as in the task routes.
    position = {name: value for name in ("split", "index") if (value := getattr(raw, name)) is not None}
    if position and raw.task is not None:
        raise InvalidResetOptionError(
            "expected the reset option task, or split and index, got both; leave one of them out"
        )
    return ResetChoice(
        packages=packages, limits=limits, files=raw.files, snapshot=raw.snapshot, task=position or raw.task
    )


def _check_files(files: Mapping[str, bytes], limits: Limits) -> None:
    sizes = [len(content) for content in files.values()]
    for name, got in (
        ("files", len(sizes)),
        ("file_bytes", max(sizes, default=0)),
        ("disk_bytes", sum(sizes)),
    ):
        if got > (limit := getattr(limits, name)):
            raise InvalidResetOptionError(
                f"expected files within the limit {name} of {limit}, got {got}; leave some out, or raise the limit"
            )


def open_tasks(source: str) -> JsonlTasks | None:
    """Return the tasks that the settings name; None if they are disabled.

    Raises:
        ConfigurationError: There is no such folder or file.
    """
    if source == NO_TASKS:
        return None
    return JsonlTasks(SHIPPED_TASKS if source == SHIPPED else Path(source))


async def choose_task(tasks: JsonlTasks | None, option: Any, seed: int | None) -> Task:
    """Return the task that a reset requests.

    Args:
        tasks: The server's tasks; None if it has none.
        option: An id, or a mapping with `split` and optionally `index` or `id`.
        seed: Chooses a task of the split if the option does not; None chooses at random.

    Raises:
        InvalidResetOptionError: There is no such task.
    """
    if tasks is None:
        raise InvalidResetOptionError(
            "expected a server with tasks for the reset option task, got one without; set CODE_INTERPRETER_TASKS "
            "where it is started"
        )
    try:
        return await asyncio.to_thread(_find_task, tasks, option, seed)  # it reads files
    except (KeyError, IndexError) as error:
        raise InvalidResetOptionError(f"reset option task: {error.args[0]}") from None


def _find_task(tasks: JsonlTasks, option: Any, seed: int | None) -> Task:
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
