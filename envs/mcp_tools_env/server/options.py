"""The reset options, and the budget of an episode."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from openenv_core.tasks import InvalidResetOptionError, read_reset

from .config import McpToolsSettings

MAX_PATTERNS: Final = 256
MAX_PATTERN_CHARS: Final = 128

_Patterns: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)]], Field(max_length=MAX_PATTERNS)
]


class ResetOptions(BaseModel):
    """The options of one reset, without seed and episode_id.

    Attributes:
        servers: The names of the servers to use, in the order of the configuration.
        allow: Glob patterns of the tools to offer, by the names under which they are offered.
        deny: Glob patterns of the tools not to offer; takes precedence over `allow`.
        calls: The maximum number of calls.
        time_s: The maximum duration of the episode in seconds.
        transcript: Whether to record the calls in the state.
    """

    model_config = ConfigDict(extra="forbid")

    servers: Annotated[list[str], Field(min_length=1)]
    allow: _Patterns = ["*"]
    deny: _Patterns = []
    calls: Annotated[StrictInt, Field(ge=0)]
    time_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
    transcript: StrictBool = True


def read_options(options: Mapping[str, Any], settings: McpToolsSettings) -> ResetOptions:
    """Validate the options of a reset; None selects the server's default.

    Raises:
        InvalidResetOptionError: An option is unknown or has an invalid value.
    """
    servers = list(settings.servers)
    parsed = read_reset(ResetOptions, options, servers=servers, calls=settings.calls, time_s=settings.time_s)
    if unknown := sorted(set(parsed.servers) - set(servers)):
        raise InvalidResetOptionError(
            f"expected servers that are configured ({', '.join(servers)}), got {', '.join(unknown)[:200]}"
        )
    for name in ("calls", "time_s"):
        if getattr(parsed, name) > (limit := getattr(settings, name)):
            raise InvalidResetOptionError(
                f"expected at most {limit:g}, which is what the server allows, for the reset option {name}, got "
                f"{getattr(parsed, name):g}"
            )
    return parsed.model_copy(update={"servers": [name for name in servers if name in parsed.servers]})


class Budget:
    """The budget of calls and time of an episode; the time runs from its creation."""

    def __init__(self, calls: int, time_s: float) -> None:
        self._calls = calls
        self._time_s = time_s
        self._start = time.monotonic()
        self.calls_made = 0

    @property
    def calls_left(self) -> int:
        """The number of calls left."""
        return self._calls - self.calls_made

    def elapsed_s(self) -> float:
        """Return the seconds since the budget was created."""
        return time.monotonic() - self._start

    def time_left_s(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self._time_s - self.elapsed_s())

    def find_exhausted(self) -> Literal["calls", "time"] | None:
        """Return which part of the budget is used up; None if neither is."""
        if self.calls_left <= 0:
            return "calls"
        return "time" if self.time_left_s() <= 0 else None

    def describe_exhausted(self, limit: Literal["calls", "time"]) -> str:
        """Return the message that a part of the budget is used up."""
        if limit == "calls":
            return f"the episode's {self._calls} calls are used up; it has ended"
        return f"the episode's {self._time_s:g} s are used up; it has ended"
