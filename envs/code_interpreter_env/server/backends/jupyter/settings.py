"""Where the gateway is, and which kernels it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token

URL: Final = "JUPYTER_GATEWAY_URL"
TOKEN: Final = "JUPYTER_GATEWAY_AUTH_TOKEN"
KERNEL: Final = "JUPYTER_GATEWAY_KERNEL_NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class JupyterSettings:
    """How the gateway is reached.

    Attributes:
        url: What `/api/kernels` follows.
        token: Sent as `Authorization: token`; None: the gateway wants none.
        kernel_name: Which kernels; None: the gateway's default. They have to be Python's.
        start_s: Seconds that a kernel may take until it answers.
        request_s: Seconds that any other request may take.
        report_files: Whether each execution is followed by a look at the files.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    kernel_name: str | None = None
    start_s: float = 60.0
    request_s: float = 10.0
    report_files: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"expected {URL} with http:// or https://, got {self.url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError(
                f"expected a plain {URL}: no user, no query, no fragment; the token goes into {TOKEN}"
            )
        if self.token is not None and not is_bearer_token(self.token):
            raise ConfigurationError(
                f"expected {TOKEN} to be printable ASCII without spaces, got {len(self.token)} other characters"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "JupyterSettings":
        """Read JUPYTER_GATEWAY_URL, and JUPYTER_GATEWAY_AUTH_TOKEN and JUPYTER_GATEWAY_KERNEL_NAME where set.

        Raises:
            ConfigurationError: There is no URL, or a value cannot be.
        """
        url = environ.get(URL, "").strip()
        if not url:
            raise ConfigurationError(f"expected {URL} to say where a kernel gateway is, got nothing; set it")
        return cls(
            url=url,
            token=environ.get(TOKEN, "").strip() or None,
            kernel_name=environ.get(KERNEL, "").strip() or None,
        )

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.token is None else {"Authorization": f"token {self.token}"}

    def address(self, path: str, *, socket: bool = False) -> str:
        """Return the URL of a path; of a WebSocket if that is what it is."""
        base = self.url.rstrip("/")
        return ("ws" + base.removeprefix("http") if socket else base) + path
