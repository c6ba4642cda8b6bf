"""The command `ropewalk`."""

from openenv_core.cli.command import Command

__all__ = ["Command"]
