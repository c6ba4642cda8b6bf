"""Kernels of a real gateway: output and results, limits, and the ways a kernel ends."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_gateway import TOKEN, jupyter_gateway

from envs.code_interpreter_env.server.backends.jupyter import JupyterBackend, JupyterSettings
from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The grace is for machines that have much to do.
LIMITS = Limits(
    timeout_s=60.0, grace_s=20.0, output_bytes=1000, output_hard_bytes=200_000, outputs_bytes=200_000
)
BRIEF = replace(LIMITS, grace_s=0.3)
PNG = """
import base64
from IPython.display import display
display({'image/png': base64.b64encode(b'png').decode(), 'text/plain': '<Figure>'}, raw=True)
"""

DEAF = """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""

KILLER = """
import os, signal, time
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""

UNBOUNDED = "--ZMQChannelsWebsocketConnection.limit_rate=False"
"""By default a gateway drops what comes faster than 1 MB a second, so that no limit of ours is ever reached."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with jupyter_gateway(UNBOUNDED) as url:
        yield url


@asynccontextmanager
async def started(url: str) -> AsyncIterator[JupyterBackend]:
    backend = JupyterBackend(JupyterSettings(url=url, token=TOKEN))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def backend(gateway: str) -> AsyncIterator[JupyterBackend]:
    async with started(gateway) as made:
        yield made


async def stands(backend: JupyterBackend, kernel: Any) -> bool:
    """Whether the gateway knows a kernel."""
    response = await backend._http.get(backend.settings.address(f"/api/kernels/{kernel}"), timeout=20)
    return response.status_code == 200


async def test_state_output_results_and_errors(backend: JupyterBackend) -> None:
    session = await backend.open(LIMITS, packages=("json",))
    first = await session.execute("import sys\nx = 20\nprint('hé')\nprint('low', file=sys.stderr)\nx + 1")
    assert (first.status, first.stdout, first.stderr, first.result) == ("ok", "hé\n", "low\n", "21")
    assert (first.exit_code, first.execution_count, first.isolation, first.files) == (0, 1, "remote", ())
    second = await session.execute("x / 0")
    assert (second.status, second.exit_code, second.state_lost) == ("error", 1, False)
    assert second.error is not None
    assert (second.error.ename, second.error.evalue) == ("ZeroDivisionError", "division by zero")
    assert "\x1b" not in "".join(second.error.traceback)
    third = await session.execute("x;x")
    assert (third.result, third.execution_count, third.session_id) == ("20", 3, session.session_id)
    shown = await session.execute(PNG)
    assert [dict(each.data) for each in shown.outputs] == [{"image/png": "cG5n", "text/plain": "<Figure>"}]
    assert (await session.execute("x +")).error.ename == "SyntaxError"  # type: ignore[union-attr]
    names = "[n for n in globals() if 'marker' in n or n in ('source', 'answer', 'asked')]"
    assert (await session.execute(names)).result == "[]"  # our own work leaves none there
    environ = await session.execute("import os\nprint(sorted(os.environ.items()))")
    assert TOKEN not in environ.stdout
    assert "KG_AUTH_TOKEN" not in environ.stdout
    ran = await session.execute("print(input('? ') + '|' + sys.stdin.read())", stdin="a\nb\nc")
    assert ran.stdout == "? a|b\nc\n"
    assert (await session.execute("input()")).error.ename == "EOFError"  # type: ignore[union-attr]


@pytest.mark.soak
async def test_output_is_cut_and_a_flood_is_stopped(backend: JupyterBackend) -> None:
    session = await backend.open(LIMITS)
    await session.execute("x = 1")
    ran = await session.execute("print('é' * 1000)")
    assert (ran.status, ran.stdout, ran.cut.stdout) == ("ok", "é" * 500, True)
    ran = await session.execute("import time\nwhile True: print('x' * 500, flush=True), time.sleep(0.0005)")
    assert (ran.status, ran.exit_code, ran.state_lost) == ("output_limit", 137, False)
    assert (ran.stdout[:5], len(ran.stdout)) == ("xxxxx", 1000)
    assert (await session.execute("x")).result == "1"


async def test_files_go_in_and_out(backend: JupyterBackend) -> None:
    session = await backend.open(LIMITS)
    data = bytes(range(256)) * 20_000
    put = await session.put_file("sub/folder/data.bin", data)
    assert put.size == len(data)
    ran = await session.execute("import os\nopen('made.txt', 'w').write('hi')\nos.listdir('sub')")
    assert ran.result == "['folder']"
    assert [each.path for each in ran.files] == ["made.txt", "sub/folder/data.bin"]
    assert ran.files[1] == put
    assert await session.get_file("sub/folder/data.bin") == data
    assert (await session.execute("open('made.txt', 'a').write('!')")).files[0].size == 3
    assert (await session.execute("os.chdir('/')")).files == ()
    assert await session.get_file("made.txt") == b"hi!"
    await session.execute("os.chdir(os.path.dirname(os.path.realpath('/tmp')))")
    for path in ("../up", "/etc/passwd", "missing", "sub"):
        with pytest.raises(FileRefusedError):
            await session.get_file(path)
    await session.restart()
    assert await session.list_files() == []
    # Nobody sees the other's.
    await (await backend.open(LIMITS)).put_file("file", b"")
    assert await session.list_files() == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("code", "state_kept"),
    [
        ("while True: pass", True),
        ("import time; time.sleep(600)", True),
        (DEAF, False),
        ("import re; re.match('(a+)+b', 'a' * 40)", True),
    ],
)
async def test_code_that_takes_too_long(backend: JupyterBackend, code: str, state_kept: bool) -> None:
    session = await backend.open(LIMITS if state_kept else BRIEF)
    await session.execute("import time\nx = 1")
    ran = await session.execute(code, timeout_s=1.0)
    assert (ran.status, ran.exit_code, ran.state_lost) == ("timeout", 124, not state_kept)
    after = await session.execute("'x' in globals()")
    assert (after.status, after.result, after.state_lost) == ("ok", str(state_kept), False)


