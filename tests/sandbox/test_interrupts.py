"""Interrupts and timeouts at any moment: they end the running execution, keep the state, and spare the next one."""

import asyncio
import select

import pytest
import pytest_asyncio
from living import DEADLINE_S, OpenSession, name_of, until, worker_of

from openenv_core.sandbox import Execution, Limits, SandboxSession
from openenv_core.sandbox.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(grace_s=20.0)
"""A machine that stands still for a moment must not end what heeds an interrupt."""
ENDLESS = "while True: pass"


@pytest_asyncio.fixture(loop_scope="module")
async def session(open_session: OpenSession) -> SandboxSession:
    return await open_session(PATIENT)


async def start_execution(
    session: SandboxSession, code: str, timeout_s: float | None = None
) -> tuple[Worker, "asyncio.Task[Execution]"]:
    """Start an execution; return its worker and its task once the request was sent."""
    worker = worker_of(session)
    running = asyncio.create_task(session.execute(code, timeout_s=timeout_s))
    await asyncio.sleep(0)
    return worker, running


async def interrupt_at_once(session: SandboxSession, code: str) -> Execution:
    """Start an execution, interrupt it at once, and return it."""
    _, running = await start_execution(session, code)
    session.interrupt()
    return await running


def wait_for(descriptor: int) -> None:
    """Wait until a descriptor is readable without letting the event loop read it, as if the loop were busy."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(1000 * DEADLINE_S)


@pytest.mark.parametrize("snapshot", [False, True])
async def test_interrupt_before_the_code_starts_is_repeated(
    open_session: OpenSession, snapshot: bool
) -> None:
    session = await open_session(PATIENT, snapshot=snapshot)
    await session.put_file("f", b"kept")
    first = await interrupt_at_once(session, ENDLESS)
    await session.execute("x = 7")
    late = await session.execute(ENDLESS, timeout_s=0.0)
    again = await interrupt_at_once(session, ENDLESS)
    after = await session.execute("x, open('f').read()")
    assert (late.status, late.reason) == ("timeout", "it ran longer than 0 s")
    assert [first.exit_code, again.exit_code] == [130, 130]
    assert [name_of(done) for done in (first, late, again)] == ["KeyboardInterrupt"] * 3
    assert not any(done.state_lost for done in (first, late, again))
    assert after.result == "(7, 'kept')"


async def test_interrupt_before_the_interpreter_starts_is_kept(session: SandboxSession) -> None:
    await session.execute("import os; os.kill(os.getpid(), 9)")
    running = asyncio.create_task(session.execute(ENDLESS))
    await asyncio.sleep(0)
    assert not session.alive
    session.interrupt()
    done, after = await running, await session.execute("1")
    assert (done.exit_code, name_of(done), done.state_lost) == (130, "KeyboardInterrupt", False)
    assert after.result == "1"


CLEANUP = "import time\ntry:\n  time.sleep(60)\nfinally:\n  time.sleep(0.25); after = 'cleared'"
ONCE = "try:\n  signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n  after += 1\n"
OWN_INTERRUPTS = f"import signal, time\nafter = 0\n{ONCE}{ONCE}time.sleep(60)"
SLOW_STR = "after = 7\nclass Slow(Exception):\n  def __str__(self):\n    while True: pass\nraise Slow"


@pytest.mark.parametrize(
    ("code", "name", "after"),
    [
        (CLEANUP, "KeyboardInterrupt", "'cleared'"),
        (OWN_INTERRUPTS, "KeyboardInterrupt", "2"),
        (SLOW_STR, "Slow", "7"),
    ],
)
async def test_timeout_interrupts_the_code_once(
    session: SandboxSession, code: str, name: str, after: str
) -> None:
    done = await session.execute(code, timeout_s=0.5)
    assert (done.status, name_of(done), done.state_lost) == ("timeout", name, False)
    assert (await session.execute("after")).result == after


@pytest.mark.parametrize(
    ("handler", "snapshot"),
    [
        ("handle", False),
        ("signal.default_int_handler", True),
        pytest.param("handle", True, marks=pytest.mark.soak),
        pytest.param("signal.default_int_handler", False, marks=pytest.mark.soak),
    ],
)
async def test_own_signal_handler_is_installed_while_the_code_runs(
    open_session: OpenSession, handler: str, snapshot: bool
) -> None:
    session = await open_session(PATIENT, snapshot=snapshot)
    code = "import signal, sys\nseen = 0\ndef handle(*_):\n  global seen\n  seen += 1\n  sys.exit(3)\n"
    await session.execute(f"{code}signal.signal(signal.SIGINT, {handler})")
    early = await session.execute(ENDLESS, timeout_s=0.0)
    late = await session.execute("import time; time.sleep(60)", timeout_s=0.5)
    after = await session.execute(f"seen, signal.getsignal(signal.SIGINT) is {handler}")
    assert [(each.status, each.state_lost) for each in (early, late)] == [("timeout", False)] * 2
    assert after.result == ("(2, True)" if handler == "handle" else "(0, True)")


async def test_late_interrupt_has_no_effect(session: SandboxSession) -> None:
    worker = worker_of(session)
    await session.execute("import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)")
    worker.processes.begin()  # it goes on, and waits for a request
    worker.processes.interrupt()
    worker.processes.pause()
    after = await session.execute("1")
    assert (after.status, after.result) == ("ok", "1")


async def test_awaited_coroutines_are_cancelled_by_the_timeout(session: SandboxSession) -> None:
    code = (
        "try:\n  print('begun', flush=True)\n  while True:\n    await asyncio.sleep(0.01)\n    n += 1\n"
        "finally:\n  cleared = True"
    )
    await session.execute("import asyncio\nn, cleared = 0, False")
    worker, running = await start_execution(session, code)
    await until(lambda: worker._written > 0)
    worker.stop("timeout")
    done = await running
    before = await session.execute("n, cleared")
    after = await session.execute("await asyncio.sleep(0.1)\nn, cleared")
    assert (done.status, done.state_lost) == ("timeout", False)
    assert before.result == after.result
    assert (after.result or "").endswith("True)")


async def test_snapshot_survives_a_timeout_before_the_code_starts(open_session: OpenSession) -> None:
    session = await open_session(Limits(grace_s=0.0), snapshot=True)
    await session.execute("x = 7")
    for _ in range(5):
        done = await session.execute(ENDLESS, timeout_s=0.0)
        assert (done.status, done.state_lost) == ("timeout", False)
    after = await session.execute("x")
    assert after.result == "7"


@pytest.mark.parametrize("grace_s", [pytest.param(0.0, marks=pytest.mark.soak), 20.0])
async def test_interrupt_of_the_parent_is_forwarded_to_its_fork(
    open_session: OpenSession, grace_s: float
) -> None:
    session = await open_session(Limits(grace_s=grace_s), snapshot=True)
    # The fork does not tell at once that it is there.
    await session.execute(
        "x = 7\nimport os, time; os.register_at_fork(after_in_child=lambda: time.sleep(0.4))"
    )
    done = await session.execute(ENDLESS, timeout_s=0.2)
    after = await session.execute("x")
    assert (done.status, done.state_lost, after.result) == ("timeout", False, "7")
    assert name_of(done) == ("KeyboardInterrupt" if grace_s else None)


@pytest.mark.parametrize("deadline_expired", [True, False])
async def test_answer_that_has_arrived_is_not_a_timeout(
    session: SandboxSession, deadline_expired: bool
) -> None:
    worker, running = await start_execution(session, "1 + 1", timeout_s=0.0 if deadline_expired else None)
    wait_for(worker.control.fileno())
    if not deadline_expired:  # a loop that looks at its clock first
        worker.stop("timeout")
    done, after = await running, await session.execute("3")
    assert (done.status, done.result, after.result) == ("ok", "2", "3")


async def test_code_that_ended_on_the_interrupt_is_not_killed(open_session: OpenSession) -> None:
    session = await open_session(Limits(grace_s=0.001))
    worker, running = await start_execution(
        session, "import time\nx = 1\nprint('runs', flush=True)\ntime.sleep(60)"
    )
    wait_for(worker._stdout._descriptor)
    worker.stop("timeout")
    overdue = asyncio.get_running_loop().time() + 0.01
    wait_for(worker.control.fileno())
    while asyncio.get_running_loop().time() < overdue:
        pass
    done, after = await running, await session.execute("x")
    assert (done.status, done.state_lost) == ("timeout", False)
    assert (after.status, after.result) == ("ok", "1")


async def test_kill_that_crosses_the_answer_is_reported(session: SandboxSession) -> None:
    worker, running = await start_execution(session, "1")
    wait_for(worker.control.fileno())
    worker.kill()
    done, after = await running, await session.execute("2")
    assert (done.status, done.state_lost) == ("killed", True)
    assert (after.status, after.result) == ("ok", "2")
