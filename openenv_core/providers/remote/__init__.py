"""Servers in hosted sandboxes, behind a small HTTP interface (docs/sandboxes.md)."""

from openenv_core.providers.remote.api import (
    SandboxAccessRefusedError,
    SandboxError,
    SandboxLimitReachedError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxServiceUnavailableError,
)
from openenv_core.providers.remote.provider import RemoteSandboxProvider

__all__ = [
    "RemoteSandboxProvider",
    "SandboxAccessRefusedError",
    "SandboxError",
    "SandboxLimitReachedError",
    "SandboxLostError",
    "SandboxRefusedError",
    "SandboxServiceUnavailableError",
]
