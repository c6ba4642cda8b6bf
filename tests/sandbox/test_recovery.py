"""Failures of the infrastructure are reported as such, and nothing stays behind."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from living import DEADLINE_S, UNPROTECTED, OpenSession, descendants, until, worker_of, zygote_of

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    FileRefusedError,
    Isolation,
    Limits,
    Sandbox,
    SandboxClosedError,
    SandboxConfig,
    SandboxSession,
    SandboxUnavailableError,
)
from openenv_core.sandbox.worker import ORPHAN_TIMEOUT_S, Worker
from openenv_core.sandbox.workspace import Scratch
from openenv_core.sandbox.zygote import Zygote

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_killed_zygote_is_a_sandbox_error_and_is_replaced(sandbox: Sandbox) -> None:
    busy, idle = await sandbox.open(), await sandbox.open()
    await idle.execute("x = 1")
    running = asyncio.create_task(busy.execute("import time; time.sleep(60)"))
    await asyncio.sleep(0.2)
    old = sandbox.zygote_pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    interrupted = await running
    lost = await idle.execute("x")
    after = await idle.execute("'x' in dir()")
    assert (interrupted.status, interrupted.exit_code, interrupted.state_lost) == ("sandbox_error", -1, True)
    # The state has gone without the code's doing: that is told once, before anything runs without it.
    assert (lost.status, lost.state_lost, lost.result) == ("sandbox_error", True, None)
    assert (after.status, after.result) == ("ok", "False")
    assert sandbox.zygote_pid not in (None, old)
    await busy.close()
    await idle.close()


@pytest.mark.parametrize("snapshot", [False, True], ids=["plain", "snapshot"])
async def test_interpreter_killed_from_outside_while_idle_is_a_sandbox_error(
    sandbox: Sandbox, open_session: OpenSession, snapshot: bool
) -> None:
    zygote = await zygote_of(sandbox)
    before = descendants(zygote)
    session = await open_session(snapshot=snapshot)
    await session.execute("x = 1")
    mine = descendants(zygote) - before
    await until(lambda: all(_state(pid) in "ST" for pid in mine) and any(_state(pid) == "T" for pid in mine))
    await asyncio.sleep(0.3)
    for pid in mine:
        with contextlib.suppress(ProcessLookupError):  # it may have gone with the one before
            os.kill(pid, signal.SIGKILL)
    lost, after = await session.execute("x"), await session.execute("2")
    # All code stood still: it cannot have done it.
    assert (lost.status, lost.exit_code, lost.state_lost) == ("sandbox_error", -1, True), lost
    assert after.result == "2"


async def test_code_cannot_arrange_to_be_killed_while_idle(open_session: OpenSession) -> None:
    # It would pass for a failure of the infrastructure, and be left out of every score.
    session = await open_session(Limits(allow_subprocess=True))
    done = await session.execute(
        """
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None, use_errno=True)
event = (ctypes.c_byte * 64)()
ctypes.c_int.from_buffer(event, 8).value = signal.SIGKILL  # sigev_signo
refused = [libc.timer_create(1, event, ctypes.byref(ctypes.c_void_p())) == -1]
for command, value in ((10, signal.SIGKILL), (fcntl.F_SETOWN, os.getpid())):  # 10: F_SETSIG
    try:
        fcntl.fcntl(1, command, value)
        refused.append(False)
    except OSError:
        refused.append(True)
refused.append(libc.prctl(1, signal.SIGKILL) == -1)  # PR_SET_PDEATHSIG
refused
"""
    )
    assert done.result == "[True, True, True, True]", done


async def test_late_end_of_a_process_does_not_pass_off_an_end_as_one_from_outside(
    open_session: OpenSession,
) -> None:
    # A process with much memory takes long to end. With it the interpreter's group loses its last tie to the session,
    # at which the kernel sends SIGHUP and SIGCONT to a group that is stopped.
    session = await open_session(Limits(allow_subprocess=True, memory_bytes=1 << 30))
    await session.execute(
        """
import mmap, os, time
ours, (ready, told), (waits, lets) = os.getpgid(0), os.pipe(), os.pipe()
if not (first := os.fork()):
    try:
        os.setpgid(0, 0)
        if not os.fork():
            os.setpgid(0, ours)
            time.sleep(1000)
        memory = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(15)  # no huge pages
        for at in range(0, len(memory), 4096): memory[at] = 1
    finally:
        os.write(told, b"1")
        os.read(waits, 1)
        os._exit(0)
