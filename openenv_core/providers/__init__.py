"""Providers start and stop the servers that clients talk to."""

from openenv_core.providers.base import AnyProvider, Provider
from openenv_core.providers.process import LocalProcessProvider

__all__ = ["AnyProvider", "LocalProcessProvider", "Provider"]
