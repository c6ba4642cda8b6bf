"""Sessions that survive a kill by a snapshot, and fork; nothing stays behind when a family has ended."""

import asyncio
import os
import select
import signal

import psutil
import pytest
import pytest_asyncio
from living import DEADLINE_S, OpenSession, descendants, name_of, until, value, worker_of, zygote_of

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    FileRefusedError,
    Limits,
    Sandbox,
    SandboxSession,
    SandboxUnavailableError,
)
from openenv_core.sandbox import worker as worker_module
from openenv_core.sandbox.kernel.identity import session_uid

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def session(open_session: OpenSession) -> SandboxSession:
    """A session that keeps snapshots."""
    return await open_session(snapshot=True)


SWALLOWS = "while True:\n  try:\n    import time; time.sleep(60)\n  except BaseException: pass"
ENDS_ITS_STATE = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(1)"

COUNTS_ITS_DESCRIPTORS = """
def descriptors():
    count = 0
    for one in range(64):
        try:
            os.fstat(one)
            count += 1
        except OSError:
            pass
    return count
"""


@pytest.mark.parametrize(
    ("code", "timeout_s", "status", "exit_code"),
    [
        ("x = 2\nimport os; os._exit(7)", None, "killed", 7),
        ("x = 2\nimport ctypes; ctypes.string_at(0)", None, "killed", 139),
        (f"x = 2\n{SWALLOWS}", 0.3, "timeout", 124),
        (f"x = 2\nimport os; os.fork()\n{SWALLOWS}", 0.3, "timeout", 124),
    ],
)
async def test_kill_undoes_only_the_killed_execution(
    open_session: OpenSession, code: str, timeout_s: float | None, status: str, exit_code: int
) -> None:
    session = await open_session(Limits(grace_s=0.1), snapshot=True)
    await session.execute("x = 1; y = [x]")
    done = await session.execute(code, timeout_s=timeout_s)
    assert (done.status, done.exit_code, done.state_lost) == (status, exit_code, False)
    assert await value(session, "x, y") == "(1, [1])"


async def test_branches_diverge(sandbox: Sandbox, session: SandboxSession) -> None:
    await session.execute("x = [0]; open('f', 'w').write('base')")
    branches = await session.fork(3)
    for number, branch in enumerate(branches):
        await branch.execute(f"x.append({number}); open('f', 'a').write('{number}')")
    assert [await value(branch, "x, open('f').read()") for branch in branches] == [
        f"([0, {number}], 'base{number}')" for number in range(3)
    ]
    assert await value(session, "x, open('f').read()") == "([0], 'base')"
    await session.close()
    # The first one's end is not that of the others, which can branch on.
    (deeper,) = await branches[0].fork(1)
    await asyncio.gather(*(branch.close() for branch in branches))
    assert await value(deeper, "x, open('f').read()") == "([0, 0], 'base0')"
    await deeper.close()
    assert sandbox.sessions == 0


async def test_session_without_snapshots_cannot_fork(open_session: OpenSession) -> None:
    session = await open_session()
    with pytest.raises(ConfigurationError, match="snapshot=True"):
        await session.fork(2)


async def test_parent_may_end_before_its_branches(sandbox: Sandbox) -> None:
    first = await sandbox.open(snapshot=True)
    await first.execute("x = 1")
    branch, other = await first.fork(2)
    done = await asyncio.wait_for(other.execute(ENDS_ITS_STATE), DEADLINE_S)
    assert (done.status, done.state_lost) == ("killed", True)
    assert [await value(each, "x") for each in (first, branch)] == ["1", "1"]  # it takes nobody along
    await other.close()
    done = await asyncio.wait_for(first.execute(ENDS_ITS_STATE), DEADLINE_S)
    assert (done.status, done.state_lost) == ("killed", True)
    assert "ended the interpreter" in (done.reason or "")
    assert await value(first, "'x' in dir()") == "False"
    assert await value(branch, "x") == "1"
    await first.close()
    assert await value(branch, "x") == "1"
    await branch.close()


async def test_end_of_the_zygote_is_reported_to_branches(sandbox: Sandbox) -> None:
    first = await sandbox.open(snapshot=True)
    branches = await first.fork(2)
    zygote = sandbox.zygote_pid
    assert zygote is not None
    os.kill(zygote, signal.SIGKILL)
    for session in (first, *branches):
        await until(lambda session=session: not session.alive)
        lost, after = await session.execute("1"), await session.execute("2")
        assert (lost.status, lost.state_lost) == ("sandbox_error", True), lost
        assert after.result == "2"
        await session.close()


