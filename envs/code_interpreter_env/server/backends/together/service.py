"""The two documented requests, when they are sent again, and what their answers mean."""

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final

import httpx

from openenv_core.proxies import proxy_for

from ..hosted import Collector, HostFailureError
from ..hosted.interpreter import error_of
from .settings import TOKEN, TogetherSettings

MIN_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 8.0


class Pacing:
    """The pauses between the attempts of one request: doubled each time, and never shorter than asked for.

    Args:
        patience_s: Seconds for all attempts but the last.
    """

    def __init__(self, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        self.attempts = 1

    def next_pause_s(self, retry_after: str | None) -> float | None:
        """Return how long to wait before the next attempt; None where there is no time for one.

        Args:
            retry_after: What the service says, in seconds or as a date.
        """
        pause_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(self.attempts - 1, 16))
        pause_s *= random.uniform(
            0.75, 1.0
        )  # so that those who were refused together do not come back together
        pause_s = max(pause_s, seconds_of(retry_after))
        if time.monotonic() + pause_s > self._deadline:
            return None
        self.attempts += 1
        return pause_s


def seconds_of(retry_after: str | None) -> float:
    """Return the seconds that a Retry-After asks for; 0 where it cannot be read."""
    text = (retry_after or "").strip()
    if text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 12:
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, (when - datetime.now(UTC if when.tzinfo else None)).total_seconds())


class ServiceTimeoutError(HostFailureError):
    """No answer came in time. The code may run on."""


class TooLargeError(HostFailureError):
    """The answer is larger than anything that may be written."""


class ServiceRefusedError(HostFailureError):
    """The service understood, and said no: to a session that is gone, for one."""


logger = logging.getLogger("openenv_core")

EXECUTE: Final = "/tci/execute"
SESSIONS: Final = "/tci/sessions"

SESSIONS_BYTES: Final = 1 << 20
MOST_WORDS: Final = 300
"""How much of what the service says goes into an error."""

