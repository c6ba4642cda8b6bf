"""An event loop that comes late, as one that has much to do: what was in time is told as that."""

import asyncio
import select

import pytest

from openenv_core.sandbox import Limits, Sandbox

DEADLINE_S = 20.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


def wait_for(descriptor: int) -> None:
    """Wait until there is something to read, and keep the loop from reading it."""
    assert select.select([descriptor], [], [], DEADLINE_S)[0]


@pytest.mark.parametrize("seen", [True, False])
async def test_an_answer_that_is_there_is_no_time_out(sandbox: Sandbox, seen: bool) -> None:
    session = await sandbox.open()
    worker = session._worker
    assert worker is not None
    running = asyncio.create_task(session.execute("1 + 1", timeout_s=0.0 if seen else None))
    await asyncio.sleep(0)  # it is sent
    wait_for(worker.control.fileno())
    if not seen:  # a loop that looks at its clock first
        worker.stop("timeout")
    done, after = await running, await session.execute("3")
    await session.close()
    assert (done.status, done.result, after.result) == ("ok", "2", "3")


async def test_whoever_has_heeded_the_interrupt_is_not_killed(sandbox: Sandbox) -> None:
    session = await sandbox.open(Limits(grace_s=0.001))
    worker = session._worker
    assert worker is not None
    code = "import time\nx = 1\nprint('runs', flush=True)\ntime.sleep(60)"
    running = asyncio.create_task(session.execute(code))
    await asyncio.sleep(0)
    wait_for(worker._stdout._descriptor)
    worker.stop("timeout")
    overdue = asyncio.get_running_loop().time() + 0.01
    wait_for(worker.control.fileno())
    while asyncio.get_running_loop().time() < overdue:
        pass
    done, after = await running, await session.execute("x")
    await session.close()
    assert (done.status, done.state_lost) == ("timeout", False)
    assert (after.status, after.result) == ("ok", "1")


async def test_a_kill_that_crosses_with_the_answer_is_told_with_it(sandbox: Sandbox) -> None:
    session = await sandbox.open()
    worker = session._worker
    assert worker is not None
    running = asyncio.create_task(session.execute("1"))
    await asyncio.sleep(0)
    wait_for(worker.control.fileno())
    worker.kill()
    done, after = await running, await session.execute("2")
    await session.close()
    assert (done.status, done.state_lost) == ("killed", True)
    assert (after.status, after.result) == ("ok", "2")
