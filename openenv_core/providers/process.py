"""A provider of servers in local processes."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Final

from openenv_core.errors import ProviderError, ServerStartError
from openenv_core.guard import guard_command
from openenv_core.packages import python_command
from openenv_core.providers.base import (
    LOOPBACK,
    RETRY_INTERVAL_S,
    TOKEN_FILE,
    TOKENS,
    OwnedServerProvider,
    health_of,
    listen,
    read_first_token,
    wait_healthy,
)

logger = logging.getLogger(__name__)

SERVE_COMMAND: Final = (*python_command("openenv_core.cli"), "serve", "{app}", "--fd", "{fd}")
"""The default command of a server."""

OUTPUT_BYTES: Final = 16_384
"""How much of the server's last output is kept for error messages."""

LOG_BYTES: Final = 16 << 20
"""Maximum size of a log, which is then renamed to `.1` and started anew."""

_TRACEBACK: Final = "Traceback (most recent call last):"

KILL_MARGIN_S: Final = 5.0
"""How long, beyond the server's stop timeout, its guard may take before it is killed too."""


@dataclass(eq=False, repr=False)
class LocalProcessProvider(OwnedServerProvider):
    """Serves an app in a local process, by default on a free port of the loopback interface.

    The port is bound here and inherited, so that no other process can take it, and connections made while the server
    starts wait in the accept queue. A small guard process between this process and the server ends the server when
    this process stops it or dies, however it dies.

    Tokens in this process's environment variables are not passed to the server: they are meant for servers started by
    hand, and this server's clients would not have them. Pass a server's tokens in `env_vars`.

    Args:
        app: `module:attribute` of the ASGI app.
        env_vars: Environment variables of the server, in addition to this process's own without those of tokens.
        cwd: The server's working directory, from which it can import; by default this process's.
        start_timeout_s: Seconds within which the server must become healthy.
        stop_timeout_s: Seconds that the server has to shut down.
        command: Command to run instead of `ropewalk serve`; `{app}` and `{fd}` are replaced by the app and the
            descriptor of the listening socket.
        log: A file to which the server's output is appended.
        host: IPv4 address to listen on; on any other than loopback the server needs a token in `env_vars`.
        port: Port to listen on; 0 for a free one.
    """

    app: str
    _: KW_ONLY
    env_vars: Mapping[str, str] | None = None
    cwd: str | None = None
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 5.0
    command: Sequence[str] | None = None
    log: Path | None = None
    host: str = LOOPBACK
    port: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._guard: subprocess.Popen[bytes] | None = None
        self._tail: _OutputTail | None = None

    @property
    def alive(self) -> bool:
        """Whether the server's process is running; False before the start."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def pid(self) -> int | None:
        """The pid of the guard, the server's parent process; None before the start."""
        return None if self._guard is None else self._guard.pid

    @property
    def token(self) -> str | None:
        """The first of the server's bearer tokens; None if `env_vars` has none."""
        return read_first_token(self.env_vars or {}, self.cwd or ".")

    def cordon(self) -> None:
        """Have the server refuse new sessions, while the open ones go on."""
        if self._guard is not None:
            self._guard.send_signal(signal.SIGUSR1)

    def output(self) -> str:
        """Return the end of the server's output, including standard error; "" before the start."""
        return "" if self._tail is None else self._tail.text()

    def _launch(self) -> str:
        self._guard = self._tail = None
        server = _GuardedServer(self.stop_timeout_s + KILL_MARGIN_S)
        self._ending = weakref.finalize(self, server.end)  # first: a Ctrl-C may come at any moment
        with server.stdin, self._listen() as listener:
            port = int(listener.getsockname()[1])
            guard = server.guard = self._guard = self._spawn(listener.fileno(), server.stdin)
        output = server.output = self._tail = _OutputTail(guard, self.log)
        self._wait_until_healthy(guard, port, output)
        return f"http://{self.host}:{port}"

    def _listen(self) -> socket.socket:
        try:
            return listen(self.port, host=self.host)
        except OSError as error:
            raise ProviderError(
                f"cannot listen on {self.host}:{self.port} for {self.app!r}: {error}; choose another port"
            ) from error

    def _spawn(self, fd: int, lifeline: IO[bytes]) -> "subprocess.Popen[bytes]":
        command = [
            argument.replace("{app}", self.app).replace("{fd}", str(fd))
            for argument in self.command or SERVE_COMMAND
        ]
        inherited = {name: value for name, value in os.environ.items() if name not in (TOKENS, TOKEN_FILE)}
        try:
            return subprocess.Popen(
                guard_command(command, grace_s=self.stop_timeout_s, inherited_fd=fd),
                stdin=lifeline,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env={**inherited, **(self.env_vars or {})},
                pass_fds=(fd,),
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(f"expected to start {' '.join(command)!r}, got: {error}") from error

    def _wait_until_healthy(self, guard: "subprocess.Popen[bytes]", port: int, output: "_OutputTail") -> None:
        def pause(seconds: float) -> None:
            try:
                guard.wait(seconds)
            except subprocess.TimeoutExpired:
                return
            output.join(KILL_MARGIN_S)  # its last words, which a thread reads that may lack a core
            raise ServerStartError(
                f"expected {self.app!r} to start, but its process ended with status {guard.returncode}; "
                "the output tells why",
                output.text(),
            )

        token = self.token

        def probe(left_s: float) -> str | None:
            return health_of(port, left_s, token, host=self.host)

        wait_healthy(self.app, probe, self.start_timeout_s, pause, output=output.text)


class _OutputTail(threading.Thread):
    """Reads a process's output, so that it never blocks, and keeps the end of it; a log has all of it."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path | None) -> None:
        super().__init__(name="openenv-output", daemon=True)
        assert process.stdout is not None
        self._stream, self._retained = process.stdout, bytearray()
        self._log = _append_log(b"", log) if log is not None else None
        self.start()

    def text(self) -> str:
        """Return the retained output. Waits briefly for the rest of the output of a process that has ended."""
        self.join(RETRY_INTERVAL_S)
        return bytes(self._retained).decode(errors="replace")

    def run(self) -> None:
        """Read until the end."""
        # A start that is stopped from another thread may find the stream closed: `end` knew of no reader yet.
        with contextlib.suppress(ValueError), self._stream as stream:
            while chunk := os.read(stream.fileno(), 65_536):
                self._retained += chunk
                del self._retained[:-OUTPUT_BYTES]
                if self._log is not None:
                    self._log = _append_log(chunk, self._log)


def last_traceback(output: str) -> str:
    """Return the last traceback in a server's output, with its exception; "" if there is none."""
    _, header, block = output.rpartition(_TRACEBACK)
    lines = block.strip("\n").splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith(" ")), len(lines))
    return "\n".join([header, *lines[: end + 1]]) if header else ""


