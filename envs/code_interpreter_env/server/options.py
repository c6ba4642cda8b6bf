"""What a reset may ask for, read and held against what the server allows."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.sandbox import Limits, LimitsError

from ..errors import InvalidResetOption
from ..models import MAX_PATH_CHARS
from .settings import PREFIX, InterpreterSettings

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


def chosen(options: Mapping[str, Any], settings: InterpreterSettings) -> ResetChoice:
    """Read the options of a reset; None leaves one to the server.

    Raises:
        InvalidResetOption: One that does not exist, or a value that cannot be.
    """
    if unknown := sorted(set(options) - set(NAMES)):
        raise InvalidResetOption(
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
        raise InvalidResetOption(
            "expected no snapshot, which this server does not keep, got snapshot=true; leave it out, or set "
            f"{PREFIX}MAX_SNAPSHOT=true where the server runs"
        )
    return wanted


def _task(given: Mapping[str, Any]) -> Any:
    """Return the task that is asked for, by itself or as the task routes count them."""
    place = {name: given[name] for name in ("split", "index") if name in given}
    if place and "task" in given:
        raise InvalidResetOption(
            "expected the reset option task, or split and index, got both; leave one of them out"
        )
    return place or given.get("task")


def _limits(value: Any, settings: InterpreterSettings) -> Limits:
    if not isinstance(value, Mapping):
        raise InvalidResetOption(
            f"expected limits by name for the reset option limits, got {value!r:.80}; "
            'give for example {"timeout_s": 5}'
        )
    try:
        return settings.limits.changed(value).within(settings.ceilings)
    except LimitsError as error:
        raise InvalidResetOption(f"reset option limits: {error}") from None


def _packages(value: Any, settings: InterpreterSettings) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InvalidResetOption(f"expected a list of names for the reset option packages, got {value!r:.80}")
    if unknown := sorted(set(value) - set(settings.packages)):
        raise InvalidResetOption(
            f"expected packages that this server preloads ({', '.join(settings.packages) or 'none'}), got "
            f"{', '.join(unknown)[:200]}; leave it out, what is installed can be imported without"
        )
    return tuple(sorted(set(value)))


def _files(value: Any, limits: Limits) -> dict[str, bytes]:
    if not isinstance(value, Mapping):
        raise InvalidResetOption(f"expected content by path for the reset option files, got {value!r:.80}")
    found = {_path(path): _content(path, content) for path, content in value.items()}
    sizes = [len(content) for content in found.values()]
    for name, got in (
        ("files", len(found)),
        ("file_bytes", max(sizes, default=0)),
        ("disk_bytes", sum(sizes)),
    ):
        if got > (most := getattr(limits, name)):
            raise InvalidResetOption(
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
        raise InvalidResetOption(
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
            raise InvalidResetOption(f"expected base64 for the file {path!r:.80}, got: {error}") from None
    raise InvalidResetOption(
        f'expected text or {{"{_CONTENT}": ...}} for the file {path!r:.80}, got {type(value).__name__}'
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidResetOption(f"expected true or false for the reset option {name}, got {value!r:.80}")
    return value
