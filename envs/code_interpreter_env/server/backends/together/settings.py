"""Where the service is, and what it may cost in time."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token

BASE_URL: Final = "https://api.together.ai/v1"

TOKEN: Final = "TOGETHER_API_KEY"
URL: Final = "TOGETHER_BASE_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherSettings:
    """How the service is reached.

    Attributes:
        token: The bearer token.
        base_url: What `/tci/execute` follows.
        network_s: Seconds that a request may take beyond the time of the code in it.
        patience_s: Seconds in which a request that may be sent again is sent again.
        report_files: Whether each execution is followed by a look at the files, which is a request of its own.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    token: str = field(repr=False)
    base_url: str = BASE_URL
    network_s: float = 10.0
    patience_s: float = 60.0
    report_files: bool = False

    def __post_init__(self) -> None:
        if not is_bearer_token(self.token):
            raise ConfigurationError(
                f"expected {TOKEN} to be a token of printable ASCII without spaces, got {len(self.token)} others"
            )
        parts = urlsplit(self.base_url)
        if not parts.hostname or not (parts.scheme == "https" or _on_loopback(parts.scheme, parts.hostname)):
            raise ConfigurationError(
                "expected the service's URL with https://, as a token goes there "
                f"(http:// on this machine alone), got {self.base_url!r}"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError("expected a plain URL of the service: no user, no query, no fragment")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "TogetherSettings":
        """Read TOGETHER_API_KEY, and TOGETHER_BASE_URL where it is set.

        Raises:
            ConfigurationError: There is no token, or a value cannot be.
        """
        token = environ.get(TOKEN, "").strip()
        if not token:
            raise ConfigurationError(f"expected {TOKEN} to hold a token of the service, got nothing; set it")
        return cls(token=token, base_url=environ.get(URL, "").strip() or BASE_URL)


def _on_loopback(scheme: str, host: str) -> bool:
    if scheme != "http":
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
