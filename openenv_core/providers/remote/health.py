"""Whether the server in a sandbox is ready."""

import json
import time
from typing import Final

_MAX_BYTES: Final = 64 * 1024
_ASKS_FOR_A_TOKEN: Final = (401, 403)


def healthy(url: str, timeout_s: float) -> str | None:
    """Return None where /health says healthy, else what was seen.

    A server that wants a token for /health is ready too: the sandbox service's own token is not for it.

    Args:
        url: Where the server is.
        timeout_s: Seconds for the answer.
    """
    import httpx

    from openenv_core.providers.remote.transport import client_for

    deadline = time.monotonic() + timeout_s
    body = bytearray()
    try:
        with (
            client_for(url) as http,
            http.stream("GET", url.rstrip("/") + "/health", timeout=timeout_s) as response,
        ):
            if response.status_code in _ASKS_FOR_A_TOKEN:
                return None
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                    return "an answer on /health without an end"
        status = json.loads(body)["status"]
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code} on /health, without a status"
    return None if status == "healthy" else f"status {status!r}"