async def test_forked_children_are_stopped_when_nothing_runs(sandbox: Sandbox) -> None:
    zygote = await zygote_of(sandbox)
    before = descendants(zygote)
    first = await sandbox.open(snapshot=True)
    (branch,) = await first.fork(1)
    busy = "import os\nif not os.fork():\n    while True: pass"
    for session in (first, branch):
        assert await value(session, busy) is None

    def children_are_stopped() -> bool:
        pids = descendants(zygote) - before
        try:
            family = [psutil.Process(pid) for pid in pids]
            ours = [process for process in family if process.ppid() in pids]  # all but the root
            return len(ours) >= 4 and {process.status() for process in ours} == {psutil.STATUS_STOPPED}
        except psutil.NoSuchProcess:
            return False  # one of those that end while a session is made

    await until(children_are_stopped)
    assert await value(branch, "6 * 7") == "42"
    await until(children_are_stopped)
    await first.close()
    await branch.close()
    await until(lambda: not descendants(zygote) - before)


@pytest.mark.skipif(session_uid(0) is None, reason="sessions have no users of their own here")
async def test_sandboxes_of_one_machine_share_no_user(sandbox: Sandbox) -> None:
    user = "import os; os.getuid()"
    async with Sandbox() as other:
        sessions = [await one.open() for one in (sandbox, other, sandbox, other)]
        assert len({await value(session, user) for session in sessions}) == 4
        for session in sessions:
            await session.close()
        await until(lambda: not (len(sandbox._users) or len(other._users)))


@pytest.mark.skipif(session_uid(0) is None, reason="sessions have no users of their own here")
async def test_user_of_a_living_family_is_not_reused(sandbox: Sandbox) -> None:
    user = "import os; os.getuid()"
    first = await sandbox.open(snapshot=True)
    (branch,) = await first.fork(1)
    await first.close()
    other = await sandbox.open()
    assert await value(other, user) != await value(branch, user)
    await branch.close()
    another = await sandbox.open()  # by now there is one to be had again
    assert len({await value(session, user) for session in (other, another)}) == 2
    await other.close()
    await another.close()
    assert len(sandbox._users) == 0