os.read(ready, 1)
os.write(lets, b"1")
time.sleep(0.001)
"""
    )
    await asyncio.sleep(0.5)
    assert (await session.execute("1")).status in ("ok", "killed")


async def test_interpreter_that_exits_after_its_answer_is_reported(session: SandboxSession) -> None:
    # Whoever could pass for a failure of the infrastructure would be left out of every score.
    statuses, refused = [], 0
    for microseconds in range(0, 4000, 200):
        late = f"(time.sleep({microseconds} / 1e6), os._exit(0))"
        code = f"import os, threading, time\nthreading.Thread(target=lambda: {late}).start()"
        statuses.append((await session.execute(code)).status)
        if microseconds in (600, 1000, 1400):
            time.sleep(0.3)  # noqa: ASYNC251 - a busy server hears of it late
        try:
            await session.list_files()
        except FileRefusedError:
            refused += 1
    assert set(statuses) <= {"ok", "killed"}, statuses
    assert refused <= statuses.count("killed") + 1


async def test_bytes_after_the_answer_are_never_a_sandbox_error(session: SandboxSession) -> None:
    late = "(time.sleep(0.001), [os.write(3, b'x' * 64) for _ in range(1000)])"
    code = f"import os, threading, time\nthreading.Thread(target=lambda: {late}).start()"
    executions = [await session.execute(code) for _ in range(10)]
    statuses = {(each.status, each.reason) for each in executions}
    assert {status for status, _ in statuses} <= {"ok", "killed", "error"}, statuses


async def test_cancelled_close_leaves_nothing_open(session: SandboxSession) -> None:
    """An event loop that ends cancels the tasks that still wait for the end of processes."""
    worker = worker_of(session)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert worker.control.fileno() == -1
    assert not worker.processes._held
    assert worker.processes.tree.root is None


async def test_cancelling_or_closing_during_an_execution_ends_its_interpreter(
    session: SandboxSession,
) -> None:
    running = asyncio.create_task(session.execute("x = 1\nwhile True: pass"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = await session.execute("'x' in dir()")
    assert after.result == "False"
    running = asyncio.create_task(session.execute("while True: pass"))
    await asyncio.sleep(0.1)
    await session.close()
    assert (await asyncio.wait_for(running, DEADLINE_S)).state_lost


@pytest.mark.own_process  # what other tests have left running may open files meanwhile
@pytest.mark.slow
async def test_cancelling_at_any_moment_leaves_nothing_behind(sandbox: Sandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for milliseconds in range(0, 40, 5):
        session = await sandbox.open()
        for running in (
            asyncio.create_task(session.execute("import os; os._exit(1)")),
            asyncio.create_task(session.restart()),
        ):
            await asyncio.sleep(milliseconds / 1000)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await session.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert sandbox._scratch is None or list(sandbox._scratch.path.glob("[0-9]*")) == []


async def test_closed_sessions_leave_nothing_behind(sandbox: Sandbox) -> None:
    zygote = await zygote_of(sandbox)
    processes, descriptors = descendants(zygote), len(os.listdir("/proc/self/fd"))
    sessions = await asyncio.gather(*(sandbox.open() for _ in range(8)))
    await asyncio.gather(*(session.execute("open('f', 'w').write('x')") for session in sessions))
    assert len(descendants(zygote) - processes) >= 8
    await asyncio.gather(*(session.close() for session in sessions))
    await until(lambda: descendants(zygote) == processes)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert sandbox.sessions == 0


async def test_no_descriptor_leaks_when_descriptors_run_out(sandbox: Sandbox) -> None:
    def taken() -> set[int]:
        return set(map(int, os.listdir("/proc/self/fd")))

    await (await sandbox.open()).close()
    before = len(taken())
    refused = 0
    for free in range(9):
        numbers = taken()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = max(n for n in range(4096) if n - sum(fd < n for fd in numbers) == free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            session = await sandbox.open(limits=Limits(allow_subprocess=True))
        except SandboxUnavailableError:
            refused += 1
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await session.close()
    assert refused >= 6
    await until(lambda: len(taken()) <= before)


@pytest.mark.slow
async def test_processes_of_a_killed_owner_end(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio, os\n"
        "from openenv_core.sandbox import Sandbox, SandboxConfig, Isolation\n"
        "async def main():\n"
        f"    level = Isolation({str(sandbox.isolation)!r})\n"
        "    sandbox = Sandbox(SandboxConfig(strongest=level, minimum=level)); await sandbox.start()\n"
        "    sessions = [await sandbox.open(snapshot=number > 1) for number in range(4)]\n"
        "    print('ready', flush=True)\n"
        "    endless = [session.execute('while True: pass', timeout_s=600) for session in sessions[::2]]\n"
        "    await asyncio.gather(*endless)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    assert await asyncio.wait_for(owner.stdout.readline(), DEADLINE_S) == b"ready\n"
    running = psutil.STATUS_RUNNING
    await until(lambda: sum(psutil.Process(pid).status() == running for pid in descendants(owner.pid)) == 2)
    below = descendants(owner.pid)
    assert len(below) >= 5
    owner.kill()
    await owner.wait()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


async def test_missing_preload_module_is_named() -> None:
    sandbox = Sandbox(SandboxConfig(preload=("no_such_module_anywhere",)))
    with pytest.raises(ConfigurationError, match="No module named 'no_such_module_anywhere'"):
        await sandbox.start()


async def test_subprocesses_pause_between_executions_and_end_with_their_session(sandbox: Sandbox) -> None:
    session = await sandbox.open(Limits(allow_subprocess=True))
    leaves = sandbox.isolation is Isolation.NAMESPACES  # its group: no other level reaches those that do
    done = await session.execute(
        "import subprocess, time\n"
        "ticks = ['/bin/sh', '-c', 'while true; do date +%s%N > ticks; sleep 0.02; done']\n"
        f"p = subprocess.Popen(ticks, start_new_session={leaves})\n"
        "import os\nwhile not os.path.exists('ticks'): time.sleep(0.01)"
    )
    assert done.status == "ok", done
    await until(worker_of(session).processes.is_stopped)
    first = await session.get_file("ticks")
    await asyncio.sleep(0.3)
    assert await session.get_file("ticks") == first
    await session.execute(f"while open('ticks', 'rb').read() == {first!r}: time.sleep(0.01)")
    assert await session.get_file("ticks") != first
    zygote = sandbox.zygote_pid
    assert zygote is not None
    assert any("ticks" in _command(pid) for pid in descendants(zygote))
    await session.close()
    await until(lambda: not any("ticks" in _command(pid) for pid in descendants(zygote)))


def _state(pid: int) -> str:
    """Return a process's state, such as T if it is stopped; empty if it has ended, as those of a start do."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("then", ["goes on", "ends", pytest.param("stands still", marks=pytest.mark.slow)])