def _append_log(chunk: bytes, log: Path) -> Path | None:
    """Append to a log and return its path; None if it cannot be written, so that the server goes on without it."""
    try:
        with log.open("ab") as file:
            file.write(chunk)
            if file.tell() > LOG_BYTES:
                log.replace(f"{log}.1")
    except OSError as error:
        logger.warning("what a server prints is no longer added to %s: %s", log, error)
        return None
    return log


class _GuardedServer:
    """A server under a guard, which ends both when the lifeline is closed.

    The lifeline is there before the guard, so that a start can be undone wherever a Ctrl-C interrupts it.

    Args:
        timeout_s: Seconds that the guard has to end.

    Attributes:
        stdin: The guard's end of the lifeline.
        guard: The guard; None until it is known.
        output: The server's output; None until it is read.
    """

    def __init__(self, timeout_s: float) -> None:
        read, write = os.pipe()
        self.stdin: IO[bytes] = open(read, "rb", 0)  # noqa: SIM115 - closed once the guard has it
        self._lifeline: IO[bytes] = open(write, "wb", 0)  # noqa: SIM115 - closed by end()
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self.guard: subprocess.Popen[bytes] | None = None
        self.output: _OutputTail | None = None

    def end(self) -> None:
        """Stop the guard, which stops the server, and wait for both; kill the guard if it does not end in time.

        Does not stop them in a fork of the owner.
        """
        self._lifeline.close()
        guard = self.guard
        if guard is None:
            return
        if os.getpid() != self._owner:
            guard.poll()  # marks it as ended, because it is not a child of this process
            return
        guard.terminate()  # a fork of this process may hold the pipe open
        try:
            guard.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
        if self.output is not None:
            self.output.join(KILL_MARGIN_S)
        elif guard.stdout is not None:
            guard.stdout.close()
