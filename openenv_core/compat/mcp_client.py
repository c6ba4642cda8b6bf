"""The released MCPToolClient: ours, with its only mode."""

from collections.abc import Sequence
from typing import Any

from openenv_core.client.tools import MCPToolClient as Ours
from openenv_core.errors import ConfigurationError


class MCPToolClient(Ours):
    """A session on a tool server; calls of tools are sent as JSON-RPC, as by the released client."""

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float | None = 60.0,
        *,
        mode: str | None = None,
        **settings: Any,
    ) -> None:
        """Make a client.

        Args:
            base_url: See `EnvClient`.
            connect_timeout_s: See `EnvClient`.
            message_timeout_s: See `EnvClient`.
            mode: "production", also if None; the environment variable OPENENV_CLIENT_MODE is not read.
            settings: Other arguments of `EnvClient`, by name: their positions differ between releases.

        Raises:
            ConfigurationError: Another mode.
        """
        if mode is not None and mode.lower() != "production":
            raise ConfigurationError(
                f"expected the mode 'production' for MCPToolClient, got {mode!r}; leave it out, use GenericEnvClient, "
                "or openenv_core.MCPToolClient, whose calls are steps"
            )
        super().__init__(base_url, connect_timeout_s, message_timeout_s, mode="production", **settings)


MCPClientBase = MCPToolClient