async def test_stopped_zygote_is_waited_for_until_the_start_timeout(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if then == "stands still":
        monkeypatch.setattr("openenv_core.sandbox.zygote.START_TIMEOUT_S", 0.5)
    async with Sandbox(UNPROTECTED) as sandbox:
        zygote = sandbox._zygote
        assert zygote is not None
        assert zygote.pid is not None
        # The kernel's least: a few requests.
        zygote._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        os.kill(zygote.pid, signal.SIGSTOP)
        openings = [asyncio.create_task(sandbox.open()) for _ in range(8)]
        await until(lambda: len(zygote._exits) == len(openings))
        if then != "stands still":
            os.kill(zygote.pid, signal.SIGCONT if then == "goes on" else signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            outcomes = await asyncio.gather(*openings, return_exceptions=True)
        expected = SandboxSession if then == "goes on" else SandboxUnavailableError
        assert {type(each) for each in outcomes} == {expected}
        if then == "ends":  # which is told, and not that a time is over
            assert not any("within" in str(each) for each in outcomes), outcomes


@pytest.mark.parametrize("deadline_expires", [False, True])
async def test_late_report_of_a_death_is_correct(
    sandbox: Sandbox, session: SandboxSession, deadline_expires: bool
) -> None:
    zygote, worker = await zygote_of(sandbox), worker_of(session)
    os.kill(zygote, signal.SIGSTOP)  # it tells of ends; a busy machine keeps it from that likewise
    running = asyncio.create_task(session.execute("import os; os._exit(5)"))
    await until(worker.processes.has_ended)
    if deadline_expires:
        worker.stop("timeout")
    else:
        await asyncio.sleep(3 * ORPHAN_TIMEOUT_S)
    os.kill(zygote, signal.SIGCONT)
    done = await running
    assert (done.status, done.exit_code, done.signal) == ("killed", 5, None)


@pytest.mark.parametrize("code", ["os._exit(5)", "os.close(3)\nwhile True: pass"])
async def test_an_end_that_takes_long_is_told_as_it_was(
    sandbox: Sandbox, session: SandboxSession, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    # Between the closing of its files and its end, a process may wait for the processor.
    monkeypatch.setattr("openenv_core.sandbox.worker.ORPHAN_TIMEOUT_S", 0.0)
    zygote, worker = await zygote_of(sandbox), worker_of(session)
    with monkeypatch.context() as patched:
        patched.setattr(worker.processes, "has_ended", lambda: False)
        os.kill(zygote, signal.SIGSTOP)
        running = asyncio.create_task(session.execute(f"import os\n{code}"))
        await until(lambda: worker._broken is not None)
        os.kill(zygote, signal.SIGCONT)
        done = await running
    if "close" in code:
        assert (done.status, done.exit_code, done.signal) == ("killed", 137, 9)
        assert done.reason == "the code closed the interpreter's own channel"
    else:
        assert (done.status, done.exit_code, done.signal) == ("killed", 5, None)


async def test_a_request_ends_though_the_end_of_its_interpreter_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("worker", "processes"):
        monkeypatch.setattr(f"openenv_core.sandbox.{module}.EXIT_TIMEOUT_S", 0.1)
    async with Sandbox(UNPROTECTED) as sandbox:
        session = await sandbox.open()
        await session.execute("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
        os.kill(await zygote_of(sandbox), signal.SIGSTOP)
        done = await asyncio.wait_for(session.execute("while True: pass", timeout_s=0.1), DEADLINE_S)
        await session.close()
    assert (done.status, done.state_lost) == ("timeout", True)


async def test_only_a_kill_is_told_as_one_for_want_of_memory(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel may have killed another process of the session's control group.
    monkeypatch.setattr("openenv_core.sandbox.processes.ProcessTree.oom_killed", lambda _: True)
    killed = "import os\nos.kill(os.getpid(), 9)"
    sessions = [await open_session(snapshot=snapshot) for snapshot in (False, True)]
    codes = ("import os; os._exit(5)", killed)
    told = [await session.execute(code) for session in sessions for code in codes]
    assert [(each.status, each.exit_code) for each in told] == [("killed", 5), ("memory", 137)] * 2
    assert [each.state_lost for each in told] == [True, True, False, False]


async def test_interpreter_forked_during_close_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forked, may_go_on = asyncio.Event(), asyncio.Event()
    fork = Zygote.fork_interpreter
    workers: list[Worker] = []

    async def fork_and_wait(*args: Any, **options: Any) -> Any:
        result = await fork(*args, **options)
        workers.append(result)
        forked.set()
        await may_go_on.wait()
        return result

    async with Sandbox(UNPROTECTED) as sandbox:
        monkeypatch.setattr(Zygote, "fork_interpreter", fork_and_wait)
        opening = asyncio.create_task(sandbox.open())
        await forked.wait()
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0.05)
        may_go_on.set()
        with pytest.raises(SandboxClosedError):
            await opening
        await closing
    assert workers[0].control.fileno() == -1


async def test_failed_start_of_the_zygote_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=BlockingIOError(errno.EAGAIN, "no more processes"))
    async with Sandbox(UNPROTECTED) as sandbox:
        old = sandbox.zygote_pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        await until(lambda: sandbox.zygote_pid is None)
        with monkeypatch.context() as patched:
            patched.setattr("openenv_core.sandbox.zygote.subprocess.Popen", full)
            with pytest.raises(SandboxUnavailableError, match="no more processes"):
                await sandbox.open()
        session = await sandbox.open()
        assert (await session.execute("1 + 1")).result == "2"


class _NoZygote(Sandbox):
    """A sandbox without a zygote process; every fork is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._isolation = Isolation.PROCESS
        self.zygote = Zygote({}, lambda: None)

    async def _ensure_zygote(self) -> Zygote:
        return self.zygote


async def test_failed_session_start_releases_its_user_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = _NoZygote()
    users: list[int] = []
    monkeypatch.setattr("openenv_core.sandbox.kernel.identity.session_uid", lambda slot: 70_000 + slot)

    async def refuse(limits: Limits, uid: int, *, removed: Any, **_: Any) -> None:
        removed()  # its files are gone; before its processes are, another session begins
        users.extend((uid, sandbox._users.acquire()[0] + 70_000))
        raise SandboxUnavailableError("not now")

    monkeypatch.setattr(sandbox.zygote, "fork_interpreter", refuse)
    with pytest.raises(SandboxUnavailableError):
        await sandbox.open()
    assert users[0] == users[1]
    assert len(sandbox._users) == 1  # the other has it still
    sandbox._users.release(users[1] - 70_000)
    full = AsyncMock(side_effect=OSError(errno.ENOSPC, "no space left"))
    monkeypatch.setattr(sandbox.zygote, "fork_interpreter", full)
    with pytest.raises(SandboxUnavailableError, match="no space left"):
        await sandbox.open()
    await sandbox.zygote.close()


def opened() -> list[str]:
    """Return the targets of this process's descriptors."""
    return [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]


async def test_folder_made_after_a_cancelled_open_is_removed() -> None:
    sandbox, scratch = _NoZygote(), Scratch()
    folders: list[tuple[int, str]] = []
    making, may_go_on = threading.Event(), threading.Event()

    class Slow(Scratch):
        def __init__(self) -> None: ...

        def make(self, owner: tuple[int, int] | None) -> tuple[int, str]:
            making.set()
            may_go_on.wait(DEADLINE_S)
            folders.append(scratch.make(None))
            return folders[0]

    sandbox._scratch = Slow()
    opening = asyncio.create_task(sandbox.open())
    await until(making.is_set)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_go_on.set()
    await until(lambda: bool(folders) and not os.path.exists(folders[0][1]))
    assert not any(one.startswith(folders[0][1]) for one in opened())
    await sandbox.zygote.close()
    scratch.close()
