"""What a server can be told from outside: by its environment variables, or by `ropewalk serve`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from openenv_core.errors import ConfigurationError

Mode: TypeAlias = Literal["simulation", "production"]

MODES = ("simulation", "production")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one server.

    Attributes:
        tokens: Bearer tokens, any of which lets a caller in; none: no token is asked for.
        allowed_hosts: Values of Host that are served; `*` is any.
        allowed_origins: Values of Origin that are served; `*` is any.
        max_body_bytes: The greatest body of an HTTP request.
        body_timeout_s: Seconds within which the whole body has to arrive.
        max_sessions: The cap on sessions; None leaves it to `create_app`.
        max_sessions_per_token: The cap on the sessions of one token; None: only the cap of all.
        step_timeout_s: Seconds that a reset, a step, a read of the state or a constructor may take before its
            session is ended; None: no bound.
        idle_timeout_s: Seconds that a session without a socket may go unused.
        send_timeout_s: Seconds that a client may leave its replies unread.
        drain_s: Seconds that sessions get to end when the server is asked to stop.
        mode: `production` serves no reset, step or state.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_sessions: int | None = None
    max_sessions_per_token: int | None = None
    step_timeout_s: float | None = 300.0
    idle_timeout_s: float = 900.0
    send_timeout_s: float = 30.0
    drain_s: float = 8.0
    mode: Mode = "simulation"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ServerSettings":
        """Read the settings from environment variables; those that are absent or empty keep their defaults.

        Raises:
            ConfigurationError: A value cannot be read.
        """
        found: dict[str, Any] = {}
        for variable, (name, read) in _VARIABLES.items():
            if value := environ.get(variable, "").strip():
                found[name] = read(variable, value)
        tokens = _words("ROPEWALK_TOKENS", environ.get("ROPEWALK_TOKENS", ""))
        if path := environ.get("ROPEWALK_TOKEN_FILE", "").strip():
            tokens += _lines("ROPEWALK_TOKEN_FILE", path)
        return cls(tokens=tokens, **found)


def _words(_: str, value: str) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split())


def _lines(variable: str, path: str) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"expected {variable} to name a readable file, got: {error}") from None
    return tuple(line for line in lines if line and not line.startswith("#"))


def _count(variable: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigurationError(f"expected {variable} to be a whole number of at least 1, got {value!r}")
    return int(value)


def _seconds(variable: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"expected {variable} to be a number of seconds, got {value!r}")
    return seconds


def _seconds_or_none(variable: str, value: str) -> float | None:
    return _seconds(variable, value) or None


def _mode(variable: str, value: str) -> Mode:
    mode = value.lower()
    if mode not in MODES:
        raise ConfigurationError(f"expected {variable} to be one of {', '.join(MODES)}, got {value!r}")
    return cast(Mode, mode)


_VARIABLES: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "ROPEWALK_ALLOWED_HOSTS": ("allowed_hosts", _words),
    "ROPEWALK_ALLOWED_ORIGINS": ("allowed_origins", _words),
    "ROPEWALK_MAX_BODY_BYTES": ("max_body_bytes", _count),
    "ROPEWALK_MAX_SESSIONS": ("max_sessions", _count),
    "ROPEWALK_MAX_SESSIONS_PER_TOKEN": ("max_sessions_per_token", _count),
    "ROPEWALK_STEP_TIMEOUT": ("step_timeout_s", _seconds_or_none),
    "ROPEWALK_IDLE_TIMEOUT": ("idle_timeout_s", _seconds),
    "ROPEWALK_DRAIN": ("drain_s", _seconds),
    "OPENENV_MODE": ("mode", _mode),
}