_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Failures before anything of a request has left."""


class TogetherService:
    """The service, asked by coroutines of one loop.

    A request is sent again where it was refused for its rate (429), or never left. One that the service may have
    begun is sent again only where doing it twice does no harm; an execution of the session's code never is.

    Args:
        settings: How it is reached.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """

    def __init__(self, settings: TogetherSettings) -> None:
        self._settings = settings
        self._base_url = settings.base_url.rstrip("/")
        plain = self._base_url.startswith("http://")
        transport = httpx.AsyncHTTPTransport(
            verify=False if plain else _trust(), proxy=proxy_for(self._base_url)
        )
        # Bounds on answers hold for what comes over the wire, so nothing is compressed. No redirect is followed:
        # it may lead to somebody who must not get the token.
        headers = {"Authorization": f"Bearer {settings.token}", "Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(
            transport=transport, headers=headers, follow_redirects=False, trust_env=False
        )

    async def execute(
        self,
        code: str,
        session_id: str | None,
        *,
        timeout_s: float,
        most_bytes: int,
        repeatable: bool,
        files: Sequence[Mapping[str, str]] = (),
    ) -> Any:
        """Run code in a session, or in a new one, and return the answer's JSON.

        Args:
            code: Python source.
            session_id: The session; None begins one.
            timeout_s: Seconds for the code.
            most_bytes: Of the answer.
            repeatable: Whether running it twice does no harm.
            files: Uploaded before: name, encoding and content.

        Raises:
            ServiceTimeoutError: No answer in time.
            TooLargeError: The answer is too large.
            ServiceRefusedError: The service said no.
            HostFailureError: It gave no usable answer.
        """
        body: dict[str, Any] = {"language": "python", "code": code}
        if session_id is not None:
            body["session_id"] = session_id
        if files:
            body["files"] = list(files)
        content = json.dumps(body).encode()
        limit_s = timeout_s + self._settings.network_s
        return await self._asked("POST", EXECUTE, content, limit_s, most_bytes, repeatable)

    async def sessions(self, patience_s: float | None = None) -> frozenset[str]:
        """Return the ids of the sessions that are alive.

        Raises:
            HostFailureError: The service gave no usable answer.
        """
        said = await self._asked(
            "GET", SESSIONS, None, self._settings.network_s, SESSIONS_BYTES, True, patience_s
        )
        try:
            return frozenset(str(each["id"]) for each in said["data"]["sessions"])
        except (KeyError, TypeError):
            raise self._strange("a list of sessions") from None

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.aclose()

    async def _asked(
        self,
        method: str,
        path: str,
        content: bytes | None,
        limit_s: float,
        most_bytes: int,
        repeatable: bool,
        patience_s: float | None = None,
    ) -> Any:
        pacing = Pacing(self._settings.patience_s if patience_s is None else patience_s)
        while True:
            retry_after: str | None = None
            try:
                async with asyncio.timeout(limit_s):
                    status, headers, body = await self._sent(method, path, content, most_bytes)
            except TimeoutError:
                raise ServiceTimeoutError(
                    f"expected an answer of {self._base_url} within {limit_s:g} s, got none"
                ) from None
            except httpx.TransportError as error:
                failure = f"expected {self._base_url} to answer, got {type(error).__name__}: {error}"
                if not repeatable and not isinstance(error, _NOT_SENT):
                    raise HostFailureError(self._clean(f"{failure}; {_MAY_HAVE_RUN}")) from None
            else:
                if status == 200:
                    return self._json(body, repeatable)
                failure = f"expected {self._base_url} to answer, got HTTP {status}: {self._words(body)}"
                self._require_retry(status, failure, repeatable)
                retry_after = headers.get("Retry-After")
            pause_s = pacing.next_pause_s(retry_after)
            if pause_s is None:
                asked = f", asked to wait {retry_after} s" if retry_after else ""
                raise HostFailureError(
                    self._clean(f"{failure}; gave up after {pacing.attempts} attempts{asked}")
                ) from None
            logger.debug("%s %s is sent again in %.2f s: %s", method, path, pause_s, self._clean(failure))
            await asyncio.sleep(pause_s)

    async def _sent(
        self, method: str, path: str, content: bytes | None, most_bytes: int
    ) -> tuple[int, httpx.Headers, bytes]:
        headers = {} if content is None else {"Content-Type": "application/json"}
        # One deadline holds for the whole, outside; connecting has one of its own, as it may be tried again.
        timeout = httpx.Timeout(None, connect=self._settings.network_s / 2)
        request = self._http.build_request(
            method, self._base_url + path, content=content, headers=headers, timeout=timeout
        )
        response = await self._http.send(request, stream=True)
        try:
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > most_bytes:
                    if response.status_code != 200:
                        break
                    raise TooLargeError(f"expected an answer of at most {most_bytes} bytes, got more")
            return response.status_code, response.headers, bytes(body)
        finally:
            await response.aclose()

    def _require_retry(self, status: int, failure: str, repeatable: bool) -> None:
        """Raise where a status is the last word."""
        if status in (401, 403):
            raise HostFailureError(self._clean(f"{failure}; see to {TOKEN}"))
        if status == 429 or (status >= 500 and repeatable):
            return
        if status >= 500:
            raise HostFailureError(self._clean(f"{failure}; {_MAY_HAVE_RUN}"))
        raise ServiceRefusedError(self._clean(failure))

    def _json(self, body: bytes, repeatable: bool) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._strange("JSON" if repeatable else f"JSON ({_MAY_HAVE_RUN})") from None

    def _strange(self, expected: str) -> HostFailureError:
        return HostFailureError(
            f"expected {self._base_url} to answer with {expected}, as is documented, got something else"
        )

    def _words(self, body: bytes) -> str:
        text = body[: 4 * MOST_WORDS].decode("utf-8", "replace")
        return " ".join(text.split())[:MOST_WORDS] or "(nothing)"

    def _clean(self, text: str) -> str:
        """Return a text without the token, which a service may send back."""
        return text.replace(self._settings.token, "[token]")


_MAY_HAVE_RUN: Final = "the code may have run, so it is not sent again"


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()


@dataclass(frozen=True, slots=True)
class Ran:
    """An execution that took place.

    Attributes:
        session_id: Where.
        outputs: What it wrote and showed, and the exception that ended it, as documented.
    """

    session_id: str
    outputs: tuple[tuple[str, Any], ...]

    def collect_into(self, collector: Collector) -> None:
        """Have a collector hear it. Types of output that are not documented are left out."""
        for kind, data in self.outputs:
            if kind in ("stdout", "stderr"):
                collector.write(kind, str(data))
            elif kind == "error":
                collector.error = error_of(data if isinstance(data, str) else json.dumps(data))
            elif (kind == "display_data" or kind == "execute_result") and isinstance(data, dict):
                collector.show("display_data" if kind == "display_data" else "execute_result", data, {})
            else:
                collector.lost()

    def written(self) -> str:
        """Return all that was written to stdout."""
        return "".join(str(data) for kind, data in self.outputs if kind == "stdout")


@dataclass(frozen=True, slots=True)
class NotRun:
    """An execution that the service could not have take place: `data` is null, `errors` says why."""

    reason: str


def read_answer(said: Any) -> Ran | NotRun:
    """Read the JSON of an answer.

    Raises:
        HostFailureError: It is not of the documented form.
    """
    try:
        data, errors = said.get("data"), said.get("errors")
        if data is None and errors:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in errors]
            return NotRun("; ".join(texts)[:1000])
        outputs = tuple((str(each["type"]), each["data"]) for each in data["outputs"])
        session_id = data["session_id"]
    except (KeyError, TypeError, AttributeError):
        session_id = None
    if not isinstance(session_id, str) or not session_id:
        raise HostFailureError(
            "expected the service to answer with data or errors, as is documented, got neither"
        )
    return Ran(session_id, outputs)
