"""How a URL is reached: through the proxy that the environment names, and never one to this machine itself."""

import ssl
from functools import cache

import httpx

from openenv_core.errors import ConfigurationError
from openenv_core.proxies import proxy_for


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
