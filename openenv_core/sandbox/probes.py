"""The self-test that an isolation level has to pass on this machine; `Sandbox.start` runs it level by level."""

import ast
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox.config import Isolation, Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.results import Interpreter

_AT_SECCOMP: Final = {
    "opens a socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()",
    "asks the kernel over netlink": "socket.socket(16, socket.SOCK_RAW, 0).close()",
    "forks": "os._exit(0) if os.fork() == 0 else os.wait()",
    "keeps memory without a file": "os.close(os.memfd_create('probe'))",
    "signals the supervisor": "os.kill(paths['supervisor'], 0)",
    "limits the supervisor": "resource.prlimit(paths['supervisor'], resource.RLIMIT_NOFILE)",
    "mounts": "mount()",
}
_AT_LSM: Final = _AT_SECCOMP | {
    "reads outside": "open(paths['canary']).read()",
    "writes outside": "open(paths['canary'], 'a').write('!')",
    "lists outside": "os.listdir(paths['folder'])",
}
_AT_NAMESPACES: Final = _AT_LSM | {
    "sees the supervisor": "os.stat('/proc/' + str(paths['supervisor']))",
    "sees the file": "os.stat(paths['canary'])",
}
PROBES: Final[dict[Isolation, dict[str, str]]] = {
    Isolation.PROCESS: {},
    Isolation.SECCOMP: _AT_SECCOMP,
    Isolation.LSM: _AT_LSM,
    Isolation.NAMESPACES: _AT_NAMESPACES,
}
"""Expressions that have to fail at each level, by the name of the attack."""

_ATTACK: Final = """
import ctypes, os, resource, socket

def mount():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b".", b"tmpfs", 0, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def passed(paths, probes):
    for name, probe in probes.items():
        try:
            eval(probe, globals(), {"paths": paths})
        except OSError:
            continue
        yield name

list(passed(%r, %r))
"""

_CONTENT: Final = "a canary of the self-test\n"


async def prove(isolation: Isolation, open_session: Callable[[Limits], Awaitable[Interpreter]]) -> None:
    """Run the level's attacks in an interpreter.

    Raises:
        SandboxUnavailableError: An attack succeeded, or the interpreter does not work.
    """
    session = await open_session(Limits(timeout_s=10.0))
    try:
        with _canary() as paths:
            done = await session.execute(_ATTACK % (paths, PROBES[isolation]))
            if done.status != "ok" or done.result is None:
                raise SandboxUnavailableError(f"the self-test did not end: {done.error or done.reason}")
            passed = list(ast.literal_eval(done.result))
            if await asyncio.to_thread(Path(paths["canary"]).read_text) != _CONTENT:
                passed.append("the canary has changed")
            if passed:
                raise SandboxUnavailableError(
                    f"expected every attack of the self-test to be stopped, got through: {', '.join(passed)}"
                )
    finally:
        await session.close()


@contextmanager
def _canary() -> Iterator[dict[str, Any]]:
    # Accessible to every user, so that only the sandbox protects it.
    with tempfile.TemporaryDirectory(prefix="ropewalk-canary-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        file = folder / "canary"
        file.write_text(_CONTENT)
        file.chmod(0o666)
        yield {"supervisor": os.getpid(), "canary": str(file), "folder": str(folder)}
