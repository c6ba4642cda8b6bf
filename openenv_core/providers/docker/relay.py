"""Relays connections into a container without a published port, over one command that its engine runs there."""

import asyncio
import inspect
import os
import time
from contextlib import closing, suppress

from openenv_core.errors import EngineUnavailableError, OpenEnvError, ProviderError
from openenv_core.loop_thread import shared_loop
from openenv_core.providers.base import listen
from openenv_core.providers.docker import mux
from openenv_core.providers.docker.attach import ExecReader, attach
from openenv_core.providers.docker.engine import DockerEngine

HELLO_TIMEOUT_S = 20.0

MAX_OUTPUT_BYTES = 1000
"""How much an error shows of the output of an inner side that does not start."""

TRIES = 6
STEADY_UPTIME_S = 10.0
"""An inner side that lasted this long resets the count of failures; the relay ends after TRIES in a row."""

MIN_PAUSE_S = 0.05
"""Pause before an inner side is replaced; it doubles with each failure."""


class Relay:
    """Relays the connections of a port of the loopback interface into a container; it ends with this process.

    Its outer side runs in this process's loop thread, its inner side (`mux.py`) in the container, by its python3. An
    inner side that ends while the container is running is replaced.

    Args:
        engine: The container's engine.
        container: The container's id.
        port: The server's port in the container.
        host_port: The port to listen on; None for a free one.

    Attributes:
        port: The port to connect to.
        failure: Why the relay has ended; None while it is running.

    Raises:
        ProviderError: The host port is in use.
    """

    def __init__(self, engine: DockerEngine, container: str, port: int, host_port: int | None = None) -> None:
        try:
            self._listener = listen(host_port or 0)
        except OSError as error:
            raise ProviderError(f"expected host_port {host_port} to be free, got: {error}") from error
        self.port = int(self._listener.getsockname()[1])
        self.failure: str | None = None
        self._process = os.getpid()
        self._running = shared_loop().submit(self._run, engine, container, port)

    def close(self) -> None:
        """End the relay, and all its connections; in a fork of its owner, do nothing."""
        if os.getpid() == self._process:
            self._running.cancel()
            self._listener.close()

    async def _run(self, engine: DockerEngine, container: str, port: int) -> None:
        """Keep an inner side running until it has failed too often."""
        failures = 0
        while failures < TRIES:
            begin, reason = time.monotonic(), ""
            try:
                await self._run_once(engine, container, port)
            except EngineUnavailableError:
                failures = min(failures, TRIES - 2)  # containers may outlive a restart of their engine
            except (mux.MuxError, OpenEnvError, OSError) as error:
                reason = str(error) or type(error).__name__
            if "executable file not found" in reason:
                reason = "the image has no python3 in its PATH, which a container without a network needs"
                break
            failures = failures + 1 if time.monotonic() - begin < STEADY_UPTIME_S else 0
            await asyncio.sleep(MIN_PAUSE_S * 2**failures)
        self.failure = reason
        self._listener.close()

    async def _run_once(self, engine: DockerEngine, container: str, port: int) -> None:
        """Run an inner side, and carry connections to it."""
        command = ["python3", "-I", "-S", "-c", inspect.getsource(mux), str(port)]
        exec_id = await asyncio.to_thread(engine.create_exec, container, command, AttachStdin=True)
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            reader, writer = await attach(engine.address, exec_id)
        with closing(writer):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await _expect_hello(reader)
            outer = mux.Mux(reader, writer)
            with closing(await asyncio.start_server(outer.open, sock=self._listener.dup(), backlog=2048)):
                await outer.run()


async def _expect_hello(reader: ExecReader) -> None:
    """Read what an inner side says first; raise MuxError with the output if it is something else."""
    greeting = b""
    with suppress(asyncio.IncompleteReadError):
        greeting = await reader.readexactly(len(mux.HELLO))
    if greeting != mux.HELLO:
        output = greeting + await reader.read_rest(MAX_OUTPUT_BYTES)
        raise mux.MuxError(output.decode(errors="replace").strip() or "the inner side ended")
