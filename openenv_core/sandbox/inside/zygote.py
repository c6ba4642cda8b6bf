"""The zygote: imports modules once, prepares the confinement, and forks interpreters on request."""

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
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import product
from typing import Any, Final

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.interpreter import pack
from openenv_core.sandbox.inside.runner import RequestRunner
from openenv_core.sandbox.inside.walls import (
    BY_SIGNAL,
    ForkSpec,
    Prepared,
    ZygoteSpec,
    become_init,
    become_interpreter,
    prepare,
)
from openenv_core.sandbox.kernel import libc, namespaces, seccomp

_LAZY_SUBMODULES: Final = {
    "numpy": ("numpy.random", "numpy.linalg", "numpy.fft"),
    "matplotlib": ("matplotlib.pyplot",),
}
"""Submodules that packages import lazily, and that nearly all code uses."""

_WARM_UP_CELLS: Final = (
    "import math\nnumbers = [math.sqrt(n) for n in range(10)]\nsum(numbers)",
    "def double(x: int) -> int:\n    return 2 * x\nprint(double(4), file=out)",
    "class Point:\n    def __init__(self, x):\n        self.x = x\nprint(f'{Point(1).x}', file=out)",
    "with open('/nowhere/at/all') as file:\n    pass",
    "1 / 0",
)
_WARM_UP_ROUNDS: Final = 24
"""Enough for Python to specialize every instruction on the way."""

_SCRATCH_BYTES: Final = 256 << 20


def warm_up(isolation: str) -> None:
    """Run a few cells, and assemble the system-call filters if interpreters will have one."""
    ours, theirs = socket.socketpair()
    with open(os.devnull, "w") as out, redirect_stdout(out), redirect_stderr(out), ours, theirs:
        runner = RequestRunner(theirs, 1 << 20)
        runner.cells.namespace["out"] = out
        for number in range(_WARM_UP_ROUNDS):
            for code in _WARM_UP_CELLS:
                message = {"id": number, "op": "execute", "code": code, "stdin": None}
                ours.sendall(pack(message))
                theirs.sendall(runner.answer(frames.receive_request(theirs)[0]))
                ours.recv(io.DEFAULT_BUFFER_SIZE)
    linecache.clearcache()
    if isolation != "process":
        kinds = ((os.getpid(), False, False), (None, True, False), (None, True, True), (None, False, True))
        for (pid, starts, forks), shared in product(kinds, (False, True)):
            groups = starts and isolation == "namespaces"
            policy = seccomp.SeccompPolicy(
                pid=pid, allow_subprocess=starts, allow_fork=forks, groups=groups, shared_uid=shared
            )
            seccomp.assemble(policy)


_MESSAGE_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 8

_LIBRARY: Final = """
abc ast asyncio base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum
fractions functools hashlib heapq inspect io itertools json linecache math numbers operator os pathlib pickle pprint
queue random re secrets shutil statistics string struct tempfile textwrap threading time traceback types typing
unicodedata uuid zlib
"""
"""Modules that nearly all code imports."""


def main(descriptor: int) -> None:
    """Serve the supervisor at the other end of a socket, until it is gone."""
    for name in frames.LOADER_VARIABLES:
        os.environ.pop(name, None)
    channel = socket.socket(fileno=descriptor)
    spec = ZygoteSpec(**json.loads(channel.recv(_MESSAGE_BYTES)))
    try:
        prepared = prepare(spec)
    except Exception as error:
        _send(channel, {"error": f"{type(error).__name__}: {error}", "is_configuration": False})
        sys.exit(1)
    _restrict_imports(spec.shown)
    # Each interpreter replaces these by its own.
    os.environ |= dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), _make_scratch(spec.scratch))
    for name in (*_LIBRARY.split(), *spec.preload):
        try:
            importlib.import_module(name)
        except BaseException as error:
            text = "expected modules that can be imported before interpreters are forked, got "
            text += f"{name}: {type(error).__name__}: {error}; install it beside this Python, or leave it out"
            _send(channel, {"error": text, "is_configuration": True})
            sys.exit(1)
    for name, submodules in _LAZY_SUBMODULES.items():
        if name in sys.modules:
            for submodule in submodules:
                importlib.import_module(submodule)
    warm_up(spec.isolation)
    if spec.scratch is None:
        namespaces.detach(namespaces.WORKSPACE)
    # Code must not be able to import this project's modules. They are kept alive, because they are still in use.
    ours = [name for name in sys.modules if name.partition(".")[0] == "openenv_core"]
    _kept_alive = [sys.modules.pop(name) for name in ours]
    prepared.settle()
    # Garbage collection would write to every object's header, and so copy pages shared with the interpreters.
    gc.collect()
    gc.freeze()
    _send(channel, {"ready": True})
    Forks(channel, prepared).serve()


