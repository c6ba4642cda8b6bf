"""Servers in hosted sandboxes, behind a small HTTP interface (docs/sandboxes.md)."""

from openenv_core.providers.remote.api import (
    SandboxAccessRefused,
    SandboxError,
    SandboxLimitReached,
    SandboxLost,
    SandboxRefused,
    SandboxServiceUnavailable,
)
from openenv_core.providers.remote.provider import RemoteSandboxProvider

__all__ = [
    "RemoteSandboxProvider",
    "SandboxAccessRefused",
    "SandboxError",
    "SandboxLimitReached",
    "SandboxLost",
    "SandboxRefused",
    "SandboxServiceUnavailable",
]
