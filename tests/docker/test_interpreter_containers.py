"""A container a session, for real: an image of the code interpreter, and one of a server that knows code alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from interpreter_image import CODING_SERVER, interpreter_image

from envs.code_interpreter_env.server.backends.containers import ContainerBackend, ContainerSettings
from openenv_core.errors import ConfigurationError
from openenv_core.providers.docker import ContainerOptions, Engine
from openenv_core.sandbox import FileRefused, Limits, SandboxClosed, SandboxUnavailable

__all__ = ["interpreter_image"]

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]

LIMITS = Limits(timeout_s=20.0)
LABEL = "ropewalk-test.interpreter"


def fenced(**fields: Any) -> ContainerOptions:
    # What the machine below the engine lets a container have is not what is tested here.
    weakest = {"CODE_INTERPRETER_MINIMUM_ISOLATION": "process"}
    known = {
        "network": "none",
        "memory": "512m",
        "stop_timeout_s": 0.0,
        "start_timeout_s": 200.0,
        "env_vars": weakest,
    }
    return ContainerOptions(**{**known, **fields})


@asynccontextmanager
async def started(image: str, size: int = 2, **fields: Any) -> AsyncIterator[ContainerBackend]:
    backend = ContainerBackend(
        ContainerSettings(image=image, size=size, options=fenced(**fields), lease_s=240)
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def test_a_session_in_a_container(engine: Engine, interpreter_image: str) -> None:
    async with started(interpreter_image, labels={LABEL: "session"}) as backend:
        session = await backend.open(LIMITS)
        other = await backend.open(LIMITS)
        first = await session.execute("import sys\nx = 20\nprint('hé')\nprint('low', file=sys.stderr)\nx + 1")
        assert (first.status, first.stdout, first.stderr, first.result) == ("ok", "hé\n", "low\n", "21")
        assert (first.isolation, first.execution_count) == ("container", 1)
        assert (await session.execute("print(input())", stdin="a line")).stdout == "a line\n"
        ran = await session.execute("x / 0")
        assert ran.error is not None
        assert (ran.status, ran.error.ename) == ("error", "ZeroDivisionError")
        assert (await other.execute("'x' in globals()")).result == "False"
        # No network, and no way back to the engine.
        ran = await session.execute("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)")
        assert ran.status == "error"
        ran = await session.execute("while True: pass", timeout_s=0.5)
        assert (ran.status, ran.exit_code) == ("timeout", 124)
        # Files.
        data = bytes(range(256)) * 1000
        assert (await session.put_file("sub/data.bin", data)).size == len(data)
        ran = await session.execute(
            "len(open('sub/data.bin', 'rb').read()), open('out.txt', 'w').write('hi')"
        )
        assert ran.result == f"({len(data)}, 2)"
        assert "out.txt" in [each.path for each in ran.files]
        assert await session.get_file("sub/data.bin") == data
        assert [each.path for each in await session.list_files()] == ["out.txt", "sub/data.bin"]
        for path in ("../up", "/etc/passwd", "missing"):
            with pytest.raises(FileRefused):
                await session.get_file(path)
        # Anew is another container.
        assert session._lease is not None
        before = session._lease.container.id
        await session.restart()
        assert session._lease.container.id != before
        assert (await session.execute("'x' in globals()")).result == "False"
        await session.close()
        await session.close()
        with pytest.raises(SandboxClosed):
            await session.execute("1")
    assert engine.labelled(f"{LABEL}=session") == []


async def test_a_container_that_dies_is_nobodys_code(engine: Engine, interpreter_image: str) -> None:
    async with started(interpreter_image) as backend:
        session = await backend.open(LIMITS)
        await session.execute("x = 1")
        assert session._lease is not None
        task = asyncio.create_task(session.execute("import time; time.sleep(15)"))
        await asyncio.sleep(1)
        engine.call("POST", f"/containers/{session._lease.container.id}/kill")
        ran = await task
        assert (ran.status, ran.exit_code, ran.error, ran.state_lost) == ("sandbox_error", -1, None, True)
        assert ran.reason is not None
        assert "exit code 137" in ran.reason
        after = await session.execute("'x' in globals()")
        assert (after.status, after.result, after.state_lost) == ("ok", "False", False)
        # One that dies while nothing runs is told by the next execution.
        engine.call("POST", f"/containers/{session._lease.container.id}/kill")
        ran = await session.execute("1")
        assert (ran.status, ran.state_lost) == ("sandbox_error", True)
        assert (await session.execute("2")).result == "2"


async def test_a_server_that_knows_code_alone(interpreter_image: str) -> None:
    async with started(interpreter_image, command=CODING_SERVER) as backend:
        session = await backend.open(LIMITS)
        ran = await session.execute("x = 20\nprint(x + 1)")
        assert (ran.status, ran.stdout, ran.exit_code, ran.isolation) == ("ok", "21\n", 0, "container")
        ran = await session.execute("x / 0")
        assert (ran.status, ran.exit_code) == ("error", 1)
        assert "ZeroDivisionError" in ran.stderr
        # Its Python can be asked for files.
        await session.put_file("sub/file", b"content")
        assert await session.get_file("sub/file") == b"content"
        assert [each.path for each in await session.list_files()] == ["sub/file"]
        # A time-out is kept from here.
        ran = await session.execute("while True: pass", timeout_s=1)
        assert (ran.status, ran.exit_code, ran.state_lost) == ("timeout", 124, True)
        ran = await session.execute("print('x' in globals())")
        assert (ran.status, ran.stdout) == ("ok", "False\n")
        # Its memory is the code's affair. Engines lose the kernel's notice where a container ends at once, but not
        # that of a child under a server that lives on: it counts as well.
        child = "[sys.executable, '-c', 'b\"x\" * (1 << 30)']"
        code = f"import subprocess, sys\nprint(subprocess.run({child}).returncode)"
        ran = await session.execute(code, timeout_s=20)
        assert (ran.status, ran.stdout) == ("ok", "-9\n")
        ran = await session.execute("x = [bytearray(1 << 20) for _ in range(2000)]", timeout_s=20)
        assert (ran.status, ran.exit_code, ran.state_lost) == ("memory", 137, True)
        assert (await session.execute("print(1)")).stdout == "1\n"


async def test_what_there_is_not_is_refused(engine: Engine, interpreter_image: str) -> None:
    with pytest.raises(SandboxUnavailable, match="no wait will bring one"):
        await ContainerBackend(ContainerSettings(image="ropewalk-test-never-built:1")).start()
    async with started(interpreter_image, size=1) as backend:
        with pytest.raises(ConfigurationError, match="snapshot"):
            await backend.open(LIMITS, snapshot=True)
        with pytest.raises(ConfigurationError, match="no_such_package"):
            await backend.open(LIMITS, packages=("no_such_package",))
