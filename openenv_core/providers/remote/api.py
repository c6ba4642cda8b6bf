"""The requests of the sandbox interface, each with a deadline, a bound on its answer, and typed errors."""

import time
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token
from openenv_core.protocol.urls import shown
from openenv_core.providers.remote.errors import (
    SandboxAccessRefused,
    SandboxLimitReached,
    SandboxLost,
    SandboxRefused,
    SandboxServiceUnavailable,
)
from openenv_core.providers.remote.messages import (
    MAX_LOG_BYTES,
    MAX_WAIT_S,
    ROOT,
    Lease,
    Refused,
    Sandbox,
    SandboxSpec,
)

if TYPE_CHECKING:
    import httpx

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

        from openenv_core.providers.remote.transport import client_for

        try:
            url = httpx.URL(base_url)
        except (httpx.InvalidURL, TypeError) as error:
            why = "" if "@" in str(base_url) else f": {error}"  # which may have a part of the password
            raise ConfigurationError(
                f"expected the service's URL, got {shown(str(base_url))!r}{why}"
            ) from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationError(
                f"expected an http:// or https:// URL of the service, got {shown(base_url)!r}"
            )
        if token is not None and not is_bearer_token(token):
            raise ConfigurationError(
                f"expected a token of printable ASCII without spaces, got {len(token)} other characters"
            )
        self.base_url = str(url).rstrip("/")
        self._shown = shown(self.base_url)
        self.timeout_s = timeout_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = client_for(self.base_url, headers)
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)

    def create(self, spec: SandboxSpec) -> Sandbox:
        """Ask for a sandbox. It starts; its lease runs.

        Raises:
            SandboxRefused: The service says no.
            SandboxServiceUnavailable: It gave no usable answer. What it made all the same ends with its lease.
        """
        return self._sandbox("POST", "", body=spec)

    def get(self, sandbox_id: str, *, wait_s: float = 0.0, timeout_s: float | None = None) -> Sandbox:
        """Ask what became of a sandbox.

        Args:
            sandbox_id: Which.
            wait_s: How long the service may hold its answer back while the sandbox starts.
            timeout_s: Seconds for the answer, beyond those; by default the usual ones.

        Raises:
            SandboxLost: There is none of this name any more.
        """
        wait_s = min(wait_s, MAX_WAIT_S)
        params = {"wait_s": f"{wait_s:g}"} if wait_s > 0 else {}
        limit_s = wait_s + (self.timeout_s if timeout_s is None else timeout_s)
        return self._sandbox("GET", f"/{sandbox_id}", params=params, timeout_s=limit_s)

    def renew(self, sandbox_id: str, lease_s: float, timeout_s: float) -> Sandbox:
        """Let a sandbox live on.

        Raises:
            SandboxLost: There is none of this name any more.
        """
        return self._sandbox("POST", f"/{sandbox_id}/lease", body=Lease(lease_s=lease_s), timeout_s=timeout_s)

    def logs(self, sandbox_id: str, size: int) -> str:
        """Return the last of what a sandbox has printed.

        Raises:
            SandboxLost: There is none of this name any more.
        """
        params = {"bytes": str(min(size, MAX_LOG_BYTES))}
        return self._ask("GET", f"/{sandbox_id}/logs", params=params).decode(errors="replace")

    def delete(self, sandbox_id: str, timeout_s: float) -> None:
        """End a sandbox; one that is gone already is as good."""
        try:
            self._ask("DELETE", f"/{sandbox_id}", timeout_s=timeout_s)
        except SandboxLost:
            return

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()

    def _sandbox(self, method: str, path: str, **options: Any) -> Sandbox:
        body = self._ask(method, path, **options)
        try:
            found = Sandbox.model_validate_json(body)
        except ValidationError as error:
            raise SandboxServiceUnavailable(
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
                        raise SandboxServiceUnavailable(
                            f"expected an answer of at most {_MAX_ANSWER_BYTES} bytes within {limit_s:g} s from "
                            f"{self._shown}, got {len(answer)} bytes and no end"
                        )
        except self._errors as error:
            raise SandboxServiceUnavailable(
                f"expected an answer from the sandbox service at {self._shown} within {limit_s:g} s, got "
                f"{type(error).__name__}: {error}; is it running there? `ropewalk sandboxes` starts one"
            ) from error
        if not response.is_success:
            raise self._refusal(response, bytes(answer), path)
        return bytes(answer)

    def _refusal(self, response: "httpx.Response", body: bytes, path: str) -> Exception:
        try:
            said = Refused.model_validate_json(body)
        except ValidationError:
            said = Refused(detail=body[:300].decode(errors="replace").strip())
        status = response.status_code
        text = f"the sandbox service at {self._shown} answered {status}: {said.detail or 'without words'}"
        if status in (401, 403):
            return SandboxAccessRefused(text, status, said.code)
        if status == 404 and path and not said.code.startswith("image"):
            return SandboxLost(
                f"expected the sandbox {path.split('/')[1]} at {self._shown}, got 404: it ended, or its lease ran out"
            )
        if status == 429:
            return SandboxLimitReached(text, status, said.code, _seconds(response.headers.get("retry-after")))
        if status >= 500 or status < 400:
            return SandboxServiceUnavailable(text)
        return SandboxRefused(text, status, said.code)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
