"""Kernels by the REST interface of Jupyter: made, interrupted, deleted."""

import asyncio
import json
import ssl
from functools import cache
from typing import Any, Final

import httpx

from openenv_core.proxies import proxy_for

from ..hosted import HostFailure
from .settings import JupyterSettings

KERNELS: Final = "/api/kernels"
MOST_BYTES: Final = 1 << 20
MOST_WORDS: Final = 300


class NoRoom(HostFailure):
    """The gateway has as many kernels as it may have."""


class Gateway:
    """The gateway, asked by coroutines of one loop. Nothing is sent twice.

    Args:
        settings: How it is reached.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """

    def __init__(self, settings: JupyterSettings) -> None:
        self._settings = settings
        transport = httpx.AsyncHTTPTransport(
            verify=_trust() if settings.url.startswith("https://") else False, proxy=proxy_for(settings.url)
        )
        self._http = httpx.AsyncClient(
            transport=transport,
            headers={"Accept-Encoding": "identity"} | settings.headers,
            follow_redirects=False,  # it may lead to somebody who must not get the token
            trust_env=False,
        )

    async def check(self) -> None:
        """See that there is a gateway that lets us in and has kernels of the name.

        Raises:
            HostFailure: There is none, or it has not.
        """
        said = await self._asked("GET", "/api/kernelspecs")
        known = said.get("kernelspecs") if isinstance(said, dict) else None
        if not isinstance(known, dict):
            raise HostFailure(f"expected {self._settings.url} to list its kernels, got something else")
        name = self._settings.kernel_name
        if name is not None and name not in known:
            raise HostFailure(
                f"expected the gateway to have kernels named {name!r}, it has {', '.join(known) or 'none'}"
            )

    async def create(self) -> str:
        """Start a kernel, and return its id.

        Raises:
            NoRoom: The gateway has as many as it may have.
            HostFailure: It did not start one.
        """
        # With an environment of its own, if an empty one, a kernel does not inherit the gateway's, token and all.
        body: dict[str, Any] = {"env": {}}
        if self._settings.kernel_name is not None:
            body["name"] = self._settings.kernel_name
        said = await self._asked("POST", KERNELS, body, self._settings.start_s)
        kernel = said.get("id") if isinstance(said, dict) else None
        if not isinstance(kernel, str) or not kernel.replace("-", "").isalnum():
            raise HostFailure(
                f"expected {self._settings.url} to name the kernel it started, got something else"
            )
        return kernel

    async def interrupt(self, kernel: str) -> None:
        """Have a kernel stop what it does, as Ctrl-C would.

        Raises:
            HostFailure: The gateway did not do it.
        """
        await self._asked("POST", f"{KERNELS}/{kernel}/interrupt")

    async def delete(self, kernel: str) -> None:
        """End a kernel; one that is gone is as good. One that does not listen takes the gateway seconds.

        Raises:
            HostFailure: The gateway did not do it.
        """
        await self._asked("DELETE", f"{KERNELS}/{kernel}", limit_s=3 * self._settings.request_s)

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.aclose()

    async def _asked(self, method: str, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        url = self._settings.address(path)
        limit_s = self._settings.request_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                status, content = await self._sent(method, url, body)
        except TimeoutError:
            raise HostFailure(f"expected {method} {url} to be answered within {limit_s:g} s") from None
        except httpx.TransportError as error:
            raise HostFailure(
                f"expected {method} {url} to be answered, got {type(error).__name__}: {error}"
            ) from None
        if status == 404 and method == "DELETE":
            return None
        if status >= 300:
            self._refuse(method, url, status, content)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise HostFailure(
                f"expected {method} {url} to be answered with JSON, got something else"
            ) from None

    async def _sent(self, method: str, url: str, body: Any) -> tuple[int, bytes]:
        request = self._http.build_request(method, url, json=body, timeout=httpx.Timeout(None))
        response = await self._http.send(request, stream=True)
        try:
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise HostFailure(
                        f"expected {method} {url} to be answered with less than {MOST_BYTES} bytes"
                    )
            return response.status_code, bytes(content)
        finally:
            await response.aclose()

    def _refuse(self, method: str, url: str, status: int, content: bytes) -> None:
        words = " ".join(content[: 4 * MOST_WORDS].decode("utf-8", "replace").split())[:MOST_WORDS]
        if self._settings.token is not None:
            words = words.replace(self._settings.token, "[token]")
        text = f"expected {method} {url} to succeed, got HTTP {status}: {words or '(nothing)'}"
        # 403 is the kernel gateway's word for its limit, 429 and 503 are those of others in front of it.
        if method == "POST" and status in (403, 429, 503):
            raise NoRoom(text)
        raise HostFailure(text)


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()
