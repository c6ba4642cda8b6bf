"""The caller's side of an environment server."""

from openenv_core.client.base import EnvClient
from openenv_core.client.generic import GenericAction, GenericEnvClient
from openenv_core.client.sync import SyncEnvClient

__all__ = ["EnvClient", "GenericAction", "GenericEnvClient", "SyncEnvClient"]