def _make_scratch(scratch: str | None) -> str:
    """Return a folder for what imports write, which no session sees; without `scratch`, a temporary file system."""
    if scratch is not None:
        return tempfile.mkdtemp(prefix="zygote-", dir=scratch)
    quiet = namespaces.NO_SETUID | namespaces.NO_DEVICES
    namespaces.tmpfs(namespaces.WORKSPACE, quiet, size=_SCRATCH_BYTES, mode="0700")
    return namespaces.WORKSPACE  # sessions mount their own there later


def _restrict_imports(shown: list[str]) -> None:
    """Restrict imports to paths that code may read, excluding wherever this project is checked out."""
    below = tuple(os.path.realpath(path) + os.sep for path in shown)
    sys.path[:] = [path for path in sys.path if (os.path.realpath(path) + os.sep).startswith(below)]
    # Python's own finders are classes of these modules; those of editable installations are not.
    sys.meta_path[:] = [
        each for each in sys.meta_path if getattr(each, "__module__", "").startswith("_frozen_importlib")
    ]
    sys.path_importer_cache.clear()


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the supervisor is gone, and this process will end too
        channel.sendall(json.dumps(message).encode())


class Forks:
    """Forks interpreters on request, and reports their exits."""

    def __init__(self, channel: socket.socket, prepared: Prepared) -> None:
        self._channel = channel
        self._prepared = prepared
        self._sessions: dict[int, tuple[int, ForkSpec]] = {}  # by their first process
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork and reap until the supervisor is gone."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Interpreters are paused after every execution, which would send SIGCHLD too.
        libc.receive_only_sigchld()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif not self._serve_one():
                    self._kill_all()
                    return

    def _serve_one(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, _DESCRIPTORS)
        if not data:
            return False
        message = json.loads(data)
        number, spec = message["fork"], ForkSpec(**message["spec"])
        prepared = self._prepared
        prepared.forks = len(self._sessions)
        try:
            privileged = prepared.spec.privileged
            process = namespaces.fork_session(privileged=privileged) if prepared.has_init else os.fork()
            if process == 0:
                self._become_interpreter(spec, descriptors)
            self._sessions[process] = number, spec
        except OSError:
            _send(self._channel, {"exit": number, "code": 1, "signal": None})
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _become_interpreter(self, spec: ForkSpec, descriptors: list[int]) -> None:
        try:
            if self._prepared.has_init:
                become_init(spec, self._prepared, *descriptors)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            become_interpreter(spec, self._prepared, *descriptors)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)

    def _kill_all(self) -> None:
        for process, (_, spec) in self._sessions.items():
            # Without an init process, the first one of a session with snapshots ends the others.
            ends_others = spec.snapshot and not self._prepared.has_init
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(process, signal.SIGTERM if ends_others else signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            ended = os.waitstatus_to_exitcode(status)
            if process not in self._sessions:
                continue  # an orphan, reparented to the zygote
            number, spec = self._sessions.pop(process)
            code, by = (0, -ended) if ended < 0 else (ended, None)
            reports_signals = self._prepared.has_init or spec.snapshot
            if reports_signals and BY_SIGNAL < code < BY_SIGNAL + signal.NSIG:
                code, by = 0, code - BY_SIGNAL
            _send(self._channel, {"exit": number, "code": code, "signal": by})
