"""A service of sandboxes, and providers on it."""

import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serving import serving

from openenv_core.providers.remote import RemoteSandboxProvider
from servers.sandboxes.app import SandboxApp
from servers.sandboxes.backends import Backend, local_backend
from servers.sandboxes.limits import SandboxLimits
from servers.settings import ServerSettings

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-good-length"
SUPPORT = Path(__file__).parents[1] / "support"
TINY = [sys.executable, "-I", "-S", str(SUPPORT / "tiny_health.py"), "{port}"]


@asynccontextmanager
async def service(
    backend: Backend = local_backend, **limits: Any
) -> AsyncIterator[tuple[SandboxApp, "Callable[..., RemoteSandboxProvider]"]]:
    """Run a service; yield it, and what makes providers on it."""
    settings = ServerSettings(tokens=(TOKEN, OTHER), max_body_bytes=100_000)
    app = SandboxApp(settings, SandboxLimits(**{"allow_commands": True, **limits}), backend)
    async with serving(app) as address:

        def provider(command: list[str] | None = None, **options: Any) -> RemoteSandboxProvider:
            options = {"token": TOKEN, "start_timeout_s": 20, **options}
            if "image" not in options:
                options["command"] = TINY if command is None else command
            return RemoteSandboxProvider(f"http://{address}", **options)

        yield app, provider


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "openenv-sandbox-lease"]
