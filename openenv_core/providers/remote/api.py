"""The HTTP API of a service of sandboxes: messages, errors, transport."""

import re
import ssl
import time
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, Literal, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.protocol.http import is_bearer_token, redact_url
from openenv_core.proxies import proxy_for


class SandboxError(ProviderError):
    """Something is wrong with a hosted sandbox or its service."""


class SandboxServiceUnavailableError(SandboxError):
    """The service cannot be reached, does not answer in time, or does not speak the interface."""


class SandboxRefusedError(SandboxError):
    """The service said no.

    Attributes:
        status: The HTTP status.
        code: The service's word for the reason, `image_not_found` for one; empty where it gave none.
    """

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class SandboxAccessRefusedError(SandboxRefusedError):
    """The token is missing or unknown, or does not allow what was asked for."""


class SandboxLimitReachedError(SandboxRefusedError):
    """The service has no room for another sandbox.

    Attributes:
        retry_after_s: Seconds until it is worth another try, where the service said so.
    """

    def __init__(
        self, message: str, status: int = 429, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status, code)
        self.retry_after_s = retry_after_s


class SandboxLostError(SandboxError):
    """The sandbox is no longer there."""


ROOT: Final = "/v1/sandboxes"
"""The path of the collection. A service may stand below another path, which is part of its base URL."""

MAX_WAIT_S: Final = 30.0
"""The longest time that a service holds back an answer while a sandbox starts."""

MAX_LOG_BYTES: Final = 64 * 1024
"""The most that a service tells of what a sandbox has printed."""

SANDBOX_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""It becomes a part of a path, so it is neither of those that have a meaning there."""

Word = Annotated[str, StringConstraints(max_length=8192)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]


class SandboxState(StrEnum):
    """Where a sandbox stands. It goes from left to right only."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class SandboxSpec(BaseModel):
    """What a sandbox runs, and within which limits. A service refuses what it cannot honour.

    Attributes:
        image: The container image; None: the command runs without one, where the service allows that.
        command: Words of the command; for an image, instead of its own. `{port}` in them is replaced.
        port: Where the server inside listens. For a command without an image the service chooses the port,
            and tells it by `{port}` and by the environment variable PORT.
        env_vars: Environment variables of the server.
        memory_bytes: The limit on its memory.
        cpus: The limit on its CPU time, in cores.
        pids: The limit on its processes and threads.
        network: `none`: what runs inside reaches nothing; its port is exposed all the same.
        lease_s: Seconds that the sandbox lives without being asked to live on.
        start_timeout_s: Seconds until its server must be healthy.
    """

    model_config = ConfigDict(extra="forbid")

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    command: Annotated[list[Word], Field(min_length=1, max_length=256)] | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    env_vars: Annotated[dict[EnvName, EnvValue], Field(max_length=256, repr=False)] = {}
    memory_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    pids: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    network: Literal["bridge", "none"] | None = None
    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)] = 60.0

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if self.image is None and self.command is None:
            raise ValueError("expected an image or a command to run, got neither")
        return self


class LeaseRequest(BaseModel):
    """How much longer a sandbox is to live, from now on."""

    model_config = ConfigDict(extra="forbid")

    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class RemoteSandbox(BaseModel):
    """What a service tells of a sandbox. Further keys are a service's own, and are ignored.

    Attributes:
        id: Its name at this service.
        state: Where it stands.
        url: Where its port is reached, once it runs; relative to the request's own where it has no scheme.
        expires_in_s: Seconds until its lease runs out.
        reason: Why it ended, in words.
    """

    id: Annotated[str, StringConstraints(pattern=rf"^{SANDBOX_ID.pattern}$")]
    state: SandboxState
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    expires_in_s: float | None = None
    reason: str | None = None


class ErrorBody(BaseModel):
    """An answer that is no success.

    Attributes:
        detail: What was expected, what came, what to do.
        code: One word for it, for programs.
    """

    detail: str = ""
    code: str = ""


_MAX_ANSWER_BYTES: Final = 4 * MAX_LOG_BYTES
"""A service that sends more than this does not speak the interface."""


