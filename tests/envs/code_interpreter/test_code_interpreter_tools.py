"""The interpreter's actions as tools, over real interpreters and fakes."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import FakeBackend
from serving import eventually

from envs.code_interpreter_env import CodeInterpreterObservation, Execute
from envs.code_interpreter_env.models import ListTools
from envs.code_interpreter_env.server import shared
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend
from openenv_core import infrastructure_failure
from openenv_core.sandbox import Isolation
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsObservation,
    ToolContext,
    ToolResult,
    is_tool_host,
)
from tests.envs.tool_calls import RecordedContext

SETTINGS = InterpreterSettings(
    packages=("json",),
    strongest_isolation=Isolation.PROCESS,
    minimum_isolation=Isolation.PROCESS,
    tasks="none",
)
PNG = b"\x89PNG\r\n\x1a\n and more"
IMAGE = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}


@pytest.fixture
async def env() -> AsyncIterator[CodeInterpreterEnvironment]:
    environment = CodeInterpreterEnvironment(SharedBackend(SETTINGS))
    yield environment
    await environment.close_async()


@pytest.fixture
async def faked(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[CodeInterpreterEnvironment, FakeBackend]]:
    backend = FakeBackend()
    monkeypatch.setattr(shared, "make_backend", lambda *_: backend)
    environment = CodeInterpreterEnvironment(SharedBackend(SETTINGS))
    yield environment, backend
    await environment.close_async()


async def call(
    env: CodeInterpreterEnvironment, name: str, context: ToolContext | None = None, **arguments: Any
) -> ToolResult:
    result = env.call_tool(name, arguments, context or ToolContext())
    return result if isinstance(result, ToolResult) else await result


def texts(result: ToolResult) -> list[str]:
    return [block["text"] for block in result.content if block["type"] == "text"]


def error(result: ToolResult) -> tuple[str, str]:
    assert result.error is not None
    return result.error.error_type.value, result.error.message


async def test_tools_are_listed_with_schemas_and_called_as_steps(env: CodeInterpreterEnvironment) -> None:
    assert is_tool_host(CodeInterpreterEnvironment)
    listed = await env.step_async(ListTools())
    assert isinstance(listed, ListToolsObservation)
    schemas = {tool.name: tool.input_schema for tool in listed.tools}
    assert list(schemas) == ["run_python", "read_file", "write_file", "list_files"]
    assert schemas["run_python"]["required"] == ["code"]
    assert set(schemas["run_python"]["properties"]) == {"code", "timeout_s"}
    assert env.state.step_count == 0  # looking is no step
    called = await env.step_async(
        CallToolAction(tool_name="run_python", arguments={"code": "n = 20\nprint('on')\nn + 1"})
    )
    assert isinstance(called, CallToolObservation)
    assert (called.error, called.result["stdout"], called.result["result"]) == (None, "on\n", "21")
    seen = await env.step_async(Execute(type="execute", code="n"))  # the same interpreter, and the same count
    assert isinstance(seen, CodeInterpreterObservation)
    assert (seen.result, env.state.step_count, env.state.execution_count) == ("20", 2, 2)


async def test_a_run_is_shown_as_text_and_pictures_and_told_as_data(env: CodeInterpreterEnvironment) -> None:
    code = (
        f"class Figure:\n    def _repr_png_(self): return {PNG!r}\n"
        "import sys; print('out'); print('err', file=sys.stderr); open('made.txt', 'w').write('x')\nFigure()"
    )
    result = await call(env, "run_python", code=code)
    assert texts(result)[:2] == ["out\n", "stderr:\nerr\n"]
    assert result.content[2] == IMAGE
    assert result.structured is not None
    assert [file["path"] for file in result.structured["files"]] == ["made.txt"]
    assert texts(await call(env, "run_python", code="x = 1")) == ["It ran, and printed nothing."]


async def test_error_of_the_code_is_the_call_s_error_and_variables_stay(
    env: CodeInterpreterEnvironment,
) -> None:
    failed = await call(env, "run_python", code="kept = 5\nprint('before')\n1 / 0")
    kind, message = error(failed)
    assert kind == "execution_error"
    assert message.startswith("before\n")
    assert message.endswith("ZeroDivisionError: division by zero")
    assert failed.structured is not None
    assert failed.structured["error"]["ename"] == "ZeroDivisionError"
    assert infrastructure_failure(failed.observation("run_python")) is None
    late = await call(env, "run_python", code="while True: pass", timeout_s=0.1)
    assert error(late)[0] == "timeout"
    assert (await call(env, "run_python", code="kept")).structured["result"] == "5"  # type: ignore[index]


async def test_files_are_written_read_and_listed(env: CodeInterpreterEnvironment) -> None:
    written = await call(env, "write_file", path="data/words.txt", content="héllo")
    assert written.structured is not None
    assert (written.structured["path"], written.structured["size"]) == ("data/words.txt", 6)
    await call(env, "write_file", path="one.png", content_base64=IMAGE["data"])
    await call(env, "write_file", path="any.bin", content_base64="/wD/")
    words = await call(env, "read_file", path="data/words.txt")
    assert (words.value, texts(words)) == ("héllo", ["héllo"])
    picture = await call(env, "read_file", path="one.png")
    assert picture.content == [IMAGE]
    other = await call(env, "read_file", path="any.bin")
    assert other.content[0]["resource"]["blob"] == "/wD/"
    assert other.value["content_base64"] == "/wD/"
    listed = await call(env, "list_files")
    assert [file["path"] for file in listed.value] == ["any.bin", "data/words.txt", "one.png"]
    assert (await call(env, "run_python", code="open('data/words.txt').read()")).value["result"] == "'héllo'"
    for path in ("none.txt", "../out.txt"):
        assert error(await call(env, "read_file", path=path))[0] == "execution_error"


async def test_infrastructure_failure_is_reported_as_such(
    faked: tuple[CodeInterpreterEnvironment, FakeBackend],
) -> None:
    env, backend = faked
    backend.refusing = True
    for name, arguments in (
        ("run_python", {"code": "1"}),
        ("read_file", {"path": "a"}),
        ("list_files", {}),
        ("write_file", {"path": "a", "content": ""}),
    ):
        result = await call(env, name, **arguments)
        assert error(result)[0] == "transport_error"
        assert infrastructure_failure(result.observation(name)) == "expected a free place, got none"
    backend.refusing = False
    assert not (await call(env, "run_python", code="1")).is_error


async def cancel_once_it_runs(env: CodeInterpreterEnvironment, code: str) -> None:
    """Call `run_python`, and cancel the call once the code runs and progress is told."""
    folder = (await call(env, "run_python", code="import os; print(os.getcwd(), end='')")).value["stdout"]
    started, progress = Path(folder) / "started", RecordedContext()  # this process sees it at this level
    code = f"begun = True\nopen('started', 'w').close()\n{code}"
    running = asyncio.create_task(call(env, "run_python", progress, code=code))
    await eventually(lambda: started.exists() and len(progress.progressed) > 2)
    assert progress.progressed == sorted(progress.progressed)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_cancelled_call_interrupts_the_code_and_the_interpreter_lives(
    env: CodeInterpreterEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PROGRESS_INTERVAL_S", 0.02)
    await call(env, "write_file", path="kept.txt", content="x")
    await cancel_once_it_runs(env, "while True: pass")
    after = await call(env, "run_python", code="begun, open('kept.txt').read()")
    assert (after.value["result"], after.value["state_lost"]) == ("(True, 'x')", False)
    # Code that ignores an interrupt is ended, and the files of the reset are back.
    await env.reset_async(files={"given": "y"}, limits={"grace_s": 0.05})
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    await cancel_once_it_runs(env, f"{ignores}\nwhile True: pass")
    after = await call(env, "run_python", code="'begun' in globals(), open('given').read()")
    assert after.value["result"] == "(False, 'y')"


async def test_interpreter_without_interrupt_is_ended_by_a_cancelled_call(
    faked: tuple[CodeInterpreterEnvironment, FakeBackend],
) -> None:
    env, backend = faked
    running = asyncio.create_task(call(env, "run_python", code="hang"))
    await eventually(lambda: backend.opened and backend.opened[0].asked)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (await call(env, "run_python", code="1")).is_error
    assert [one.closed for one in backend.opened] == [True, False]