@pytest.mark.parametrize("by", ["cancel", "close"])
async def test_cancelled_fork_leaves_nothing_behind(sandbox: Sandbox, by: str) -> None:
    zygote = await zygote_of(sandbox)
    processes, descriptors = descendants(zygote), len(os.listdir("/proc/self/fd"))
    for milliseconds in range(0, 20, 4):
        session = await sandbox.open(snapshot=True)
        await session.put_file("f", b"x")
        forking = asyncio.create_task(session.fork(3))
        await asyncio.sleep(milliseconds / 1000)
        if by == "cancel":
            forking.cancel()
            (outcome,) = await asyncio.gather(forking, return_exceptions=True)
            # The interpreter is in step, and those that were made have ended.
            assert not session._turn.locked()
            assert await value(session, "open('f').read()") == "'x'"
            await session.close()
        else:
            await session.close()
            (outcome,) = await asyncio.gather(forking, return_exceptions=True)
        if isinstance(outcome, list):  # it was quicker
            await asyncio.gather(*(branch.close() for branch in outcome))
    assert (sandbox.sessions, len(sandbox._users)) == (0, 0)
    await until(lambda: descendants(zygote) == processes)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_fork_timeout_does_not_disturb_a_running_execution(sandbox: Sandbox) -> None:
    session = await sandbox.open(Limits(grace_s=20.0), snapshot=True)
    await session.execute("x = 1")
    running = asyncio.create_task(session.execute("open('begun', 'w').close()\nimport time; time.sleep(60)"))
    workspace = worker_of(session).workspace
    await until(lambda: any(file.path == "begun" for file in workspace.list()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await session.fork(2)
    assert not running.done()
    assert sandbox.sessions == 1
    session.interrupt()
    done = await running
    assert name_of(done) == "KeyboardInterrupt"
    await session.close()


async def test_late_branch_costs_the_state_as_a_sandbox_error(
    session: SandboxSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.execute("x = 1")
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "BRANCH_TIMEOUT_S", 0.0)
        with pytest.raises(SandboxUnavailableError, match="expected a branch"):
            await session.fork(1)
    lost = await session.execute("x")
    assert (lost.status, lost.state_lost) == ("sandbox_error", True)
    assert await value(session, "'x' in globals()") == "False"


async def test_interrupt_during_a_fork_ends_nothing(open_session: OpenSession) -> None:
    session = await open_session(Limits(grace_s=0.0), snapshot=True)
    await session.execute("x = 1")
    worker = worker_of(session)
    forking = asyncio.create_task(session.fork(1))
    while worker._answered is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    session.interrupt()
    (branch,) = await forking
    assert await value(session, "import time; time.sleep(0.1); x") == "1"
    assert await value(branch, "x") == "1"
    await branch.close()


async def test_concurrent_forks_share_requests(sandbox: Sandbox) -> None:
    session = await sandbox.open(snapshot=True)
    await session.execute(f"import os; x = 1\n{COUNTS_ITS_DESCRIPTORS}")
    descriptors = await value(session, "descriptors()")
    worker = worker_of(session)
    before, forking = worker._number, [asyncio.create_task(session.fork(count)) for count in (1, 2, 5, 2)]
    forks = await asyncio.gather(*forking)
    assert [len(branches) for branches in forks] == [1, 2, 5, 2]
    assert worker._number - before == 2  # of at most eight each
    branches = [branch for several in forks for branch in several]
    values = [await value(branch, "x, descriptors()") for branch in (session, *branches)]
    assert values == [f"(1, {descriptors})"] * 11  # nobody has those of another
    await asyncio.gather(session.close(), *(branch.close() for branch in branches))
    assert sandbox.sessions == 0


async def test_refused_forks_cost_no_other(sandbox: Sandbox) -> None:
    session = await sandbox.open(Limits(open_files=32), snapshot=True)
    await session.execute("import os; x = 1; held = [os.open('.', os.O_RDONLY) for _ in range(20)]")
    outcomes = await asyncio.gather(session.fork(1), session.fork(6), session.fork(1), return_exceptions=True)
    assert [isinstance(one, SandboxUnavailableError) for one in outcomes] == [False, True, False], outcomes
    await session.execute("for one in held: os.close(one)")
    branches = [outcomes[0][0], outcomes[2][0], *await session.fork(1)]  # type: ignore[index]  # they are there
    assert [await value(branch, "x") for branch in (session, *branches)] == ["1"] * 4
    await asyncio.gather(session.close(), *(branch.close() for branch in branches))
    assert sandbox.sessions == 0


async def test_an_answer_of_a_process_that_is_killed_at_the_same_time_costs_no_other_execution(
    session: SandboxSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(session)
    workspace, kill = worker.workspace, worker.processes.kill_running

    def kill_after_answer() -> bool:
        workspace.put("go", b"")
        poll = select.poll()
        poll.register(worker.control, select.POLLIN)
        assert poll.poll(1000 * DEADLINE_S)
        return kill()

    monkeypatch.setattr(worker.processes, "kill_running", kill_after_answer)
    await session.execute("import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    done = await session.execute("while not os.path.exists('go'): pass", timeout_s=0.05)
    after = await session.execute("1")
    assert (done.status, done.state_lost) == ("timeout", True)
    assert (after.status, after.result) == ("ok", "1")


async def test_processes_that_code_forks_cost_the_server_no_descriptors(session: SandboxSession) -> None:
    code = (
        "import os, time\nfor _ in range(16):\n  if not os.fork():\n"
        "    os.write(3, bytes(8))\n    os.write(1, b'x')\n    time.sleep(60)\n"
        "os.write(1, b'x')\ntime.sleep(60)"  # before this, a hook of fork() could swallow the interrupt
    )
    worker = worker_of(session)
    running = asyncio.create_task(session.execute(code, timeout_s=60.0))
    await until(lambda: worker._stdout._total == 17)
    assert len(worker.processes._held) == 2  # one has the state before, the other runs the code
    session.interrupt()
    done = await running
    assert (done.exit_code, done.state_lost) == (130, False)


@pytest.mark.parametrize(("count", "size"), [(1, 700_000), (20, 1)])
async def test_a_fork_without_space_for_its_files_is_refused(
    open_session: OpenSession, count: int, size: int
) -> None:
    session = await open_session(Limits(disk_bytes=1 << 20, file_bytes=1 << 20, files=32), snapshot=True)
    await session.execute(
        f"size = {size}\nfor n in range({count}):\n    open(f'f{{n}}', 'wb').write(bytes(size))"
    )
    with pytest.raises(FileRefusedError, match=r"full|may hold"):
        await session.fork(1)
    # Nothing is lost or left.
    assert await value(session, "import os; (size, os.listdir('.tmp'))") == f"({size}, [])"


async def test_forks_of_forks_leave_nothing_in_the_first(sandbox: Sandbox) -> None:
    first = session = await sandbox.open(Limits(files=24), snapshot=True)
    await session.execute("open('f', 'w').write('x')")
    for _ in range(20):  # nested, their folders would be too deep
        (branch,) = await session.fork(1)
        if session is not first:
            await session.close()
        session = branch
    assert await value(session, "open('f').read()") == "'x'"
    await session.close()
    assert await value(first, "import os; os.listdir('.tmp')") == "[]"
    await first.close()
