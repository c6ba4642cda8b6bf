"""The settings of a server: from environment variables, or from `ropewalk serve`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, Json, TypeAdapter, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token

Mode: TypeAlias = Literal["simulation", "production"]

MODES = ("simulation", "production")

MIN_TOKEN_CHARS = 16

MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
"""A command that prints a new random token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one server.

    Attributes:
        tokens: Bearer tokens, each of which admits a client; if empty, no token is required.
        allowed_hosts: Additional values of Host to accept; `*` for any.
        allowed_origins: Additional values of Origin to accept; `*` for any.
        max_body_bytes: Greatest body of an HTTP request.
        body_timeout_s: Seconds within which the whole body has to arrive.
        max_sessions: The cap on sessions; None for that of `create_app`.
        max_sessions_per_token: The cap on sessions of one token; None for no other limit than the cap on all.
        max_waiting: Greatest number of requests that wait for a session.
        max_wait_s: Longest wait for a session in seconds; with 0, requests are refused at once. Clients that cannot be
            sent their place, over plain HTTP and in the released dialect, are refused before they would time out.
        step_timeout_s: Seconds that a reset, a step, a read of the state or a constructor may take before its
            session is ended; None for no limit.
        idle_timeout_s: Seconds after which an unused session without a WebSocket is ended.
        send_timeout_s: Seconds that a client may leave its replies unread.
        drain_s: Seconds that sessions have to end when the server shuts down.
        mode: `production` serves no reset, step or state.
        web: Whether there is a page to play on at /web.
        mcp_single_session: Whether all standard MCP clients of a token that name no session share one.
        metrics: Whether the server counts events and serves /metrics.
        exposed: Whether other machines may reach the listening socket; None if unknown. Set by what opens the socket,
            not by a variable.
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
    mcp_single_session: bool = False
    metrics: bool = True
    exposed: bool | None = None

    def __post_init__(self) -> None:
        """Refuse tokens that are too short, or that a header cannot carry.

        Raises:
            ConfigurationError: A token is invalid; the message does not contain it.
        """
        for token in self.tokens:
            if len(token) < MIN_TOKEN_CHARS or not is_bearer_token(token):
                raise ConfigurationError(
                    f"expected tokens of at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces, "
                    f"got one of {len(token)} characters; make one with: {MAKE_TOKEN}"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ServerSettings":
        """Read the settings from environment variables; missing or empty ones keep their defaults.

        Raises:
            ConfigurationError: A value is invalid.
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
    """What a server process gets from the process that starts it.

    Attributes:
        app: The target to load the app from.
        options: Command-line options given that only an app of `create_app` supports.
        log_level: Level of the log.
        settings: The server's settings.
        listener: Descriptor of the listening socket.
    """

    app: str
    options: tuple[str, ...]
    log_level: str
    settings: ServerSettings = field(repr=False)
    listener: int = -1

    def to_json(self) -> bytes:
        """Return the plan as one line of JSON, without a newline."""
        return TypeAdapter(type(self)).dump_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a plan from a line of JSON."""
        return TypeAdapter(cls).validate_json(text)


def _split_words(_: str, value: str) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split())


def token_lines(variable: str, path: str) -> tuple[str, ...]:
    """Read tokens from a file: one per line; lines that begin with # are comments.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"expected {variable} to name a readable file, got: {error}") from None
    return tuple(line for line in lines if line and not line.startswith("#"))


def _reader(kind: Any, expected: str) -> Callable[[str, str], Any]:
    """Return a parser of a variable's or option's text, which raises a ConfigurationError with both names."""
    validate = TypeAdapter(kind).validate_python

    def read(variable: str, value: str) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ConfigurationError(f"expected {variable} to be {expected}, got {value!r:.80}") from None

    return read


_Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]

count = _reader(Annotated[int, Field(ge=1)], "a whole number of at least 1")
seconds = _reader(_Seconds, "a number of seconds")
seconds_or_none = _reader(
    Annotated[_Seconds, AfterValidator(lambda number: number or None)], "a number of seconds"
)
"""Parses a number of seconds; None, for no limit, if it is 0."""
json_object = _reader(Json[dict[str, Any]], "a JSON object")
switch = _reader(bool, "1 or 0")
read_mode = _reader(
    Annotated[Mode, BeforeValidator(lambda mode: mode.lower() if isinstance(mode, str) else mode)],
    f"one of {', '.join(MODES)}",
)


def is_on(_: str, value: str) -> bool:
    """Parse a switch as the released server does: any other word means off."""
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
    "OPENENV_MODE": ("mode", read_mode),
    "ENABLE_WEB_INTERFACE": ("web", is_on),  # the released server's name; the next one overrides it
    "OPENENV_WEB": ("web", switch),
}