class SandboxApi:
    """A service, asked from any thread.

    Args:
        base_url: Where the service is.
        token: Its bearer token; never sent to a sandbox.
        timeout_s: Seconds that an answer may take.

    Raises:
        ConfigurationError: The URL or the token cannot be used.
    """

    def __init__(self, base_url: str, token: str | None, timeout_s: float) -> None:
        import httpx  # not needed by those who only name the provider

        from openenv_core.providers.remote.api import client_for

        try:
            url = httpx.URL(base_url)
        except (httpx.InvalidURL, TypeError) as error:
            why = "" if "@" in str(base_url) else f": {error}"  # which may have a part of the password
            raise ConfigurationError(
                f"expected the service's URL, got {redact_url(str(base_url))!r}{why}"
            ) from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationError(
                f"expected an http:// or https:// URL of the service, got {redact_url(base_url)!r}"
            )
        if token is not None and not is_bearer_token(token):
            raise ConfigurationError(
                f"expected a token of printable ASCII without spaces, got {len(token)} other characters"
            )
        self.base_url = str(url).rstrip("/")
        self._shown = redact_url(self.base_url)
        self.timeout_s = timeout_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = client_for(self.base_url, headers)
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)

    def create(self, spec: SandboxSpec) -> RemoteSandbox:
        """Ask for a sandbox. It starts; its lease runs.

        Raises:
            SandboxRefusedError: The service says no.
            SandboxServiceUnavailableError: It gave no usable answer. What it made all the same ends with its lease.
        """
        return self._sandbox("POST", "", body=spec)

    def get(self, sandbox_id: str, *, wait_s: float = 0.0, timeout_s: float | None = None) -> RemoteSandbox:
        """Ask what became of a sandbox.

        Args:
            sandbox_id: Which.
            wait_s: How long the service may hold its answer back while the sandbox starts.
            timeout_s: Seconds for the answer, beyond those; by default the usual ones.

        Raises:
            SandboxLostError: There is none of this name any more.
        """
        wait_s = min(wait_s, MAX_WAIT_S)
        params = {"wait_s": f"{wait_s:g}"} if wait_s > 0 else {}
        limit_s = wait_s + (self.timeout_s if timeout_s is None else timeout_s)
        return self._sandbox("GET", f"/{sandbox_id}", params=params, timeout_s=limit_s)

    def renew(self, sandbox_id: str, lease_s: float, timeout_s: float) -> RemoteSandbox:
        """Let a sandbox live on.

        Raises:
            SandboxLostError: There is none of this name any more.
        """
        return self._sandbox(
            "POST", f"/{sandbox_id}/lease", body=LeaseRequest(lease_s=lease_s), timeout_s=timeout_s
        )

    def logs(self, sandbox_id: str, size: int) -> str:
        """Return the last of what a sandbox has printed.

        Raises:
            SandboxLostError: There is none of this name any more.
        """
        params = {"bytes": str(min(size, MAX_LOG_BYTES))}
        return self._ask("GET", f"/{sandbox_id}/logs", params=params).decode(errors="replace")

    def delete(self, sandbox_id: str, timeout_s: float) -> None:
        """End a sandbox; one that is gone already is as good."""
        try:
            self._ask("DELETE", f"/{sandbox_id}", timeout_s=timeout_s)
        except SandboxLostError:
            return

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()

    def _sandbox(self, method: str, path: str, **options: Any) -> RemoteSandbox:
        body = self._ask(method, path, **options)
        try:
            found = RemoteSandbox.model_validate_json(body)
        except ValidationError as error:
            raise SandboxServiceUnavailableError(
                f"expected {self._shown} to describe a sandbox as docs/sandboxes.md says, got: "
                f"{error.errors(include_url=False, include_input=False)[0]['msg']}; is it a sandbox service?"
            ) from None
        if found.url is not None:
            found.url = str(self._http.build_request("GET", self.base_url + ROOT).url.join(found.url))
        return found

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        content = None if body is None else body.model_dump_json(exclude_none=True)
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self.base_url + ROOT + path
        answer = bytearray()
        try:
            with self._http.stream(
                method, url, params=params, content=content, headers=headers, timeout=limit_s
            ) as response:
                for chunk in response.iter_raw():
                    answer += chunk
                    if len(answer) > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
                        raise SandboxServiceUnavailableError(
                            f"expected an answer of at most {_MAX_ANSWER_BYTES} bytes within {limit_s:g} s from "
                            f"{self._shown}, got {len(answer)} bytes and no end"
                        )
        except self._errors as error:
            raise SandboxServiceUnavailableError(
                f"expected an answer from the sandbox service at {self._shown} within {limit_s:g} s, got "
                f"{type(error).__name__}: {error}; is it running there? `ropewalk sandboxes` starts one"
            ) from error
        if not response.is_success:
            raise self._refusal(response, bytes(answer), path)
        return bytes(answer)

    def _refusal(self, response: "httpx.Response", body: bytes, path: str) -> Exception:
        try:
            said = ErrorBody.model_validate_json(body)
        except ValidationError:
            said = ErrorBody(detail=body[:300].decode(errors="replace").strip())
        status = response.status_code
        text = f"the sandbox service at {self._shown} answered {status}: {said.detail or 'without words'}"
        if status in (401, 403):
            return SandboxAccessRefusedError(text, status, said.code)
        if status == 404 and path and not said.code.startswith("image"):
            return SandboxLostError(
                f"expected the sandbox {path.split('/')[1]} at {self._shown}, got 404: it ended, or its lease ran out"
            )
        if status == 429:
            return SandboxLimitReachedError(
                text, status, said.code, _seconds(response.headers.get("retry-after"))
            )
        if status >= 500 or status < 400:
            return SandboxServiceUnavailableError(text)
        return SandboxRefusedError(text, status, said.code)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def client_for(url: str, headers: dict[str, str] | None = None) -> httpx.Client:
    """Return a client for one server. It follows no redirects: one may lead to somebody who must not get the token.

    Args:
        url: Where the server is.
        headers: Sent with every request.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """
    proxy = proxy_for(url)
    plain = url.startswith("http://") and proxy is None
    try:
        # Reading the system's certificates takes longer than a request to a server nearby.
        transport = httpx.HTTPTransport(verify=False if plain else _trust(), proxy=proxy)
    except ImportError as error:
        raise ConfigurationError(f"expected to use the proxy of the environment, got: {error}") from error
    # Bounds on answers hold for what comes over the wire, so nothing is compressed.
    identity = {"Accept-Encoding": "identity"}
    return httpx.Client(
        transport=transport, headers=identity | (headers or {}), follow_redirects=False, trust_env=False
    )


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()