@pytest.mark.soak
async def test_ended_kernel_is_reported_once_and_its_folder_removed(backend: JupyterBackend) -> None:
    session = await backend.open(LIMITS)
    for code, status, exit_code in (
        ("exit()", "ok", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", 137),
        ("import os; os._exit(0)", "killed", 137),
        ("", "sandbox_error", -1),  # it goes while nothing runs
    ):
        folder = (await session.execute("x = 1; import os; print(os.getcwd(), end='')")).stdout
        if not code:
            assert session._kernel is not None
            await backend.delete(session._kernel)
        ran = await session.execute(code, timeout_s=60 if code else 1)
        assert (ran.status, ran.exit_code, ran.error, ran.state_lost) == (status, exit_code, None, True)
        after = await session.execute("'x' in globals()")
        assert (after.status, after.result, after.state_lost) == ("ok", "False", False)
        assert not Path(folder).exists()  # noqa: ASYNC240
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.execute("x = 1\nwhile True: pass"), 1)
    ran = await session.execute("x")
    assert (ran.status, ran.state_lost, "cancelled" in str(ran.reason)) == ("sandbox_error", True, True)
    assert (await session.execute("'x' in globals()")).result == "False"


async def test_kernels_are_given_back_also_that_of_a_cancelled_start(
    backend: JupyterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await backend.open(LIMITS)
    first = session._kernel
    assert await stands(backend, first)
    await session.restart()
    second = session._kernel
    assert second != first
    await session.close()
    await session.close()
    with pytest.raises(SandboxClosedError):
        await session.execute("1")
    create, requested, made = backend.create, asyncio.Event(), [first, second]

    async def create_recorded() -> str:
        requested.set()
        made.append(await create())
        return str(made[-1])

    monkeypatch.setattr(backend, "create", create_recorded)
    opening = asyncio.create_task(backend.open(LIMITS))
    await requested.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(made) == 3
    assert not any([await stands(backend, kernel) for kernel in made])


@pytest.mark.soak
async def test_unsupported_requests_are_refused(backend: JupyterBackend, gateway: str) -> None:
    with pytest.raises(ConfigurationError, match="snapshot"):
        await backend.open(LIMITS, snapshot=True)
    with pytest.raises(ConfigurationError, match="no_such_package"):
        await backend.open(LIMITS, packages=("no_such_package",))
    for settings, words in (
        (JupyterSettings(url=gateway, token="wrong-token-here"), "HTTP 401"),
        (JupyterSettings(url=gateway, token=TOKEN, kernel_name="fortran"), "python3"),
        (JupyterSettings(url="http://127.0.0.1:9", token=TOKEN), "ConnectError"),
    ):
        with pytest.raises(SandboxUnavailableError, match=words) as refused:
            await JupyterBackend(settings).start()
        assert "wrong-token-here" not in str(refused.value)
        assert "token-here" not in repr(settings)


@pytest.mark.soak
async def test_a_gateway_without_room_that_drops_output_and_dies() -> None:
    with jupyter_gateway("--KernelGatewayApp.max_kernels=1") as url:
        async with started(url) as backend:
            session = await backend.open(BRIEF)
            with pytest.raises(SandboxUnavailableError, match="HTTP 403"):
                await backend.open(LIMITS)
            roomy = replace(BRIEF, output_hard_bytes=100_000_000, output_bytes=50_000_000)
            session._limits = roomy
            ran = await session.execute("for _ in range(50): print('x' * 200_000, flush=True)")
            assert (ran.status, ran.cut.stdout) == ("ok", True)
            assert "IOPub" not in ran.stderr
            # The one place is enough to begin anew in, whatever the kernel before is at.
            ran = await session.execute(DEAF, timeout_s=1)
            assert (ran.status, ran.state_lost) == ("timeout", True)
            assert (await session.execute("1")).result == "1"
            ran = await session.execute(KILLER)
            assert (ran.status, ran.exit_code, ran.error) == ("sandbox_error", -1, None)
            ran = await session.execute("1")
            assert (ran.status, ran.state_lost) == ("sandbox_error", True)
            with pytest.raises(SandboxFailureError):
                await session.put_file("x", b"")
