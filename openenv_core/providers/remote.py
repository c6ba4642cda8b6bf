"""Servers in hosted sandboxes: the HTTP interface of docs/sandboxes.md, and the provider that speaks it."""

import json
import os
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from openenv_core.errors import ConfigurationError, ProviderError, ServerStartError, describe_faults
from openenv_core.protocol.http import is_bearer_token, redact_url
from openenv_core.providers.base import ELSEWHERE_FACTOR, OwnedServerProvider, wait_healthy
from openenv_core.providers.docker.options import size_of
from openenv_core.proxies import client_for


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
"""A service or server that sends more than this does not speak the interface."""

_HTTP_ERRORS: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)


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
        self.timeout_s = timeout_s
        self._shown = redact_url(self.base_url)
        self._http = client_for(self.base_url, token)

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
        """Let a sandbox live on. Raises SandboxLostError where there is none of this name any more."""
        body = LeaseRequest(lease_s=lease_s)
        return self._sandbox("POST", f"/{sandbox_id}/lease", body=body, timeout_s=timeout_s)

    def logs(self, sandbox_id: str, size: int) -> str:
        """Return the last of what a sandbox has printed. Raises SandboxLostError where there is none."""
        params = {"bytes": str(min(size, MAX_LOG_BYTES))}
        return self._ask("GET", f"/{sandbox_id}/logs", params=params).decode(errors="replace")

    def delete(self, sandbox_id: str, timeout_s: float) -> None:
        """End a sandbox; one that is gone already is as good."""
        with suppress(SandboxLostError):
            self._ask("DELETE", f"/{sandbox_id}", timeout_s=timeout_s)

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
        timeout_s: float | None = None,
        params: dict[str, str] | None = None,
    ) -> bytes:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        content = None if body is None else body.model_dump_json(exclude_none=True)
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self.base_url + ROOT + path
        try:
            response, answer = _fetch(
                self._http, method, url, limit_s, params=params, content=content, headers=headers
            )
        except _HTTP_ERRORS as error:
            raise SandboxServiceUnavailableError(
                f"expected an answer from the sandbox service at {self._shown} within {limit_s:g} s, got "
                f"{type(error).__name__}: {error}; is it running there? `ropewalk sandboxes` starts one"
            ) from error
        if not response.is_success:
            raise self._refusal(response, answer, path)
        return answer

    def _refusal(self, response: httpx.Response, body: bytes, path: str) -> SandboxError:
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
            after = response.headers.get("retry-after", "")
            seconds = float(after) if after.isascii() and after.isdigit() else None
            return SandboxLimitReachedError(text, status, said.code, seconds)
        if status >= 500 or status < 400:
            return SandboxServiceUnavailableError(text)
        return SandboxRefusedError(text, status, said.code)


def _fetch(
    http: httpx.Client, method: str, url: str, limit_s: float, **options: Any
) -> tuple[httpx.Response, bytes]:
    """Return an answer and its body: all of it within the time, and no more than a bounded length."""
    deadline = time.monotonic() + limit_s
    body = bytearray()
    with http.stream(method, url, timeout=limit_s, **options) as response:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
                raise httpx.RemoteProtocolError(f"{len(body)} bytes and no end")
    return response, bytes(body)


def healthy(url: str, timeout_s: float) -> str | None:
    """Return None where /health says healthy, else what was seen.

    A server that wants a token for /health is ready too: the sandbox service's own token is not for it.

    Args:
        url: Where the server is.
        timeout_s: Seconds for the answer.
    """
    try:
        with client_for(url) as http:
            response, body = _fetch(http, "GET", url.rstrip("/") + "/health", timeout_s)
        if response.status_code in (401, 403):
            return None
        status = json.loads(body)["status"]
    except _HTTP_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code} on /health, without a status"
    return None if status == "healthy" else f"status {status!r}"


RENEWALS: Final = 3
"""How often a lease is renewed within its time, so that one lost request costs nothing."""

OUTPUT_BYTES: Final = 16_384
"""How much of the server's last output is asked for."""

LOOK_TIMEOUT_S: Final = 2.0
"""How long a question whether it lives may take: whoever asks has an error to tell of."""

FAILURE_REASON_WAIT_S: Final = 2.0
"""How long the service may take, beyond the start's own time, to say why it came to nothing."""

