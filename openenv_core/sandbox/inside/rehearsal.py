"""What every interpreter would do first is done once in the zygote, so that its forks share the memory of it.

A fork copies each page that it writes to, and nearly everything that Python does for the first time writes: code
objects specialize themselves, classes get their caches filled, modules are imported late. Done before, it costs a
session neither the time nor the memory.
"""

import importlib
import io
import json
import linecache
import os
import socket
import sys
from types import ModuleType
from typing import Final

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.runner import Runner
from openenv_core.sandbox.kernel import seccomp

LATE: Final = {"numpy": ("numpy.random", "numpy.linalg", "numpy.fft"), "matplotlib": ("matplotlib.pyplot",)}
"""What packages import only when it is asked for, and nearly all code asks for."""

CELLS: Final = (
    "import math\nnumbers = [math.sqrt(n) for n in range(10)]\nsum(numbers)",
    "def double(x: int) -> int:\n    return 2 * x\nprint(double(4), file=out)",
    "class Point:\n    def __init__(self, x):\n        self.x = x\nprint(f'{Point(1).x}', file=out)",
    "with open('/nowhere/at/all') as file:\n    pass",
    "1 / 0",
)
TURNS: Final = 24
"""Enough for every instruction on the way to have specialized itself."""

_kept: list[ModuleType] = []


def import_late() -> None:
    """Import what goes with what has been imported."""
    for name, others in LATE.items():
        if name in sys.modules:
            for other in others:
                importlib.import_module(other)


def rehearse(*, filtered: bool) -> None:
    """Run a few cells, and assemble what filters are made of.

    Args:
        filtered: Interpreters will have a filter.
    """
    streams = sys.stdin, sys.stdout, sys.stderr
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "w", encoding="utf-8") as out:
        runner = Runner(theirs, 1 << 20)
        runner.namespace["out"] = sys.stdout = sys.stderr = out
        for number in range(TURNS):
            for code in CELLS:
                message = {"id": number, "op": "execute", "code": code, "stdin": None}
                ours.sendall(frames.pack_request(json.loads(json.dumps(message))))
                theirs.sendall(runner.answer(frames.receive_request(theirs)))
                ours.recv(io.DEFAULT_BUFFER_SIZE)
    sys.stdin, sys.stdout, sys.stderr = streams
    linecache.clearcache()
    if filtered:
        for shared in (False, True):
            seccomp.assemble(seccomp.Policy(pid=os.getpid(), shared_uid=shared))


def forget() -> None:
    """Leave nothing of ours among what code can import."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "openenv_core"]
    # Kept, since there is no telling what of them is needed yet.
    _kept.extend(sys.modules.pop(name) for name in ours)
