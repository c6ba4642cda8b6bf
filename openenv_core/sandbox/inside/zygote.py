"""The zygote: imports once, prepares what all walls have in common, and forks when asked."""

import array
import contextlib
import gc
import importlib
import io
import json
import linecache
import os
import select
import signal
import socket
import sys
from types import ModuleType
from typing import Any, Final

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.cells import somewhere_to_write
from openenv_core.sandbox.inside.child import BY_SIGNAL, become, become_first
from openenv_core.sandbox.inside.runner import RequestRunner
from openenv_core.sandbox.inside.standing import FOR_THE_LOADER, Spec, Standing, Told, stand
from openenv_core.sandbox.kernel import libc, namespaces, seccomp

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
        runner = RequestRunner(theirs, 1 << 20)
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
            seccomp.assemble(seccomp.SeccompPolicy(pid=os.getpid(), shared_uid=shared))


def forget() -> None:
    """Leave nothing of ours among what code can import."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "openenv_core"]
    # Kept, since there is no telling what of them is needed yet.
    _kept.extend(sys.modules.pop(name) for name in ours)


MESSAGE_BYTES: Final = 1 << 16
DESCRIPTORS: Final = 8

LIBRARY: Final = """
abc ast asyncio base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum
fractions functools hashlib heapq inspect io itertools json linecache math numbers operator os pathlib pickle pprint
queue random re secrets shutil statistics string struct tempfile textwrap threading time traceback types typing
unicodedata uuid zlib
"""
"""What nearly all code imports."""


def main(descriptor: int) -> None:
    """Serve the supervisor at the other end of a descriptor, until it is gone."""
    for name in FOR_THE_LOADER:
        os.environ.pop(name, None)
    channel = socket.socket(fileno=descriptor)
    told = Told(**json.loads(channel.recv(MESSAGE_BYTES))["tell"])
    try:
        standing = stand(told)
    except Exception as error:
        say(channel, {"refused": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    narrow_imports([*told.shown])
    with somewhere_to_write(told.scratch):
        for name in (*LIBRARY.split(), *told.preload):
            try:
                importlib.import_module(name)
            except BaseException as error:
                say(channel, {"unimportable": f"{name}: {type(error).__name__}: {error}"})
                sys.exit(1)
        import_late()
        rehearse(filtered=standing.isolation != "process")
    forget()
    standing.settle()
    # The collector would write to every object's header, and so copy what is shared with the interpreters.
    gc.collect()
    gc.freeze()
    say(channel, {"ready": {"python": sys.version.split()[0], **standing.facts}})
    Forks(channel, standing).serve()


def narrow_imports(shown: list[str]) -> None:
    """Import from what code may read alone, not from wherever this project and its neighbours happen to lie."""
    below = tuple(os.path.realpath(path) + os.sep for path in shown)
    sys.path[:] = [path for path in sys.path if (os.path.realpath(path) + os.sep).startswith(below)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if _is_pythons_own(finder)]
    sys.path_importer_cache.clear()


def _is_pythons_own(finder: Any) -> bool:
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__.startswith("_frozen_importlib")


def say(channel: socket.socket, message: dict[str, Any]) -> None:
    """Tell the supervisor something."""
    with contextlib.suppress(OSError):  # it is gone; so will this process be
        channel.sendall(json.dumps(message).encode())


class Forks:
    """What was forked and lives.

    Args:
        channel: To the supervisor.
        standing: What every fork inherits.
    """

    def __init__(self, channel: socket.socket, standing: Standing) -> None:
        self._channel = channel
        self._standing = standing
        self._numbers: dict[int, int] = {}
        self._firsts: set[int] = set()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork and bury until the supervisor is gone."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Interpreters are paused after every execution.
        libc.hear_only_of_deaths()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif not self._serve_one():
                    self._standing.leave(self._numbers)
                    return

    def _serve_one(self) -> bool:
        data, ancillary, _, _ = self._channel.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(DESCRIPTORS * 4))
        if not data:
            return False
        descriptors = array.array("i")
        for _, _, rights in ancillary:
            descriptors.frombytes(rights)
        told = json.loads(data)
        self._standing.forks = len(self._numbers)
        standing = self._standing
        try:
            process = (
                namespaces.fork_session(privileged=standing.privileged) if standing.has_init else os.fork()
            )
            if process == 0:
                self._become(told, list(descriptors))
            self._numbers[process] = told["fork"]
            if standing.has_init or told["spec"]["snapshot"]:
                self._firsts.add(process)
        except OSError:
            say(self._channel, {"exit": told["fork"], "code": 1, "signal": None})
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _become(self, told: dict[str, Any], descriptors: list[int]) -> None:
        try:
            spec = Spec(**told["spec"])
            if self._standing.has_init:
                become_first(spec, self._standing, *descriptors)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            become(spec, self._standing, *descriptors)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            ended = os.waitstatus_to_exitcode(status)
            number = self._numbers.pop(process, None)
            if number is None:
                continue  # an orphan of the name space that this is the first process of
            code, by = (0, -ended) if ended < 0 else (ended, None)
            if process in self._firsts and code > BY_SIGNAL:
                code, by = 0, code - BY_SIGNAL
            self._firsts.discard(process)
            say(self._channel, {"exit": number, "code": code, "signal": by})
