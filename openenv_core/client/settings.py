"""What a client is told when it is made, checked once."""

import os
import re
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, cast

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token

Transport: TypeAlias = Literal["websocket", "http"]
Mode: TypeAlias = Literal["simulation", "production"]

MODE_VARIABLE: Final = "OPENENV_CLIENT_MODE"

_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def checked_mode(mode: str | None) -> Mode:
    """Return the mode, by default that of the environment variable, else simulation.

    Raises:
        ConfigurationError: There is no such mode.
    """
    given = os.environ.get(MODE_VARIABLE, "simulation") if mode is None else mode
    if (lower := given.lower()) not in ("simulation", "production"):
        raise ConfigurationError(
            f"expected mode to be 'simulation' or 'production', got {given!r}; "
            f"change the argument, or the environment variable {MODE_VARIABLE}"
        )
    return cast(Mode, lower)


def checked_transport(transport: str) -> Transport:
    """Return the transport.

    Raises:
        ConfigurationError: There is no such transport.
    """
    if transport not in ("websocket", "http"):
        raise ConfigurationError(f"expected transport to be 'websocket' or 'http', got {transport!r}")
    return cast(Transport, transport)


def checked_headers(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    """Return the headers, the token's among them.

    Raises:
        ConfigurationError: Something that cannot stand in a header, or two credentials.
    """
    merged = dict(headers or {})
    if token is not None:
        if any(name.lower() == "authorization" for name in merged):
            raise ConfigurationError("expected a token or an Authorization header, got both; leave one out")
        if not is_bearer_token(token):
            raise ConfigurationError(
                "expected a token of printable ASCII characters without spaces, got something else; "
                "look for a line break at its end"  # the token itself stays out of messages
            )
        merged["Authorization"] = f"Bearer {token}"
    for name, value in merged.items():
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"expected header {name!r} to be one line of text, got characters that HTTP forbids"
            )
    return merged
