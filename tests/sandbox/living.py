"""Helpers of the session tests: run several executions, list descendants of a process."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil

from openenv_core.sandbox import Execution, Isolation, Limits, Sandbox, SandboxConfig, SandboxSession
from openenv_core.sandbox.worker import Worker

OpenSession = Callable[..., Awaitable[SandboxSession]]

DEADLINE_S = 60.0
UNPROTECTED = SandboxConfig(strongest=Isolation.PROCESS, minimum=Isolation.PROCESS)


async def executed(
    sandbox: Sandbox, *codes: str, limits: Limits | None = None, **more: float
) -> list[Execution]:
    """Run codes in one session; return their executions."""
    session = await sandbox.open(limits or Limits())
    done = [await session.execute(code, **more) for code in codes]
    await session.close()
    return done


async def value(session: SandboxSession, code: str) -> str | None:
    """Return the result of code that must succeed."""
    done = await session.execute(code)
    assert done.status == "ok", done
    return done.result


def worker_of(session: SandboxSession) -> Worker:
    assert session._worker is not None
    return session._worker


def name_of(done: Execution) -> str | None:
    """Return the name of the exception that ended an execution, if one did."""
    return None if done.error is None else done.error.ename


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nobody tells of what is looked for
            await asyncio.sleep(0.02)


async def zygote_of(sandbox: Sandbox) -> int:
    """Return the zygote's pid, starting one if needed."""
    await (await sandbox.open()).close()
    assert sandbox.zygote_pid is not None
    return sandbox.zygote_pid


def descendants(pid: int) -> set[int]:
    running_pids = set()
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running_pids.add(process.pid)
    return running_pids