LONG_POLL_S: Final = 10.0
"""How long the service is asked to hold its answer back while the sandbox starts. One that does not is polled."""


class _LeasedSandbox:
    """A sandbox, and the thread that renews its lease.

    The thread is a daemon: with its process, whatever that dies of, the renewals end, and soon after the lease.
    """

    def __init__(self, api: SandboxApi, sandbox_id: str, lease_s: float, delete_timeout_s: float) -> None:
        self.id = sandbox_id
        self._api = api
        self._lease_s = lease_s
        self._delete_timeout_s = delete_timeout_s
        self._pid = os.getpid()
        self._lost: str | None = None
        self.ended = threading.Event()  # it was told to end
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="openenv-sandbox-lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why it must be taken for gone; None while its lease is kept."""
        if self._lost is None and not self.ended.is_set() and not self._thread.is_alive():
            return "the thread that renews its lease has ended"
        return self._lost

    def end(self) -> None:
        """Give it back, and let the connections go. Idempotent. Does nothing in a fork of the owner."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if self.ended.is_set():
                return
            self.ended.set()
            try:
                # A service that cannot be reached reaps it when the lease runs out.
                with suppress(ProviderError):
                    self._api.delete(self.id, self._delete_timeout_s)
            finally:
                if threading.current_thread() is not self._thread:
                    self._thread.join(1.0)
                self._api.close()

    def _main(self) -> None:
        try:
            self._lost = self._renew()
        except BaseException as error:
            self._lost = f"the thread that renews its lease died of {type(error).__name__}: {error}"

    def _renew(self) -> str | None:
        """Renew the lease until it ends; return why it was lost."""
        pause_s = self._lease_s / RENEWALS
        expires = time.monotonic() + self._lease_s
        while not self.ended.wait(pause_s):
            asked = time.monotonic()
            try:
                seen = self._api.renew(self.id, self._lease_s, min(self._api.timeout_s, pause_s))
            except ProviderError as error:
                if self.ended.is_set():
                    return None
                if isinstance(error, SandboxLostError | SandboxRefusedError):
                    return str(error)
                if time.monotonic() > expires:
                    return f"its lease of {self._lease_s:g} s ran out: {error}"
            else:
                if seen.state is SandboxState.ENDED:
                    return f"the sandbox has ended: {seen.reason or 'no reason given'}"
                expires = asked + self._lease_s
        return None


class RemoteSandboxProvider(OwnedServerProvider):
    """Runs a server in a sandbox of a service that speaks the interface of docs/sandboxes.md.

    While the provider lives it renews the sandbox's lease from a thread of its own. When this process dies, of
    whatever cause, nobody does, and the service ends the sandbox when the lease runs out.

    Args:
        base_url: Where the service is.
        image: The container image to run.
        command: Words of the command to run: instead of the image's own, or, where the service allows it,
            without an image. `{port}` in them is replaced by the port to listen on.
        token: The service's bearer token. The sandbox never sees it.
        port: Where the server inside of an image listens.
        env_vars: Environment variables of the server.
        memory: The limit on its memory: bytes, or as in "512m".
        cpus: The limit on its CPU time, in cores.
        pids: The limit on its processes and threads.
        network: "none" for a sandbox that reaches nothing.
        lease_s: Seconds after which the sandbox of a dead owner is ended.
        start_timeout_s: Seconds until the server must be healthy.
        stop_timeout_s: Seconds that the request to end the sandbox may take.
        request_timeout_s: Seconds that any other request may take.

    Raises:
        ConfigurationError: Neither an image nor a command, or a setting that cannot be. `start` raises
            SandboxRefusedError where the service says no (the token, its limits, an image that it does not have),
            SandboxServiceUnavailableError where it does not answer. A service that cannot be reached by `stop` ends
            the sandbox when the lease runs out.
    """

    def __init__(
        self,
        base_url: str,
        *,
        image: str | None = None,
        command: Sequence[str] | None = None,
        token: str | None = None,
        port: int = 8000,
        env_vars: Mapping[str, str] | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        network: Literal["bridge", "none"] | None = None,
        lease_s: float = 60.0,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 15.0,
        request_timeout_s: float = 10.0,
    ) -> None:
        super().__init__()
        if isinstance(command, str):
            raise ConfigurationError(
                f"expected the command as a list of words, got {command!r}; shlex.split makes one"
            )
        try:
            self._spec = SandboxSpec(
                image=image,
                command=None if command is None else list(command),
                port=port,
                env_vars=dict(env_vars or {}),
                memory_bytes=None if memory is None else size_of("memory", memory),
                cpus=cpus,
                pids=pids,
                network=network,
                lease_s=lease_s,
                start_timeout_s=start_timeout_s,
            )
        except ValidationError as error:
            faults = describe_faults(error, "sandbox")
            raise ConfigurationError(f"expected settings that a sandbox can have, got: {faults}") from None
        self._service = (base_url, token, request_timeout_s)
        self._stop_timeout_s = stop_timeout_s
        SandboxApi(*self._service).close()  # says at once what is wrong with the URL or the token
        self._api: SandboxApi | None = None
        self._leased: _LeasedSandbox | None = None

    @property
    def sandbox_id(self) -> str | None:
        """What the service calls the sandbox; None while there is none."""
        return None if self._leased is None else self._leased.id

    @property
    def alive(self) -> bool:
        """Whether the sandbox that was started still runs, as far as can be told within a moment."""
        leased, api = self._leased, self._api
        if leased is None or api is None or leased.ended.is_set() or leased.lost is not None:
            return False
        try:
            return api.get(leased.id, timeout_s=LOOK_TIMEOUT_S).state is SandboxState.RUNNING
        except SandboxLostError:
            return False
        except ProviderError:
            return True  # a service that does not answer says nothing of its sandboxes

    def output(self) -> str:
        """Return the last of what the server printed; where its lease was lost, that as well."""
        leased, api = self._leased, self._api
        if leased is None or api is None or leased.ended.is_set():
            return ""
        lines = [] if leased.lost is None else [f"[{leased.lost}]"]
        try:
            lines.insert(0, api.logs(leased.id, OUTPUT_BYTES))
        except ProviderError as error:
            lines.append(f"[no output: {error}]")
        return "\n".join(line for line in lines if line)

    def _launch(self) -> str:
        deadline = time.monotonic() + self._spec.start_timeout_s
        api = SandboxApi(*self._service)
        try:
            made = api.create(self._spec)
        except BaseException:
            api.close()
            raise
        leased = _LeasedSandbox(api, made.id, self._spec.lease_s, self._stop_timeout_s)
        self._api, self._leased = api, leased
        self._ending = weakref.finalize(self, leased.end)
        return self._wait_until_healthy(api, leased, made, deadline)

    def _wait_until_healthy(
        self, api: SandboxApi, leased: _LeasedSandbox, seen: RemoteSandbox, deadline: float
    ) -> str:
        """Return where its server is, once that is healthy."""

        def look(left_s: float) -> str | None:
            nonlocal seen
            if seen.state is SandboxState.STARTING or seen.url is None:
                try:
                    seen = api.get(leased.id, wait_s=min(LONG_POLL_S, left_s))
                except (ProviderError, RuntimeError):  # a client that was closed raises the latter
                    if not leased.ended.is_set():
                        raise
            if seen.state is SandboxState.ENDED:
                why = seen.reason or "no reason given"
                raise ServerStartError(
                    f"expected the sandbox {leased.id} to start, but it ended: {why}", self.output()
                )
            if seen.state is SandboxState.STARTING or seen.url is None:
                return f"state {seen.state.value!r}"
            asked_s = min(self._service[2], max(deadline - time.monotonic(), 0.001))
            return healthy(seen.url, asked_s)

        def pause(seconds: float) -> None:
            if leased.ended.wait(seconds):
                raise SandboxLostError(
                    f"expected the sandbox {leased.id} to start, but it was stopped meanwhile"
                )
            if seen.state is SandboxState.RUNNING and not self.alive:
                raise ServerStartError(
                    f"expected the sandbox {leased.id} to be healthy, but it ended", self.output()
                )

        left_s = deadline + FAILURE_REASON_WAIT_S - time.monotonic()
        fault = wait_healthy(look, left_s, pause, factor=ELSEWHERE_FACTOR)
        if fault is None and seen.url is not None:
            return seen.url
        raise ServerStartError(
            f"expected {seen.url or f'the sandbox {leased.id}'} to be healthy within "
            f"{self._spec.start_timeout_s:g} s, got {fault}; can this machine reach it? raise start_timeout_s if it "
            "needs longer",
            self.output(),
        )
