"""The settings of a server: from environment variables, or from `ropewalk serve`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

from pydantic import TypeAdapter

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token

Mode: TypeAlias = Literal["simulation", "production"]

MODES = ("simulation", "production")

MIN_TOKEN_CHARS = 16

MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
"""What makes a token that nobody guesses."""


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
        max_waiting: How many newcomers may wait for a session at once.
        max_wait_s: The longest that one waits; 0 refuses it at once. Those that cannot be told that they wait, over
            plain HTTP and in the released dialect, are refused sooner, before they would give up by themselves.
        step_timeout_s: Seconds that a reset, a step, a read of the state or a constructor may take before its
            session is ended; None: no bound.
        idle_timeout_s: Seconds that a session without a socket may go unused.
        send_timeout_s: Seconds that a client may leave its replies unread.
        drain_s: Seconds that sessions get to end when the server is asked to stop.
        mode: `production` serves no reset, step or state.
        web: There is a page to play on, at /web.
        metrics: Whether the server counts what it does and tells it at /metrics.
        exposed: Whether callers beyond this machine reach the listening socket; None: not known. What opens the
            socket says so, no variable does.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_sessions: int | None = None
    max_sessions_per_token: int | None = None
    max_waiting: int = 4096
    max_wait_s: float = 3600.0
    step_timeout_s: float | None = 300.0
    idle_timeout_s: float = 900.0
    send_timeout_s: float = 30.0
    drain_s: float = 8.0
    mode: Mode = "simulation"
    web: bool = False
    metrics: bool = True
    exposed: bool | None = None

    def __post_init__(self) -> None:
        """Refuse tokens that can be guessed, or that a header cannot carry.

        Raises:
            ConfigurationError: A token is such; the message does not say which.
        """
        for token in self.tokens:
            if len(token) < MIN_TOKEN_CHARS or not is_bearer_token(token):
                raise ConfigurationError(
                    f"expected tokens of at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces, "
                    f"got one of {len(token)} characters; make one with: {MAKE_TOKEN}"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ServerSettings":
        """Read the settings from environment variables; those that are absent or empty keep their defaults.

        Raises:
            ConfigurationError: A value cannot be read.
        """
        values: dict[str, Any] = {}
        for variable, (name, read) in _VARIABLES.items():
            if value := environ.get(variable, "").strip():
                values[name] = read(variable, value)
        tokens = _split_words("ROPEWALK_TOKENS", environ.get("ROPEWALK_TOKENS", ""))
        if path := environ.get("ROPEWALK_TOKEN_FILE", "").strip():
            tokens += token_lines("ROPEWALK_TOKEN_FILE", path)
        return cls(tokens=tokens, **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """The plan that a serving process gets from the process that starts it.

    Attributes:
        app: What to load.
        options: Options that were given and that only an application of create_app can heed.
        log_level: How much to print.
        settings: The server's settings.
        listener: The descriptor of the socket that callers connect to.
    """

    app: str
    options: tuple[str, ...]
    log_level: str
    settings: ServerSettings = field(repr=False)
    listener: int = -1

    def to_json(self) -> bytes:
        """Return the plan as one line, without its end."""
        return TypeAdapter(type(self)).dump_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the plan that a line holds."""
        return TypeAdapter(cls).validate_json(text)


def _split_words(_: str, value: str) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split())


def token_lines(variable: str, path: str) -> tuple[str, ...]:
    """Read the tokens in a file: one a line, lines that begin with # are comments.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"expected {variable} to name a readable file, got: {error}") from None
    return tuple(line for line in lines if line and not line.startswith("#"))


def count(variable: str, value: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ConfigurationError: It is none.
    """
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigurationError(f"expected {variable} to be a whole number of at least 1, got {value!r}")
    return int(value)


def seconds(variable: str, value: str) -> float:
    """Read a number of seconds.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigurationError(f"expected {variable} to be a number of seconds, got {value!r}")
    return number


def seconds_or_none(variable: str, value: str) -> float | None:
    """Read a number of seconds where 0 means no bound.

    Raises:
        ConfigurationError: It is none.
    """
    return seconds(variable, value) or None


def switch(variable: str, value: str) -> bool:
    """Read a setting that is on or off.

    Raises:
        ConfigurationError: It is neither.
    """
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if value.lower() not in on + off:
        raise ConfigurationError(f"expected {variable} to be 1 or 0, got {value!r}")
    return value.lower() in on


def _mode(variable: str, value: str) -> Mode:
    mode = value.lower()
    if mode not in MODES:
        raise ConfigurationError(f"expected {variable} to be one of {', '.join(MODES)}, got {value!r}")
    return cast(Mode, mode)


def _is_on(_: str, value: str) -> bool:
    """Read a switch of the released server, which takes any other word for off."""
    return value.lower() in ("1", "true", "yes")


_VARIABLES: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "ROPEWALK_ALLOWED_HOSTS": ("allowed_hosts", _split_words),
    "ROPEWALK_ALLOWED_ORIGINS": ("allowed_origins", _split_words),
    "ROPEWALK_MAX_BODY_BYTES": ("max_body_bytes", count),
    "ROPEWALK_MAX_SESSIONS": ("max_sessions", count),
    "ROPEWALK_MAX_SESSIONS_PER_TOKEN": ("max_sessions_per_token", count),
    "ROPEWALK_MAX_WAITING": ("max_waiting", count),
    "ROPEWALK_MAX_WAIT": ("max_wait_s", seconds),
    "ROPEWALK_STEP_TIMEOUT": ("step_timeout_s", seconds_or_none),
    "ROPEWALK_IDLE_TIMEOUT": ("idle_timeout_s", seconds),
    "ROPEWALK_DRAIN": ("drain_s", seconds),
    "ROPEWALK_METRICS": ("metrics", switch),
    "OPENENV_MODE": ("mode", _mode),
    "ENABLE_WEB_INTERFACE": ("web", _is_on),  # as the released server calls it; the next one goes before it
    "OPENENV_WEB": ("web", switch),
}
