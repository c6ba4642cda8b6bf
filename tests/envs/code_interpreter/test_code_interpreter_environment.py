"""Episodes over fake backends: state that is kept or lost, and failures of code, policy or infrastructure."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_interpreter import FakeBackend
from serving import eventually

from envs.code_interpreter_env import (
    CodeInterpreterObservation,
    Execute,
    GetFile,
    InvalidResetOptionError,
    PutFile,
    Restart,
    Submit,
)
from envs.code_interpreter_env.models import AnyAction
from envs.code_interpreter_env.server import shared
from envs.code_interpreter_env.server.environment import MAX_FETCHED_BYTES, CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend

SETTINGS = InterpreterSettings(packages=("json",), tasks="none", max_snapshot=True)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    found = FakeBackend()
    monkeypatch.setattr(shared, "make_backend", lambda *_: found)
    return found


@pytest.fixture
async def env(backend: FakeBackend) -> AsyncIterator[CodeInterpreterEnvironment]:
    environment = CodeInterpreterEnvironment(SharedBackend(SETTINGS))
    yield environment
    await environment.close_async()
    assert all(one.closed for one in backend.opened)
    assert backend.closed == backend.started


async def do(
    env: CodeInterpreterEnvironment, action: AnyAction, **options: Any
) -> CodeInterpreterObservation:
    seen = await env.step_async(action, **options)
    assert isinstance(seen, CodeInterpreterObservation)
    return seen


async def run(env: CodeInterpreterEnvironment, code: str, **options: Any) -> CodeInterpreterObservation:
    return await do(env, Execute(type="execute", code=code), **options)


async def test_a_reset_ends_the_interpreter_before(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async()
    await run(env, "1")
    began = await env.reset_async(
        files={"a": "x"}, packages=["json"], limits={"timeout_s": 3}, snapshot=True, seed=5, episode_id="mine"
    )
    assert [one.closed for one in backend.opened] == [True, False]
    now = backend.opened[1]
    assert (now.files, now.packages, now.limits.timeout_s, now.snapshot) == ({"a": b"x"}, ("json",), 3, True)
    assert isinstance(began, CodeInterpreterObservation)
    assert [file.path for file in began.files] == ["a"]
    state = env.state
    assert (state.episode_id, state.seed, state.step_count, state.execution_count) == ("mine", 5, 0, 0)


async def test_infrastructure_failures_are_no_errors_of_the_code(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async(files={"a": "x"})
    backend.opened[0].broken = True
    seen = await run(env, "1")
    assert (seen.status, seen.error, seen.exit_code, seen.state_lost) == ("sandbox_error", None, -1, True)
    assert "a machine that works" in str(seen.reason)
    backend.refusing = True
    for action in (GetFile(path="a"), PutFile(path="a", content=""), Restart()):
        failed = await do(env, action)
        assert (failed.status, failed.error) == ("sandbox_error", None)
    began = await env.reset_async()
    assert began.metadata["execution"]["status"] == "sandbox_error"
    backend.refusing = False
    after = await run(env, "2")
    assert (after.status, after.state_lost) == ("ok", False)


async def test_a_backend_that_does_not_start_is_the_infrastructure_s_failure(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    backend.refuses_to_start = True
    seen = await run(env, "1")
    assert (seen.status, env.state.last_exit_code) == ("sandbox_error", -1)
    backend.refuses_to_start = False
    backend.isolation = "process"  # and nothing is known of who can reach this
    seen = await run(env, "1")
    assert (seen.status, "MINIMUM_ISOLATION" in str(seen.reason)) == ("sandbox_error", True)
    assert (await env.reset_async()).metadata["execution"]["status"] == "sandbox_error"
    backend.isolation, backend.started, backend.closed = "lsm", 0, 0
    assert (await run(env, "1")).status == "ok"


async def test_cancelled_caller_keeps_no_interpreter_open(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async()
    gate = backend.opened[0].gate = asyncio.Event()
    reset = asyncio.create_task(env.reset_async())
    await backend.opened[0].closing.wait()
    reset.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reset
    gate.set()
    assert (await run(env, "1")).session_id == "1"
    await eventually(lambda: backend.opened[0].closed)


async def test_a_house_keeps_its_backend_for_as_long_as_anybody_holds_it(backend: FakeBackend) -> None:
    house = SharedBackend(SETTINGS)
    one, two = CodeInterpreterEnvironment(house), CodeInterpreterEnvironment(house)
    await one.reset_async()
    await two.reset_async()
    await one.close_async()
    assert (backend.started, backend.closed) == (1, 0)
    await one.close_async()  # again
    assert (await run(two, "1")).status == "ok"
    await two.close_async()
    assert (backend.started, backend.closed) == (1, 1)
    await one.reset_async()
    assert backend.started == 2
    await one.close_async()


async def test_a_first_step_begins_an_episode_with_the_time_out_and_stdin_it_names(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    backend.isolation = "remote"
    assert "Isolation: remote." in (await env.get_metadata()).description
    assert backend.opened == []
    await env.step_async(Execute(code="a", timeout_s=3, stdin="in"), timeout_s=7)
    await run(env, "b", timeout_s=7)
    seen = await run(env, "c")
    assert backend.opened[0].asked == [("a", 3, "in"), ("b", 7, None), ("c", None, None)]
    assert (seen.status, seen.isolation, seen.reward, seen.done) == ("ok", "remote", None, False)
    env.state.step_count = 99
    assert (env.state.step_count, env.state.execution_count, env.state.session_id) == (3, 3, "0")


async def test_bad_options_leave_the_episode_as_it_was(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async(episode_id="first")
    backend.snapshots = False
    for options in ({"packages": ["os"]}, {"task": "sum"}, {"nonsense": 1}):
        with pytest.raises(InvalidResetOptionError):
            await env.reset_async(**options)  # type: ignore[arg-type]
    assert env.state.episode_id == "first"
    assert (await run(env, "2")).result == "1"
    assert len(backend.opened) == 1
    with pytest.raises(InvalidResetOptionError, match="no snapshot"):
        await env.reset_async(snapshot=True)
    with pytest.raises(NotImplementedError):
        await env.list_splits()


async def test_unreadable_files_are_the_code_s_mistake(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async()
    backend.opened[0].files["big"] = bytes(MAX_FETCHED_BYTES + 1)
    for action in (GetFile(path="none"), PutFile(path="../a", content=""), GetFile(path="big")):
        seen = await do(env, action)
        assert seen.error is not None
        assert (seen.status, seen.error.ename, seen.exit_code) == ("error", "FileRefusedError", 1)
    without_task = await do(env, Submit(code="1"))
    assert without_task.error is not None
    assert (without_task.error.ename, without_task.done, without_task.reward) == ("NoTask", False, None)
    backend.opened[0].files["big"] = bytes(MAX_FETCHED_BYTES)
    assert (await do(env, GetFile(path="big"))).exit_code == 0
    await do(env, PutFile(path="a", content_base64="AAEC"))
    got = await do(env, GetFile(path="a"))
    assert got.file is not None
    assert (got.file.path, got.file.size, got.file.data) == ("a", 3, b"\x00\x01\x02")
    assert env.state.step_count == 7


async def test_restart_or_a_loss_keeps_only_the_files_of_the_reset(
    env: CodeInterpreterEnvironment, backend: FakeBackend
) -> None:
    await env.reset_async(files={"a": "x"})
    await run(env, "1")
    await do(env, PutFile(path="b", content="y"))
    seen = await do(env, Restart())
    assert (seen.status, seen.execution_count, [file.path for file in seen.files]) == ("ok", 0, ["a"])
    assert backend.opened[0].files == {"a": b"x"}
    assert env.state.execution_count == 0
    await do(env, PutFile(path="b", content="y"))
    lost = await run(env, "lose")
    assert (lost.status, lost.state_lost, lost.exit_code, lost.signal) == ("killed", True, 137, 9)
    assert env.state.last_exit_code == 137
    after = await run(env, "1")  # the loss is told once
    assert (after.status, after.state_lost, after.execution_count) == ("ok", False, 1)
    assert [(one.files, one.closed) for one in backend.opened] == [({}, True), ({"a": b"x"}, False)]
    await run(env, "lose")
    assert not (await do(env, Restart())).state_lost
    assert len(backend.opened) == 3
