"""The released package's executors, backed by real sandboxed interpreters."""

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from missing import missing
from module_run import finished

from openenv_core import ConfigurationError
from openenv_core.compat import executor as executors
from openenv_core.compat.executor import PyExecutor
from openenv_core.compat.types import CodeExecResult
from openenv_core.loop_thread import shared_loop
from openenv_core.sandbox import Limits, Sandbox, SandboxUnavailableError

ROOT = Path(__file__).parents[2]
WAIT_TIMEOUT_S = 60


def shared_sandbox() -> Sandbox:
    return shared_loop().run(executors._shared_sandbox)


@pytest.fixture(scope="module", autouse=True)
def _sandbox_ends() -> Iterator[None]:
    """The sandbox of a process is ended with it; these tests end it earlier: later ones look at all children."""
    yield
    if (started := executors._sandboxes.pop(os.getpid(), None)) is not None:
        shared_loop().run(started.result().close)


@pytest.fixture(scope="module")
def _sandbox(_sandbox_ends: None) -> None:
    try:
        shared_sandbox()
    except SandboxUnavailableError as error:
        missing(f"needs a sandbox: {error}")


pytestmark = pytest.mark.usefixtures("_sandbox")


@pytest.fixture
def executor() -> PyExecutor:
    return PyExecutor()


