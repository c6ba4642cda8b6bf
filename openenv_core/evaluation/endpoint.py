"""A client of servers of the OpenAI protocol that retries, and keeps the key out of messages."""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Iterator
from itertools import count

import httpx

from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.proxies import proxy_for

CONNECT_TIMEOUT_S = 10.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
WARNING_INTERVAL_S = 10.0
"""Interval of warnings that a server does not answer."""
MAX_COMPLAINT_BYTES = 64 << 10
"""Bytes read of an error response."""
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a retry may succeed: the server is overloaded, starting or restarting."""
REFUSED = frozenset({400, 413, 422})
"""Statuses that mean that the request itself is invalid."""
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})
"""OpenSSL's reasons when the server does not speak TLS."""

_log = logging.getLogger(__name__)


class RequestRefusedError(OpenEnvError):
    """The server rejects the request, for example because the prompt is too long."""


class EndpointClient:
    """A client of one server. Belongs to the event loop in which it is created.

    Args:
        url: The server's URL, up to and including /v1.
        key_variable: The environment variable with its key; None if it needs none.
        key: The key itself, instead of a variable.
        connections: Maximum number of concurrent requests.
        max_bytes: Maximum size of a response in bytes, which bounds this process's memory.
        names: The options that set the URL and the key, or its variable, for error messages.

    Attributes:
        trouble: What was wrong with the last response, or that there was none.

    Raises:
        ConfigurationError: The key is missing or cannot be sent; or the environment's proxies or certificates are
            wrong.
    """

    def __init__(
        self,
        url: str,
        key_variable: str | None,
        *,
        connections: int,
        max_bytes: int,
        key: str | None = None,
        names: tuple[str, str] = ("--policy", "--key-variable"),
    ) -> None:
        self.trouble = "no answer"
        self.url = url
        self.url_name, self._key_name = names
        self._key_variable = key_variable
        self._max_bytes = max_bytes
        self._key = self._read_key(key)
        self._last_warning_s: float | None = None
        try:
            self._http = httpx.AsyncClient(
                headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                transport=_transport(self.url, connections),
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            raise ConfigurationError(
                f"expected a client for {self.url}, got {type(error).__name__}: {self._plain(str(error))}; "
                "see the variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE"
            ) from error

    async def request(
        self, method: str, path: str, body: dict[str, object] | None = None, attempts: int | None = None
    ) -> bytes:
        """Send a request, and retry until the server answers or `attempts` are used up; the caller sets the deadline.

        Raises:
            RequestRefusedError: The server rejects what was posted.
            ConfigurationError: The response is unusable, or all attempts have failed.
        """
        pause_s = MIN_BACKOFF_S
        for attempt in count(1):
            wait_s = pause_s
            try:
                async with self._http.stream(method, self.url + path, json=body) as response:
                    status = response.status_code
                    content = await self._read(response)
            except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.DecodingError) as error:
                raise self._make_protocol_error(f"{type(error).__name__}: {error}") from error
            except httpx.TransportError as error:
                self.trouble = self._plain(f"{type(error).__name__}: {error}")
                self._require_tls(error)
            else:
                if status == httpx.codes.OK:
                    self.trouble = "no answer"
                    return content
                text = self._plain(content.decode("utf-8", errors="replace"))
                self.trouble = f"status {status}: {text}"
                if status not in BUSY:
                    if method == "POST" and status in REFUSED:
                        raise RequestRefusedError(f"status {status}: {text}")
                    raise self._refusal(status, text)
                wait_s = max(pause_s, _read_retry_after(response))
            if attempt == attempts:
                raise self._make_protocol_error(self.trouble)
            self._log_waiting()
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)
        raise AssertionError("unreachable: the loop has no end")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _read(self, response: httpx.Response) -> bytes:
        succeeded = response.status_code == httpx.codes.OK
        max_bytes = self._max_bytes if succeeded else MAX_COMPLAINT_BYTES
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > max_bytes:
                if succeeded:
                    raise self._make_protocol_error(f"an answer of more than {max_bytes} bytes")
                break
        return bytes(content[:max_bytes])

    def _log_waiting(self) -> None:
        """Log, at most every WARNING_INTERVAL_S, why a request is being retried."""
        now = time.monotonic()
        if self._last_warning_s is None or now - self._last_warning_s >= WARNING_INTERVAL_S:
            self._last_warning_s = now
            _log.warning("retrying %s, which gave %s", self.url, self.trouble)

    def _require_tls(self, error: BaseException) -> None:
        """Raise a ConfigurationError for a TLS fault that a retry cannot mend."""
        fault = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)
        if isinstance(fault, ssl.SSLCertVerificationError):
            raise ConfigurationError(
                f"expected a certificate of {self.url} that can be verified, got {self.trouble}; "
                "the variable SSL_CERT_FILE names a file of authorities of your own"
            ) from error
        if fault is not None and fault.reason in NO_TLS:
            raise ConfigurationError(
                f"expected TLS at {self.url}, got {self.trouble}; "
                f"if it has none, {self.url_name} must begin with http:"
            ) from error

    def _refusal(self, status: int, text: str) -> ConfigurationError:
        url, variable = self.url, self._key_variable or (self._key and self._key_name)
        if status in (401, 403):
            remedy = (
                f"see the value of {variable}"
                if variable
                else f"name its environment variable by {self._key_name}"
            )
            return ConfigurationError(
                f"expected {url} to take the key, got status {status}: {text}; {remedy}"
            )
        return ConfigurationError(
            f"expected {self.url_name} to lead to an OpenAI-compatible server, up to and with /v1; "
            f"{url} answered with status {status}: {text}"
        )

    def _make_protocol_error(self, got: str) -> ConfigurationError:
        return ConfigurationError(
            f"expected {self.url_name} to answer as the OpenAI protocol does, {self.url} gave {self._plain(got)}"
        )

    def _read_key(self, key: str | None) -> str | None:
        name = self._key_variable
        if name is not None:
            key = os.environ.get(name, "")
        if key is None:
            return None
        key_source = self._key_name if name is None else f"the environment variable {name} ({self._key_name})"
        key = key.strip()  # key files often end with a newline
        if not key:
            raise ConfigurationError(
                f"expected {key_source} to hold the key of {self.url}, it is not set here; "
                "roles on other hosts need it there"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigurationError(
                f"expected {key_source} to hold a key that can be sent, of printable ASCII characters without spaces; "
                "it has others"
            )
        return key

    def _plain(self, text: str) -> str:
        """Return a text without the key, which a server may echo, and without control characters."""
        return to_plain_text(text if self._key is None else text.replace(self._key, "***"))


def _transport(url: str, connections: int) -> httpx.AsyncHTTPTransport:
    """Return the transport to a server; httpx's default would use a proxy even for a server on this machine."""
    proxy = proxy_for(url)
    return httpx.AsyncHTTPTransport(
        verify=url.startswith("https:")
        or proxy is not None,  # loading the certificates takes longer than a request
        proxy=proxy,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
    )


def to_plain_text(text: str, max_bytes: int = 300) -> str:
    """Return an untrusted text as at most `max_bytes` printable characters on one line."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 4 * max_bytes])
    return " ".join(printable.split())[:max_bytes]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _read_retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # missing, or a date, which no such server is known to send
        return 0.0
