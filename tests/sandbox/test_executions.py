"""What an execution returns, at every level available here."""

import asyncio
import base64
import json
import sys
import time

import psutil
import pytest
from living import UNPROTECTED, OpenSession, executed, name_of, until, value, worker_of

from openenv_core.sandbox import Limits, Sandbox, SandboxClosedError, SandboxSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

KIB, MIB = 1 << 10, 1 << 20
NULL_BYTE_ERROR = "SyntaxError" if sys.version_info >= (3, 11, 4) else "ValueError"


async def test_state_is_kept_and_the_last_expression_is_the_result(sandbox: Sandbox) -> None:
    session = await sandbox.open()
    first = await session.execute("x = [1, 2]\nprint('hé')")
    second = await session.execute("import sys\nprint('two', file=sys.stderr)\nx + [3]")
    waited = await session.execute("import asyncio\nawait asyncio.sleep(0, 'slept')")
    await session.close()
    await session.close()
    with pytest.raises(SandboxClosedError, match="the session is closed"):
        await session.execute("1")
    assert (first.status, first.stdout, first.result, first.execution_count) == ("ok", "hé\n", None, 1)
    assert (second.stderr, second.result, second.exit_code) == ("two\n", "[1, 2, 3]", 0)
    assert second.outputs[0].output_type == "execute_result"
    assert second.outputs[0].data == {"text/plain": "[1, 2, 3]"}
    assert second.isolation == sandbox.isolation
    assert second.session_id == first.session_id == session.session_id
    assert second.max_rss_bytes is not None
    assert second.max_rss_bytes > MIB
    assert waited.result == "'slept'"


async def test_exceptions_are_errors_and_keep_the_state(session: SandboxSession) -> None:
    for code, name, message in (
        ("def f(:", "SyntaxError", "invalid syntax (<cell 1>, line 1)"),
        ("x = '\0'", NULL_BYTE_ERROR, "source code string cannot contain null bytes"),
        ("raise KeyboardInterrupt('own')", "KeyboardInterrupt", "own"),
        ("class E(Exception):\n  __str__ = lambda s: 1/0\nraise E", "E", "str() raised ZeroDivisionError"),
    ):
        done = await session.execute(code)
        assert (done.status, done.exit_code, done.state_lost) == ("error", 1, False)
        assert done.error is not None
        assert done.error.ename == name
        assert message in done.error.evalue
    assert await value(session, "E.__name__") == "'E'"


async def test_traceback_shows_only_the_code_of_the_session(sandbox: Sandbox) -> None:
    again = "try:\n    f(0)\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e"
    _, done = await executed(sandbox, "def f(n):\n    return 1 / n", again)
    assert done.error is not None
    text = "".join(done.error.traceback)
    assert all(part in text for part in ("return 1 / n", "<cell 1>", "direct cause"))
    assert "openenv_core" not in text


async def test_sys_exit_keeps_the_interpreter(sandbox: Sandbox) -> None:
    codes = ("import sys; sys.exit()", "sys.exit(3)", "raise SystemExit('bye')", "sys")
    outcomes = [(each.status, each.exit_code, each.state_lost) for each in await executed(sandbox, *codes)]
    assert outcomes == [("ok", 0, False), ("error", 3, False), ("error", 1, False), ("ok", 0, False)]


# What an interrupt reaches; a machine that stands still for a moment must not end it.
REACHED = ("while True: pass", "import time; time.sleep(60)")
THREADED = (
    "import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\nwhile True: pass"
)
SWALLOWS = "while True:\n  try:\n    import time; time.sleep(60)\n  except BaseException: pass"


@pytest.mark.parametrize("code", [*REACHED, "sum(range(10**12))", THREADED, SWALLOWS])
async def test_timeout_interrupts_and_keeps_the_state_where_possible(
    open_session: OpenSession, code: str
) -> None:
    session = await open_session(Limits(grace_s=20.0 if code in REACHED else 0.2))
    await session.execute("x = 7")
    done = await session.execute(code, timeout_s=0.2)
    after = await session.execute("x")
    assert (done.status, done.exit_code, done.reason) == ("timeout", 124, "it ran longer than 0.2 s")
    assert after.result == ("7" if not done.state_lost else None)
    if code in (*REACHED, SWALLOWS):
        assert done.state_lost == (code == SWALLOWS)


async def test_timeout_is_capped_by_the_session(open_session: OpenSession) -> None:
    session = await open_session(Limits(timeout_s=0.2))
    done = await asyncio.wait_for(session.execute("import time; time.sleep(60)", timeout_s=60.0), 30)
    assert (done.status, done.reason) == ("timeout", "it ran longer than 0.2 s")


async def test_output_is_truncated_and_stopped_at_the_hard_limit(sandbox: Sandbox) -> None:
    cut, stopped = await executed(
        sandbox,
        "import sys\nprint('é' * 5000)\nprint('e', file=sys.stderr)",
        "while True: print('y' * 1000)",
        limits=Limits(output_bytes=KIB, output_hard_bytes=256 * KIB),
    )
    assert cut.cut.stdout
    assert not cut.cut.stderr
    assert KIB - 3 <= len(cut.stdout.encode()) <= KIB + 3
    assert (stopped.status, stopped.exit_code) == ("output_limit", 137)


async def test_undecodable_output_is_replaced(sandbox: Sandbox) -> None:
    (done,) = await executed(sandbox, "import os\nos.write(1, b'a\\xff\\x00b')\n'\\ud800'")
    assert (done.stdout, done.result) == ("a�\0b", "'\\ud800'")


