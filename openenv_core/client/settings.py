"""The settings of a client: its constructor's arguments, validated."""

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import SESSION_ID, is_bearer_token, websocket_url

_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """What clients of the same servers share: arguments of `EnvClient`, which documents them.

    Raises:
        ConfigurationError: A value is invalid.
    """

    connect_timeout_s: float
    message_timeout_s: float | None
    max_message_size_mb: float
    websocket_ping_interval_s: float | None
    websocket_ping_timeout_s: float | None
    mode: str | None
    headers: Mapping[str, str] | None = field(repr=False)  # may hold a token
    token: str | None = field(repr=False)
    lease_s: float
    transport: str
    queue_timeout_s: float

    def __post_init__(self) -> None:
        mode = os.environ.get("OPENENV_CLIENT_MODE", "simulation") if self.mode is None else self.mode
        if mode.lower() not in ("simulation", "production"):
            raise ConfigurationError(
                f"expected mode to be 'simulation' or 'production', got {mode!r}; change the argument, or the "
                "environment variable OPENENV_CLIENT_MODE"
            )
        object.__setattr__(self, "mode", mode.lower())
        if self.transport not in ("websocket", "http"):
            raise ConfigurationError(
                f"expected transport to be 'websocket' or 'http', got {self.transport!r}"
            )
        validate_headers(self.headers, self.token)

    @property
    def max_message_bytes(self) -> int:
        """Size limit of a received message."""
        return int(self.max_message_size_mb * 1024 * 1024)

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers of every HTTP request, with the token's, including a WebSocket's handshake.

        By `Prefer` (RFC 7240) a full server may queue a request for part of the connect timeout.
        """
        prefer = f"wait={int(min(0.8 * self.connect_timeout_s, self.queue_timeout_s))}"
        return {"Prefer": prefer, **validate_headers(self.headers, self.token)}

    def arguments_of(self, function: Callable[..., object]) -> dict[str, Any]:
        """Return the settings that a function takes as arguments, by name."""
        parameters = signature(function).parameters
        accepts_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        names = (each.name for each in fields(self))
        return {name: getattr(self, name) for name in names if accepts_any or name in parameters}


def validate_headers(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    """Return the headers, with the token's added. ConfigurationError for an invalid header, or two credentials."""
    merged = dict(headers or {})
    if token is not None:
        if any(name.lower() == "authorization" for name in merged):
            raise ConfigurationError("both a token and an Authorization header are given; leave one out")
        if not is_bearer_token(token):
            raise ConfigurationError(
                "expected a token of printable ASCII characters without spaces, got something else; "
                "look for a line break at its end"  # without the token: messages are logged
            )
        merged["Authorization"] = f"Bearer {token}"
    for name, value in merged.items():
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"expected header {name!r} to be one line of text, got characters that HTTP forbids"
            )
    return merged


def validate_url(base_url: str) -> str:
    """Return a URL without its trailing slash. ConfigurationError if it is invalid."""
    websocket_url(base_url)  # raises if invalid
    return base_url.rstrip("/")


def validate_urls(base_url: str | Sequence[str] | None) -> list[str]:
    """Return the URLs in random order, so that the clients of a server that dies spread over the others."""
    urls = [base_url] if isinstance(base_url, str) else list(base_url or ())
    if base_url is not None and not urls:
        raise ConfigurationError("the list of base_url is empty")
    return random.sample([validate_url(url) for url in urls], len(urls))


def validate_session_id(session_id: str) -> str:
    """Return the id. ConfigurationError if it is invalid."""
    if not SESSION_ID.fullmatch(session_id):
        raise ConfigurationError(
            f"expected a session_id of 1 to 128 letters, digits, dots, dashes or underscores, got {session_id!r}"
        )
    return session_id


def space_label(repo_id: str) -> str:
    """Return the label of a Space, `owner/name`, in host names and image names."""
    return re.sub("[/._]", "-", repo_id).lower()


def named_parameters(function: Callable[..., object]) -> set[str]:
    """Return the names of a function's parameters, without those that collect the rest (`*args`, `**options`)."""
    collecting = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind not in collecting}
