"""An environment that tries what no environment should. Only for containers."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from openenv_core import Action, Environment, Observation, State
from servers import create_app

MIB = 2**20


class Attempt(Action):
    what: str
    amount: int = 0
    text: str = ""


class Outcome(Observation):
    said: str = ""


class Hostile(Environment[Attempt, Outcome, State]):
    """Each step tries something and reports the result."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Outcome:
        self._state = State(episode_id=episode_id)
        return Outcome(said="ready")

    def step(self, action: Attempt) -> Outcome:
        try:
            return Outcome(said=str(getattr(self, f"_{action.what}")(action)), reward=0.0)
        except OSError as error:
            return Outcome(said=f"{type(error).__name__}: {error}", reward=0.0)

    @property
    def state(self) -> State:
        return self._state

    def _memory(self, action: Attempt) -> str:
        """Take some MiB in this process."""
        return f"took {len(b'x' * (action.amount * MIB)) // MIB} MiB"

    def _memory_of_child(self, action: Attempt) -> str:
        """Take some MiB in another process."""
        code = f"print(len(b'x' * {action.amount * MIB}))"
        return f"exit code {subprocess.run([sys.executable, '-c', code], check=False).returncode}"

    def _fork(self, action: Attempt) -> str:
        """Have so many processes at once."""
        children = []
        try:
            for _ in range(action.amount):
                pid = os.fork()
                if pid == 0:
                    time.sleep(60)
                    os._exit(0)
                children.append(pid)
        except OSError as error:
            return f"{len(children)} processes, then {type(error).__name__}"
        finally:
            for pid in children:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        return f"{len(children)} processes"

    def _connect(self, action: Attempt) -> str:
        """Connect to host:port."""
        host, _, port = action.text.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5):
            return "connected"

    def _write(self, action: Attempt) -> str:
        """Write some MiB to a file."""
        with open(action.text, "wb") as file:
            for _ in range(max(1, action.amount)):
                file.write(b"x" * MIB)
        return "written"

    def _read(self, action: Attempt) -> str:
        """Read a file."""
        return Path(action.text).read_text()

    def _execute(self, action: Attempt) -> str:
        """Run a file that it writes."""
        script = Path(action.text)
        script.write_text("#!/bin/sh\necho ran\n")
        script.chmod(0o755)
        return subprocess.run([str(script)], capture_output=True, text=True, check=False).stdout.strip()

    def _give_away(self, action: Attempt) -> str:
        """Change a file's owner, which takes a capability."""
        path = Path(action.text)
        path.write_text("")
        os.chown(path, 1234, 1234)
        return "changed"

    def _variable(self, action: Attempt) -> str:
        return os.environ.get(action.text, "")

    def _identity(self, action: Attempt) -> str:
        return f"{os.getuid()}:{os.getgid()}"

    def _interfaces(self, action: Attempt) -> str:
        return " ".join(name for _, name in socket.if_nameindex())

    def _processes(self, action: Attempt) -> str:
        return " ".join(
            sorted(Path(f"/proc/{p}/comm").read_text().strip() for p in os.listdir("/proc") if p.isdigit())
        )

    def _zombie(self, action: Attempt) -> str:
        """Leave a process whose parent is gone; tell how many nobody has waited for."""
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.waitpid(child, 0)
        end = time.monotonic() + 3
        while (count := self._zombies()) and time.monotonic() < end:
            time.sleep(0.1)
        return str(count)

    def _zombies(self) -> int:
        count = 0
        for each in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if each.isdigit() and "\nState:\tZ" in Path(f"/proc/{each}/status").read_text():
                    count += 1
        return count

    def _exit(self, action: Attempt) -> str:
        tell("ending on purpose")
        os._exit(action.amount)


def tell(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def main() -> None:
    """Serve, unless HOSTILE_START says otherwise."""
    how = os.environ.get("HOSTILE_START", "")
    if how == "die":
        tell("dying on purpose")
        sys.exit(3)
    if how == "silent":
        tell("saying nothing")
        time.sleep(600)
    if how == "memory":
        tell("taking memory")
        tell(str(len(b"x" * (1024 * MIB))))
    if how == "drip":
        drip()
    os.execvp(
        "ropewalk",
        ["ropewalk", "serve", "hostile:app", "--host", "0.0.0.0", "--port", os.environ.get("PORT", "8000")],
    )


def drip() -> None:
    """Answer /health a byte a time, for ever."""
    with socket.create_server(("0.0.0.0", 8000)) as listener:
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.1)


if __name__ == "__main__":
    main()

app = create_app(Hostile, Attempt, Outcome, max_concurrent_envs=8)
