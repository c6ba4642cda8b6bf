"""What this machine can do: probes, and the self-test that a level has to pass."""

import asyncio
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox.config import Isolation, Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.session import SandboxSession


def opens_a_socket(_: dict[str, Any]) -> None:
    """Reach for the network."""
    import socket

    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


def asks_the_kernel_over_netlink(_: dict[str, Any]) -> None:
    """Reach for the network's configuration."""
    import socket

    socket.socket(16, socket.SOCK_RAW, 0).close()


def forks(_: dict[str, Any]) -> None:
    """Start a process."""
    import os

    if os.fork() == 0:
        os._exit(0)
    os.wait()


def keeps_memory_without_a_file(_: dict[str, Any]) -> None:
    """Have memory that no limit of this process counts."""
    import os

    os.close(os.memfd_create("probe"))


def signals_the_supervisor(told: dict[str, Any]) -> None:
    """Reach another process."""
    import os

    os.kill(told["supervisor"], 0)


def limits_the_supervisor(told: dict[str, Any]) -> None:
    """Change what another process may use."""
    import resource

    resource.prlimit(told["supervisor"], resource.RLIMIT_NOFILE)


def mounts(_: dict[str, Any]) -> None:
    """Change what this process sees."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b".", b"tmpfs", 0, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reads_outside(told: dict[str, Any]) -> None:
    """Read a file that everybody may read."""
    with open(told["canary"]) as file:
        file.read()


def writes_outside(told: dict[str, Any]) -> None:
    """Write a file that everybody may write."""
    with open(told["canary"], "a") as file:
        file.write("!")


def lists_outside(told: dict[str, Any]) -> None:
    """List a folder that everybody may list."""
    import os

    os.listdir(told["folder"])


def sees_the_supervisor(told: dict[str, Any]) -> None:
    """Find the machine's processes."""
    import os

    os.stat(f"/proc/{told['supervisor']}")


def sees_the_file(told: dict[str, Any]) -> None:
    """Find out that a file is there."""
    import os

    os.stat(told["canary"])


Probe = Callable[[dict[str, Any]], None]

_AT_SECCOMP: Final[tuple[Probe, ...]] = (
    opens_a_socket,
    asks_the_kernel_over_netlink,
    forks,
    keeps_memory_without_a_file,
    signals_the_supervisor,
    limits_the_supervisor,
    mounts,
)
_AT_LSM: Final = (*_AT_SECCOMP, reads_outside, writes_outside, lists_outside)
_AT_NAMESPACES: Final = (*_AT_LSM, sees_the_supervisor, sees_the_file)

PROBES: Final[dict[Isolation, tuple[Probe, ...]]] = {
    Isolation.PROCESS: (),
    Isolation.SECCOMP: _AT_SECCOMP,
    Isolation.LSM: _AT_LSM,
    Isolation.NAMESPACES: _AT_NAMESPACES,
}
"""What has to fail on each rung."""


def source(isolation: Isolation) -> str:
    """Return code that defines `attack(told)`, which returns the names of the probes that were not stopped."""
    probes = PROBES[isolation]
    parts = ["from typing import Any", *(inspect.getsource(probe) for probe in probes)]
    names = ", ".join(probe.__name__ for probe in probes)
    parts.append(
        f"""
def attack(told):
    passed = []
    for probe in [{names}]:
        try:
            probe(told)
        except OSError:
            continue
        passed.append(probe.__name__)
    return passed
"""
    )
    return "\n".join(parts)


CONTENT: Final = "a canary of the self-test\n"


async def prove(isolation: Isolation, open_session: Callable[[Limits], Awaitable[SandboxSession]]) -> None:
    """Attack from within an interpreter.

    Args:
        isolation: The rung that is to be proved.
        open_session: Starts an interpreter on it.

    Raises:
        SandboxUnavailableError: An attack was not stopped, or the interpreter does not work.
    """
    session = await open_session(Limits(timeout_s=10.0))
    try:
        with _canary() as told:
            defined = await session.execute(source(isolation))
            if defined.status != "ok":
                raise SandboxUnavailableError(
                    f"an interpreter that runs code did not: {defined.error or defined.reason}"
                )
            call = await session.call("attack", [told])
            if call.execution.status != "ok":
                said = call.execution.error or call.execution.reason
                raise SandboxUnavailableError(f"the self-test did not end: {said}")
            passed = list(call.value)
            if await asyncio.to_thread(Path(told["canary"]).read_text) != CONTENT:
                passed.append("the canary has changed")
            if passed:
                raise SandboxUnavailableError(
                    f"the self-test was not stopped where it had to be: {', '.join(passed)}"
                )
    finally:
        await session.close()


@contextmanager
def _canary() -> Iterator[dict[str, Any]]:
    # Open to everybody, so that nothing but the sandbox stands before it.
    with tempfile.TemporaryDirectory(prefix="ropewalk-canary-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        file = folder / "canary"
        file.write_text(CONTENT)
        file.chmod(0o666)
        yield {"supervisor": os.getpid(), "canary": str(file), "folder": str(folder)}
