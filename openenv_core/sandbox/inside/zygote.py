"""The zygote: imports once, then forks an interpreter whenever it is asked to.

It runs nobody's code but ours. It ends when its supervisor does, and what it forked ends with it.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, Final

from openenv_core.sandbox.inside.child import become, become_first
from openenv_core.sandbox.inside.first import BY_SIGNAL
from openenv_core.sandbox.inside.rehearsal import forget, import_late, rehearse
from openenv_core.sandbox.inside.standing import Standing, stand
from openenv_core.sandbox.inside.told import FOR_THE_LOADER, Spec, Told
from openenv_core.sandbox.inside.writing import somewhere_to_write
from openenv_core.sandbox.kernel import libc, namespaces

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
                    self._bury()
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

    def _bury(self) -> None:
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
