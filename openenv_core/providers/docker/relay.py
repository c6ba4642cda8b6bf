"""The way to the server of a container that publishes no port."""

import fcntl
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from openenv_core.errors import ProviderError
from openenv_core.providers.docker._wire import Address
from openenv_core.providers.health import LOOPBACK

SCRIPT: Final = Path(__file__).with_name("_relay.py")

_FIRST_FREE_FD: Final = 3
"""Below are the standard streams."""

END_S: Final = 5.0
BACKLOG: Final = 1024


class Relay:
    """A process that carries connections into a container, and ends with this one.

    Attributes:
        port: Where it listens, on the loopback interface.
    """

    def __init__(self, address: Address, container: str, port: int, host_port: int | None = None) -> None:
        try:
            bound = socket.create_server((LOOPBACK, host_port or 0), backlog=BACKLOG)
        except OSError as error:
            raise ProviderError(f"expected host_port {host_port} to be free, got: {error}") from error
        with bound:
            # A program whose standard streams are closed would otherwise have the socket take their place.
            listener = socket.socket(fileno=fcntl.fcntl(bound, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
        with listener:
            self.port = int(listener.getsockname()[1])
            command = [
                *(sys.executable, "-I", "-S", str(SCRIPT), str(listener.fileno()), str(os.getpid())),
                *(address.url, address.certificates or "", "1" if address.verify else "0"),
                *(container, str(port)),
            ]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                raise ProviderError(f"expected to start a relay into the container, got: {error}") from error

    def failure(self) -> str | None:
        """Return why there is no way in; None while there is one, or may be."""
        if self._process.poll() is None:
            return None
        assert self._process.stderr is not None
        with suppress(ValueError):
            return self._process.stderr.read(4096).decode(errors="replace").strip() or "the relay ended"
        return "the relay ended"

    def close(self) -> None:
        """End the relay."""
        process = self._process
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
