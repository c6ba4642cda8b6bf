"""The client of an environment server."""

from typing import TYPE_CHECKING, Any

from openenv_core.client.env_client import EnvClient, SyncEnvClient
from openenv_core.client.generic import GenericAction, GenericEnvClient

if TYPE_CHECKING:
    from openenv_core.client.tools import MCPToolClient

__all__ = ["EnvClient", "GenericAction", "GenericEnvClient", "MCPToolClient", "SyncEnvClient"]


def __getattr__(name: str) -> Any:
    if name == "MCPToolClient":  # lazily: it imports the tool models, which other clients do not need
        from openenv_core.client.tools import MCPToolClient

        return MCPToolClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