async def test_results_and_displays_are_bounded(sandbox: Sandbox) -> None:
    codes = ("'x' * 10000", "for i in range(1000): display(i)")
    long, many = await executed(sandbox, *codes, limits=Limits(outputs_bytes=4 * KIB))
    assert long.cut.outputs
    assert many.cut.outputs
    assert long.result is not None
    assert len(long.result) == 4 * KIB
    assert 0 < len(many.outputs) <= 256


async def test_escaped_control_characters_count_against_the_limits(sandbox: Sandbox) -> None:
    noise = "class Noise:\n    def __repr__(self): return '\\1' * 4000\n"
    codes = ("print('\\1' * 1000, end='')", f"{noise}Noise()", f"{noise}display(Noise()); display(Noise())")
    limits = Limits(output_bytes=KIB, outputs_bytes=8 * KIB)
    printed, result, displayed = await executed(sandbox, *codes, limits=limits)
    for text, bound in ((printed.stdout, 2 * KIB), (result.result, 16 * KIB)):
        assert text is not None
        assert bound - 12 <= len(json.dumps(text)) <= bound + 2
    assert (printed.cut.stdout, result.cut.outputs, displayed.cut.outputs) == (True,) * 3
    assert displayed.outputs == ()


async def test_displayed_objects_come_in_every_type_they_offer(sandbox: Sandbox) -> None:
    (done,) = await executed(
        sandbox,
        "class Shown:\n"
        "    def _repr_html_(self): return '<b>x</b>'\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def __repr__(self): return 'plain'\n"
        "display(Shown())\nShown()",
    )
    png = base64.b64encode(b"\x89PNG").decode()
    data = {"text/plain": "plain", "text/html": "<b>x</b>", "image/png": png}
    assert [(o.output_type, dict(o.data)) for o in done.outputs] == [
        ("display_data", data),
        ("execute_result", data),
    ]


async def test_memory_limit_is_reported_as_memory(sandbox: Sandbox) -> None:
    done, after = await executed(
        sandbox, "x = bytearray(200 * 2**20)", "1", limits=Limits(memory_bytes=64 * MIB)
    )
    assert (done.status, done.exit_code, done.state_lost) == ("memory", 1, False)
    assert after.result == "1"


async def test_death_is_reported_and_the_next_execution_starts_fresh(session: SandboxSession) -> None:
    for code, exit_code, signal in (
        ("import os; os._exit(5)", 5, None),
        ("import os; os._exit(200)", 200, None),  # beyond 128 and any signal
        ("import ctypes; ctypes.string_at(0)", 139, 11),
        ("import os; os.kill(os.getpid(), 62)", 190, 62),  # of real time: it has no name
    ):
        done = await session.execute(f"x = 1\nprint('before', flush=True)\n{code}")
        after = await session.execute("'x' in dir()")
        assert (done.status, done.state_lost, done.stdout) == ("killed", True, "before\n")
        assert (done.exit_code, done.signal) == (exit_code, signal)
        assert (after.result, after.state_lost, after.execution_count) == ("False", False, 1)


async def test_threads_are_paused_between_executions(session: SandboxSession) -> None:
    await session.execute(
        "import threading, time\nticks = []\n"
        "def tick():\n    while True:\n        ticks.append(time.monotonic()); time.sleep(0.001)\n"
        "threading.Thread(target=tick, daemon=True).start()"
    )
    worker = worker_of(session)
    interpreter = psutil.Process(worker.processes._current)
    await until(lambda: interpreter.status() == psutil.STATUS_STOPPED)
    begin = time.monotonic()
    await asyncio.sleep(0.3)
    ran = f"[tick for tick in ticks if {begin} < tick < {time.monotonic()}]"
    assert await value(session, f"len(ticks) > 0, {ran}") == "(True, [])"


async def test_code_reads_its_stdin(session: SandboxSession) -> None:
    with_input = await session.execute("import sys\na = input()\n(a, sys.stdin.read())", stdin="one\ntwo\n")
    nothing = await session.execute("input()")
    assert with_input.result == "('one', 'two\\n')"
    assert name_of(nothing) == "EOFError"


async def test_functions_are_called_with_values_and_return_values(session: SandboxSession) -> None:
    await session.execute("def f(a, *, b=0): return (a, {b}, float('nan'))\nasync def g(): return 1")
    call = await session.call("f", [[1, 2]], {"b": 3})
    coroutine = await session.call("g")
    missing = await session.call("h")
    odd = await session.call("print", [object.__name__])
    assert call.value[:2] == ([1, 2], {3})
    assert call.value[2] != call.value[2]
    assert coroutine.value == 1
    assert name_of(missing.execution) == "NameError"
    assert odd.execution.status == "error"  # a builtin is no variable of the code


async def test_executions_of_one_session_run_one_after_another(session: SandboxSession) -> None:
    await session.execute("n = 0")
    done = await asyncio.gather(*(session.execute("n += 1; n") for _ in range(20)))
    assert [each.result for each in done] == [str(number) for number in range(1, 21)]


@pytest.mark.slow
async def test_library_paths_of_the_machine_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote may need it to start; code does not."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/lib")
    async with Sandbox(UNPROTECTED) as sandbox:
        (done,) = await executed(sandbox, "import os\nsorted(os.environ)")
    assert "'HOME'" in (done.result or "")
    assert "LD_LIBRARY_PATH" not in (done.result or "")
