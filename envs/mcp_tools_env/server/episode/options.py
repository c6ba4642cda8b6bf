"""What a reset may ask for, and what an episode may cost."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ...models import InvalidResetOptionError
from ..config import McpToolsSettings

NAMES: Final = ("servers", "allow", "deny", "calls", "time_s", "transcript")
"""The options beside seed and episode_id."""

MAX_PATTERNS: Final = 256
MAX_PATTERN_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetChoice:
    """What one reset asked for.

    Attributes:
        servers: Names of those that play, in the order of the configuration.
        allow: Patterns of the names that tools are offered under; the others are not.
        deny: Patterns of those that are not, allowed or not.
        calls: How many the episode has.
        time_s: How long it may take.
        transcript: Calls are kept for the state.
    """

    servers: tuple[str, ...]
    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    calls: int
    time_s: float
    transcript: bool = True


def chosen(options: Mapping[str, Any], settings: McpToolsSettings) -> ResetChoice:
    """Read the options of a reset; None leaves one to the server.

    Raises:
        InvalidResetOptionError: One that does not exist, or a value that cannot be.
    """
    if unknown := sorted(set(options) - set(NAMES)):
        raise InvalidResetOptionError(
            f"expected no reset options but seed, episode_id, {', '.join(NAMES)}, got "
            f"{', '.join(unknown)[:200]}; commands and addresses are the server's configuration alone"
        )
    given = {name: value for name, value in options.items() if value is not None}
    return ResetChoice(
        servers=_servers(given.get("servers"), settings),
        allow=_patterns("allow", given.get("allow", ["*"])),
        deny=_patterns("deny", given.get("deny", [])),
        calls=_calls(given.get("calls", settings.calls), settings.calls),
        time_s=_time(given.get("time_s", settings.time_s), settings.time_s),
        transcript=_flag("transcript", given.get("transcript", True)),
    )


def _servers(value: Any, settings: McpToolsSettings) -> tuple[str, ...]:
    there = tuple(settings.servers)
    if value is None:
        return there
    if not _is_words(value) or not value:
        raise InvalidResetOptionError(
            f"expected a list of names for the reset option servers, got {value!r:.80}"
        )
    if unknown := sorted(set(value) - set(there)):
        raise InvalidResetOptionError(
            f"expected servers that are configured ({', '.join(there)}), got {', '.join(unknown)[:200]}"
        )
    return tuple(name for name in there if name in value)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    if (
        not _is_words(value)
        or len(value) > MAX_PATTERNS
        or any(len(one) > MAX_PATTERN_CHARS for one in value)
    ):
        raise InvalidResetOptionError(
            f"expected a list of at most {MAX_PATTERNS} patterns of tool names for the reset option {name}, such as "
            f'["read_*"], got {value!r:.80}'
        )
    return tuple(value)


def _calls(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidResetOptionError(
            f"expected a whole number from 0 to {most}, which is what the server allows, for the reset option calls, "
            f"got {value!r:.80}"
        )
    return value


def _time(value: Any, most: float) -> float:
    if type(value) not in (int, float) or not 0 < value <= most:
        raise InvalidResetOptionError(
            f"expected seconds above 0, at most {most:g}, which is what the server allows, for the reset option "
            f"time_s, got {value!r:.80}"
        )
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidResetOptionError(
            f"expected true or false for the reset option {name}, got {value!r:.80}"
        )
    return value


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


class Budget:
    """Counts from its making on.

    Args:
        calls: How many there are.
        time_s: How long the episode may take.

    Attributes:
        made: How many calls were made.
    """

    def __init__(self, calls: int, time_s: float) -> None:
        self._calls = calls
        self._time_s = time_s
        self._began = time.monotonic()
        self.made = 0

    @property
    def calls_left(self) -> int:
        """How many calls there are left."""
        return self._calls - self.made

    def elapsed_s(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began

    def time_left_s(self) -> float:
        """Return how many seconds there are left; 0 where none are."""
        return max(0.0, self._time_s - self.elapsed_s())

    def spent(self) -> Literal["calls", "time"] | None:
        """Return which part of it is used up."""
        if self.calls_left <= 0:
            return "calls"
        return "time" if self.time_left_s() <= 0 else None

    def describe_spent(self, spent: Literal["calls", "time"]) -> str:
        """Return which part is used up, in words."""
        if spent == "calls":
            return f"the episode's {self._calls} calls are used up; it has ended"
        return f"the episode's {self._time_s:g} s are used up; it has ended"
