"""Servers whose interpreters do something for the checker: `hook`, run before anything else in them."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from openenv_core.checker.subject import RunningServer
from openenv_core.checker.watching import hook

COLLECT_S: Final = 5.0
"""Seconds that a process may take to throw its garbage away, unless it is busy with something else."""


@contextmanager
def hooked() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder for notes, and the environment variables that put the hook into a server."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-check-") as text:
        folder = Path(text)
        shutil.copyfile(hook.__file__, folder / "sitecustomize.py")
        path = os.pathsep.join(part for part in (text, os.environ.get("PYTHONPATH")) if part)
        yield folder, {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def collecting(folder: Path) -> Mapping[str, str]:
    """Return the further variables that make a server's processes throw their garbage away when told to."""
    return {hook.COLLECTED: str(folder / "collected")}


def collect(server: RunningServer, folder: Path) -> None:
    """Tell the processes of a server to throw their garbage away, and wait until they have."""
    notes = folder / "collected"
    told = 0
    notes.write_text("", encoding="utf-8")
    for pid in server.pids():
        if _listens(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, hook.COLLECT)
                told += 1
    deadline = time.monotonic() + COLLECT_S
    while len(notes.read_text(encoding="utf-8").split()) < told and time.monotonic() < deadline:
        time.sleep(0.01)


def _listens(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (hook.COLLECT - 1) & 1)
    return False
