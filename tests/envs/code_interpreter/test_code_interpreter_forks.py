"""Forks of interpreters, through a server: real processes, which start in their state and go their own ways."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from serving import eventually, serving

from envs.code_interpreter_env.models import (
    AnyAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    CodeObservation,
    Execute,
)
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend
from openenv_core import EnvClient
from openenv_core.client.vector import VectorClient
from openenv_core.errors import ExecutionError
from openenv_core.sandbox import Isolation
from openenv_core.tools import ToolObservation
from servers import create_app

SETTINGS = InterpreterSettings(
    preload=(),
    strongest_isolation=Isolation.PROCESS,  # the quickest to start
    minimum_isolation=Isolation.PROCESS,
    tasks="none",
    max_snapshot=True,
)


@asynccontextmanager
async def interpreters() -> AsyncIterator[VectorClient]:
    shared = SharedBackend(SETTINGS)
    app = create_app(
        lambda: CodeInterpreterEnvironment(shared),
        AnyAction,
        CodeInterpreterObservation | ToolObservation,
        env_name="code_interpreter",
        max_concurrent_envs=64,
        state_cls=CodeInterpreterState,
        lifespan=shared.lifespan,
    )
    async with serving(app) as address:
        client: EnvClient[Any, Any, Any] = EnvClient(f"http://{address}")
        members = await client.vector(1)
        try:
            yield members
        finally:
            await members.close()
            await eventually(lambda: app.sessions.active == 0)


async def run(client: VectorClient, *cells: tuple[int, str]) -> list[Any]:
    """Results of code, each in a member."""
    actions = [{"type": "execute", "code": code} for _, code in cells]
    (reply,) = await client.ask("step", members=[member for member, _ in cells], actions=actions)
    assert "errors" not in reply.fields, reply.fields["errors"]
    results = dict(zip(reply.fields["members"], reply.fields["rows"], strict=True))
    return [results[member]["result"] for member, _ in cells]


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


async def test_forks_have_variables_modules_and_files_and_go_their_own_ways() -> None:
    before = processes()
    async with interpreters() as client:
        await client.fork(0, 1)  # nothing has been run yet
        await client.ask("reset")
        with pytest.raises(ExecutionError, match="snapshot=true"):
            await client.fork(0, 1)
        await client.ask("reset", options={"snapshot": True, "files": {"f": "base"}}, members=[0])
        await run(client, (0, "import wave; wave.mark = 'loaded'; x = [0]"))
        snapshot = await client.snapshot(0)
        forks = await client.fork(0, 2)
        look = "x.append({0}); open('f', 'a').write('{0}'); wave.mark, x, open('f').read()"
        assert await run(client, *((one, look.format(one)) for one in (0, *forks))) == [
            f"('loaded', [0, {one}], 'base{one}')" for one in (0, *forks)
        ]
        alive = processes()
        for _ in range(12):
            restored = await client.restore(snapshot)
            assert await run(client, (restored[0], "x, open('f').read()")) == ["([0], 'base')"]
            await client.end(restored)
        await eventually(lambda: processes() <= alive + 4)  # the last ones are reaped with the next fork
        await client.end(snapshots=[snapshot])
        # The first may end before its forks, which can be forked on.
        await client.end([0])
        (deeper,) = await client.fork(forks[0], 1)
        assert await run(client, (deeper, "x"), (forks[0], "x")) == [f"[0, {forks[0]}]"] * 2
    await eventually(lambda: processes() <= before)


async def test_client_cancelled_while_forking_leaves_no_process() -> None:
    before = processes()
    async with interpreters() as client:
        await client.ask("reset", options={"snapshot": True})
        await run(client, (0, "x = 1"))
        forking = asyncio.create_task(client.fork(0, 8))
        await asyncio.sleep(0.005)
        await client.close()
        with pytest.raises(Exception, match="closed"):
            await forking
    await eventually(lambda: processes() <= before)


async def test_snapshot_survives_cancelled_restores() -> None:
    before = processes()
    shared = SharedBackend(SETTINGS)
    first = CodeInterpreterEnvironment(shared)
    await first.reset_async(snapshot=True)
    await first.step_async(Execute(code="x = 1"))
    snapshot = await first.snapshot()
    others = [CodeInterpreterEnvironment(shared) for _ in range(4)]
    for milliseconds, other in enumerate(others[1:], 1):
        restoring = asyncio.create_task(other.restore(snapshot))
        await asyncio.sleep(3 * milliseconds / 1000)
        restoring.cancel()
        await asyncio.wait([restoring])
    await others[0].restore(snapshot)
    seen = await others[0].step_async(Execute(code="print(x)"))
    assert isinstance(seen, CodeObservation)
    assert seen.stdout == "1\n"
    await snapshot.close()
    await asyncio.gather(*(one.close_async() for one in (first, *others)))
    await eventually(lambda: processes() <= before)