def wait_until_collected(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not true() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return true()


def test_state_is_kept_between_runs_and_separate_per_executor(executor: PyExecutor) -> None:
    assert executor.run("x = 41") == CodeExecResult(stdout="", stderr="", exit_code=0)
    assert executor.run("print(x + 1)") == CodeExecResult(stdout="42\n", stderr="", exit_code=0)
    other = PyExecutor(additional_imports=["numpy"])
    result = other.run("print(x)")
    assert (result.stdout, result.exit_code) == ("", 1)
    assert "NameError: name 'x' is not defined" in result.stderr
    with pytest.raises(ConfigurationError, match=r"got 'numpy'; write \['numpy'\]"):
        PyExecutor("numpy")


def test_results_match_those_of_released_executors(executor: PyExecutor) -> None:
    for code, stdout in (
        ("1 + 1", "2"),
        ("[1, 'a', None, True]", "[1, 'a', None, True]"),
        ("None", ""),
        ("print('a'); 3", "a\n\n3"),
        # Nobody reads it but as text: what it would parse as is the code's choice.
        ("class Sly:\n    def __repr__(self): return '(' * 50000\nSly()", "(" * 50000),
        ("print(safe_json_dumps({'a': object}))", '{"a": "<class \'object\'>"}\n'),
    ):
        assert executor.run(code) == CodeExecResult(stdout=stdout, stderr="", exit_code=0)
    result = executor.run("import sys\nprint('so far')\nprint('lost', file=sys.stderr)\n1 / 0")
    assert (result.stdout, result.exit_code) == ("so far\n", 1)
    first, *_, last = result.stderr.splitlines()
    assert (first, last) == ("lost", "ZeroDivisionError: division by zero")
    assert "Traceback (most recent call last):" in result.stderr
    assert executor.run("sys.exit(7)").exit_code == 7
    lost = executor.run("import os; os._exit(3)")
    assert (lost.exit_code, lost.stdout) == (3, "")
    assert "ended the interpreter" in lost.stderr
    # The interpreter is another one now, and has the helpers too.
    helped = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print(format_exc().splitlines()[-1])"
    assert executor.run(helped).stdout == "ZeroDivisionError: division by zero\n"


@pytest.mark.slow
def test_endless_code_is_ended_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LIMITS", Limits(timeout_s=0.5, grace_s=0.1))
    executor = PyExecutor()
    executor.run("x = 1")
    for code in ("while True: pass", "import time; time.sleep(600)"):
        result = executor.run(f"print('so far', flush=True)\n{code}")
        assert (result.stdout, result.exit_code) == ("so far\n", 124)
        assert result.stderr.endswith("it ran longer than 0.5 s")
    assert executor.run("print(2)").stdout == "2\n"


def test_code_runs_in_a_process_that_cannot_see_this_one(executor: PyExecutor, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("it")
    for code in (f"open({str(tmp_path / 'secret')!r})", "import socket; socket.socket()", "import envs"):
        assert executor.run(code).exit_code == 1, code
    assert str(os.getpid()) not in executor.run("import os; print(os.getpid(), os.getppid())").stdout.split()


def test_threads_share_one_interpreter_and_take_turns(executor: PyExecutor) -> None:
    sandbox = shared_sandbox()
    gc.collect()
    assert wait_until_collected(lambda: not sandbox.sessions)
    together = threading.Barrier(4)

    def run(number: int) -> int:
        together.wait(WAIT_TIMEOUT_S)
        return executor.run(f"x{number} = {number}\nn = 0").exit_code

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [0] * 4
        assert sandbox.sessions == 1
        assert executor.run("x0 + x1 + x2 + x3").stdout == "6"
        list(pool.map(lambda _: executor.run("n += 1"), range(20)))  # one after the other
    assert executor.run("n").stdout == "20"


def test_dropped_executor_ends_its_interpreter(executor: PyExecutor) -> None:
    sandbox = shared_sandbox()
    executor.run("x = 1")
    gc.collect()
    before = 1  # those of the tests before are on their way
    assert wait_until_collected(lambda: sandbox.sessions == before)
    dropped = [PyExecutor() for _ in range(3)]
    assert sandbox.sessions == before  # none before its first run
    for one in dropped:
        one.run("x = 1")
    assert sandbox.sessions == before + 3
    del dropped, one
    assert wait_until_collected(lambda: sandbox.sessions == before)
    assert executor.run("x").stdout == "1"


def kill_zygote() -> None:
    pid = shared_sandbox().zygote_pid
    assert pid is not None
    psutil.Process(pid).kill()


@pytest.mark.parametrize("when", ["during", "between"])
def test_killed_zygote_is_an_error_not_a_result(when: str, executor: PyExecutor) -> None:
    """A killed zygote is nobody's exit code. The environment's step raises, and no trainer scores that."""
    executor.run("x = 1")
    session = executor._session
    if when == "between":
        kill_zygote()
        assert wait_until_collected(lambda: not session.alive)
        with pytest.raises(SandboxUnavailableError, match=r"got no result: .*variables and files are gone"):
            executor.run("x")
    else:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(executor.run, "import time; time.sleep(60)")
            assert wait_until_collected(session._turn.locked)
            kill_zygote()
            with pytest.raises(SandboxUnavailableError, match=r"got no result: .*has ended; run it again"):
                running.result(WAIT_TIMEOUT_S)
    # The next run begins anew, with another zygote.
    result = executor.run("print(safe_json_dumps('here'))\nx")
    assert (result.stdout, result.exit_code) == ('"here"\n', 1)
    assert "NameError" in result.stderr


@pytest.mark.slow
def test_fork_has_its_own_interpreters(executor: PyExecutor) -> None:
    program = """
import os, sys
from openenv_core.compat.executor import PyExecutor
from openenv_core.sandbox import SandboxClosedError

old = PyExecutor()
old.run("x = 1")
if (child := os.fork()) == 0:
    try:
        old.run("x")
    except SandboxClosedError as error:
        print("refused:", "before it forked" in str(error))
    print("new:", PyExecutor().run("print(2)").stdout, end="", flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print("old:", old.run("x").stdout)
"""
    done = finished(sys.executable, "-c", program, cwd=ROOT, timeout_s=WAIT_TIMEOUT_S)
    assert done.stdout.splitlines() == ["refused: True", "new: 2", "old: 1"], done.stderr


@pytest.mark.slow
def test_ended_process_leaves_nothing_behind() -> None:
    program = """
import psutil
from openenv_core.compat.executor import PyExecutor

kept = PyExecutor()
kept.run("import threading, time\\nthreading.Thread(target=time.sleep, args=(600,)).start()")
kept.run("open('file', 'w').write('content')")
print(*(process.pid for process in psutil.Process().children(recursive=True)))
"""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # pytest's own folders are closed to the user that code runs as
        environ = {**os.environ, "TMPDIR": scratch}
        done = finished(sys.executable, "-c", program, cwd=ROOT, env=environ, timeout_s=WAIT_TIMEOUT_S)
        pids = [int(pid) for pid in done.stdout.split()]
        assert pids, done.stderr
        assert wait_until_collected(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        assert list(Path(scratch).iterdir()) == [], done.stderr
        assert done.stderr == ""
