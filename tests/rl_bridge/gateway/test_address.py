"""Where a gateway listens, and what is said if it cannot."""

import socket

import pytest

from rl_bridge.errors import ConfigError
from rl_bridge.gateway.app import Gateway, GatewayServer


async def test_an_address_that_is_taken_is_named() -> None:
    """Not by ending the process, as uvicorn does: the worker that a gateway is a part of plays other episodes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = GatewayServer(Gateway(), port=port)
        with pytest.raises(ConfigError, match=rf"at 127\.0\.0\.1:{port}.*already in use"):
            await server.start()
        await server.close()
    with pytest.raises(ConfigError, match=r"at no-such-host\.invalid:0"):
        await GatewayServer(Gateway(), host="no-such-host.invalid").start()
