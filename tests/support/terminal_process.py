"""A command in a pseudo-terminal, used like by a person."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

WAIT_TIMEOUT_S = 60.0
_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class TerminalProcess:
    """A running command.

    Attributes:
        process: The process.
        raw: Its whole output, escape sequences included.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int) -> None:
        self.process = process
        self.raw = ""
        self._terminal = terminal
        self._read_to = 0

    @property
    def shown(self) -> str:
        """The output as plain text."""
        return _STYLE.sub("", self.raw).replace("\r\n", "\n")

    @property
    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def until(self, text: str) -> str:
        """Wait for a text after the previously awaited one; return the output up to its end."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while (at := self.shown.find(text, self._read_to)) < 0:
            if not self._more(deadline):
                raise AssertionError(f"expected {text!r}, got: {self.shown[self._read_to :]}")
        matched = self.shown[self._read_to : at + len(text)]
        self._read_to = at + len(text)
        return matched

    def type(self, text: str) -> None:
        """Type a line."""
        self.keys(f"{text}\n")

    def keys(self, text: str) -> None:
        """Press keys: "\\x03" is Ctrl-C, "\\x04" Ctrl-D, "\\t" Tab."""
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the process sleeps.

        A signal between a prompt and the wait for input is only recorded by Python, and readline keeps waiting.
        """
        self._until_it_sleeps()
        self.keys("\x03")

    def ended(self) -> int:
        """Read the output to its end; return the exit status."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while self._more(deadline):
            pass
        return self.process.wait(WAIT_TIMEOUT_S)

    def _until_it_sleeps(self) -> None:
        if sys.platform != "linux":
            return  # the state is not available
        process = psutil.Process(self.process.pid)  # its state is that of the main thread
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while (state := process.status()) != psutil.STATUS_SLEEPING:
            if time.monotonic() > deadline:
                raise AssertionError(f"expected a process that waits, got one that is {state}: {self.shown}")
            time.sleep(0.01)

    def _more(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._terminal, select.POLLIN)
        ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"expected more by now, got: {self.shown}")
        try:
            part = os.read(self._terminal, 65_536)
        except OSError:  # on Linux: no process has the terminal open any more
            return False
        self.raw += part.decode(errors="replace")
        return bool(part)


@contextmanager
def in_terminal(
    *words: str, cwd: str | None = None, program: Sequence[str] = ("-m", "openenv_core.cli"), **environ: str
) -> Iterator[TerminalProcess]:
    """Run `ropewalk` in a terminal; processes left at the end are killed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *program, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", **environ},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    family: list[psutil.Process] = []
    try:
        running = TerminalProcess(process, ours)
        yield running
        if process.poll() is None:
            family = running.family
    finally:
        for left in family:
            if left.is_running():
                left.kill()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C sends SIGINT
