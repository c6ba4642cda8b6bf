"""Code that runs inside a server's processes. Standard library only: it is copied as `sitecustomize`.

First on the server's path, that runs in every Python process of the server. A signal makes the process collect garbage,
so that only memory in use is measured.
"""

import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

COLLECTED = "ROPEWALK_CHECK_COLLECTED"
"""Environment variable with the path of a file: a process that has collected garbage adds a line."""

COLLECT = signal.SIGUSR2
"""Makes a process collect garbage."""


def _install_collecting(path: str) -> None:
    """Install a signal handler that collects garbage and returns the allocator's free memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def collect(*_: object) -> None:
        gc.collect()
        if trim is not None:
            trim(0)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{os.getpid()}\n".encode())
        finally:
            os.close(file)

    with suppress(ValueError):  # not in the main thread: a subinterpreter
        signal.signal(COLLECT, collect)


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one shadows."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    if COLLECTED in os.environ:
        _install_collecting(os.environ[COLLECTED])
    _run_next_sitecustomize()
