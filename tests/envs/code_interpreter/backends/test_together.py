"""Together's Code Interpreter as documented, against a fake that speaks the documentation. Not the service itself."""

import asyncio
import hashlib
import logging
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_together import TOKEN, Fail, FakeTogether, fake_together

from envs.code_interpreter_env.models import CodeInterpreterObservation, Execute, GetFile
from envs.code_interpreter_env.server.backends import together
from envs.code_interpreter_env.server.backends.together import (
    TogetherBackend,
    TogetherSettings,
    backend_from_environment,
)
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend
from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)
from openenv_core.tasks import InvalidResetOptionError

LIMITS = Limits(timeout_s=20.0, output_bytes=1000, output_hard_bytes=20_000, outputs_bytes=10_000)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeTogether]:
    with fake_together() as made:
        yield made


@pytest.fixture
def fake(server: FakeTogether, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTogether]:
    monkeypatch.setattr(together, "MIN_BACKOFF_S", 0.02)
    yield server
    server.expire()
    for kept in (server.seen, server.hanging, server.fails, server.fails_of_sessions):
        kept.clear()


def settings(fake: FakeTogether, **options: Any) -> TogetherSettings:
    return TogetherSettings(**{"token": TOKEN, "base_url": fake.base_url, **options})


@pytest.fixture
async def backend(fake: FakeTogether) -> AsyncIterator[TogetherBackend]:
    made = TogetherBackend(settings(fake))
    await made.start()
    yield made
    await made.close()


async def test_state_output_results_and_errors(backend: TogetherBackend, fake: FakeTogether) -> None:
    session = await backend.open(LIMITS)
    first = await session.execute("import sys\nx = 20\nprint('hé')\nprint('low', file=sys.stderr)\nx + 1")
    assert (first.status, first.stdout, first.stderr, first.result) == ("ok", "hé\n", "low\n", "21")
    assert (first.exit_code, first.execution_count, first.isolation) == (0, 1, "remote")
    assert [each.output_type for each in first.outputs] == ["execute_result"]
    second = await session.execute("x / 0")
    assert (second.status, second.exit_code, second.state_lost) == ("error", 1, False)
    assert second.error is not None
    assert (second.error.ename, second.error.evalue) == ("ZeroDivisionError", "division by zero")
    assert second.error.traceback[0].startswith("Traceback")
    third = await session.execute("x")
    assert (third.result, third.execution_count, third.session_id) == ("20", 3, session.session_id)
    assert len(fake.sessions) == 1
    posted = {body.get("session_id") for method, _, body in fake.seen[2:] if method == "POST"}
    assert posted == set(fake.sessions)


async def test_a_rate_that_is_too_high_is_waited_out(backend: TogetherBackend, fake: FakeTogether) -> None:
    session = await backend.open(LIMITS)
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    fake.fails.extend([Fail(429), Fail(429, {"Retry-After": "0"}), Fail(429, {"Retry-After": date})])
    ran = await session.execute("open('n', 'a').write('x'); print(len(open('n').read()))")
    assert (ran.status, ran.stdout, len(fake.fails)) == ("ok", "1\n", 0)


async def test_output_is_cut_and_a_flood_restarts_the_session(
    backend: TogetherBackend, fake: FakeTogether
) -> None:
    session = await backend.open(LIMITS)
    ran = await session.execute("print('é' * 1000)")
    assert (ran.stdout, ran.cut.stdout, ran.cut.stderr) == ("é" * 500, True, False)
    ran = await session.execute("y = 1\nprint('x' * 30_000)")
    assert (ran.status, ran.exit_code, ran.state_lost) == ("output_limit", 137, False)
    assert ran.stdout == "x" * 1000
    ran = await session.execute("print('x' * 1_000_000)")
    assert (ran.status, ran.stdout) == ("output_limit", "")
    assert (await session.execute("y")).result == "1"
    await session.restart()
    assert (await session.execute("'y' in globals()")).result == "False"
    assert len(fake.sessions) == 2
    await session.close()
    await session.close()
    with pytest.raises(SandboxClosedError):
        await session.execute("1")


async def test_uploads_go_by_name_and_what_the_service_lacks_is_refused(
    backend: TogetherBackend, fake: FakeTogether
) -> None:
    session = await backend.open(LIMITS, packages=("json",))
    data = bytes(range(256)) * 5000
    put = await session.put_file("data.bin", data)
    assert (put.path, put.size, put.sha256) == ("data.bin", len(data), hashlib.sha256(data).hexdigest())
    code = "import hashlib\nhashlib.sha256(open('data.bin', 'rb').read()).hexdigest(), 'json' in globals()"
    assert (await session.execute(code)).result == f"('{put.sha256}', False)"
    before = len(fake.seen)
    for path in ("../up", "/etc/passwd", "", "folder/file", "nul\0", ".", "..", "a\\b", "x" * 256):
        with pytest.raises(FileRefusedError):
            await session.put_file(path, b"")
    with pytest.raises(FileRefusedError, match="larger than"):
        await session.put_file("big", b"x" * (LIMITS.file_bytes + 1))
    with pytest.raises(FileRefusedError, match="no call that reads"):
        await session.get_file("data.bin")
    with pytest.raises(FileRefusedError, match="no call that lists"):
        await session.list_files()
    refused = await session.execute("input()", stdin="a line")
    assert (refused.status, refused.exit_code, refused.state_lost) == ("sandbox_error", -1, False)
    assert "no stdin" in str(refused.reason)
    assert len(fake.seen) == before


async def test_an_environment_reports_what_the_service_lacks(
    fake: FakeTogether, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", TOKEN)
    monkeypatch.setenv("TOGETHER_BASE_URL", fake.base_url)
    env = CodeInterpreterEnvironment(SharedBackend(InterpreterSettings(backend="together")))
    try:
        await env.reset_async(files={"in.txt": "3 4"})
        ran = await env.step_async(
            Execute(type="execute", code="print(sum(map(int, open('in.txt').read().split())))")
        )
        assert isinstance(ran, CodeInterpreterObservation)
        assert (ran.status, ran.stdout, ran.isolation) == ("ok", "7\n", "remote")
        refused = await env.step_async(GetFile(path="in.txt"))
        assert isinstance(refused, CodeInterpreterObservation)
        assert refused.error is not None
        assert (refused.status, refused.error.ename) == ("error", "FileRefusedError")
        with pytest.raises(InvalidResetOptionError, match="no folders"):
            await env.reset_async(files={"data/in.txt": "3 4"})
    finally:
        await env.close_async()


async def test_lost_session_is_reported_once(backend: TogetherBackend, fake: FakeTogether) -> None:
    session = await backend.open(LIMITS)
    await session.execute("x = 1")
    fake.expire()
    ran = await session.execute("x")
    assert (ran.status, ran.state_lost) == ("sandbox_error", True)
    assert "session not found" in str(ran.reason)
    ran = await session.execute("2")
    assert (ran.status, ran.result, ran.state_lost) == ("ok", "2", False)
    # Where an upload finds it out, that is told as well.
    fake.expire()
    with pytest.raises(SandboxFailureError, match="session not found"):
        await session.put_file("x", b"")
    with pytest.raises(SandboxFailureError, match="files are gone"):
        await session.put_file("x", b"")
    await session.put_file("x", b"")
    fake.expire()
    with pytest.raises(SandboxFailureError, match="session not found"):
        await session.put_file("x", b"")
    ran = await session.execute("3")
    assert (ran.status, ran.state_lost) == ("sandbox_error", True)
    # So is what a cancelled execution may have done.
    fake.fails.append(Fail(how="hang"))
    task = asyncio.create_task(session.execute("x = 1"))
    await asyncio.to_thread(fake.hanging.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ran = await session.execute("x")
    assert (ran.status, ran.state_lost, "cancelled" in str(ran.reason)) == ("sandbox_error", True, True)
    assert (await session.execute("4")).result == "4"


@pytest.mark.soak
async def test_retries_end_at_the_timeout(fake: FakeTogether) -> None:
    backend = TogetherBackend(settings(fake, retry_timeout_s=3.0))
    await backend.start()
    session = await backend.open(LIMITS)
    fake.fails.append(Fail(429, {"Retry-After": "3600"}))
    ran = await session.execute("1")
    assert (ran.status, ran.exit_code, ran.state_lost) == ("sandbox_error", -1, False)
    assert ran.reason is not None
    assert "after 1 attempts, asked to wait 3600 s" in ran.reason
    fake.fails.extend([Fail(429)] * 50)
    ran = await session.execute("1")
    assert ran.status == "sandbox_error"
    assert 1 < 50 - len(fake.fails) < 10  # it was tried again, with pauses
    await backend.close()


async def test_code_that_may_have_run_is_never_run_twice(
    backend: TogetherBackend, fake: FakeTogether
) -> None:
    session = await backend.open(LIMITS)
    await session.execute("n = 0")
    fails = [
        Fail(500),
        Fail(503, {"Retry-After": "0"}),
        Fail(how="close"),
        Fail(how="cut"),
        Fail(body=b"<html>"),
        Fail(body=b"[" * 100_000),
        Fail(body=b'{"data": {"outputs": [7], "session_id": "x"}, "errors": null}'),
        Fail(body=b'{"data": null, "errors": null}'),
        Fail(body=b"7"),
    ]
    for times, fail in enumerate(fails, 1):
        fake.fails.append(replace(fail, after=True))
        ran = await session.execute("n += 1\nn")
        assert (ran.status, ran.exit_code, ran.error, ran.result) == ("sandbox_error", -1, None, None), fail
        assert (await session.execute("n")).result == str(times), fail
    # An upload may be done twice.
    fake.fails.extend([Fail(500), Fail(502, after=True), Fail(how="cut", after=True)])
    await session.put_file("file", b"content")
    assert (await session.execute("open('file').read()")).result == "'content'"
    fake.fails.append(Fail(500))
    assert (await backend.open(LIMITS)).session_id != session.session_id


@pytest.mark.soak
async def test_code_past_its_timeout_is_abandoned(backend: TogetherBackend, fake: FakeTogether) -> None:
    session = await backend.open(LIMITS)
    await session.execute("x = 1")
    backend._settings = settings(fake, network_s=2.0)
    fake.fails.append(Fail(how="hang"))
    ran = await session.execute("while True: pass", timeout_s=0.2)
    assert (ran.status, ran.exit_code, ran.state_lost) == ("timeout", 124, True)
    assert "no way to interrupt" in str(ran.reason)
    backend._settings = settings(fake)
    after = await session.execute("'x' in globals()")
    assert (after.result, after.state_lost, len(fake.sessions)) == ("False", False, 2)
    backend._settings = settings(fake, network_s=0.2)
    fake.fails.append(Fail(how="hang"))
    fake.fails_of_sessions.append(Fail(how="hang"))  # then it is the service's fault
    ran = await session.execute("pass", timeout_s=0.2)
    assert (ran.status, ran.exit_code, ran.state_lost) == ("sandbox_error", -1, True)


async def test_wrong_token_is_reported_and_never_shown(
    fake: FakeTogether, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "tgp_v1_another-token-entirely"
    made = settings(fake, token=wrong)
    with pytest.raises(SandboxUnavailableError, match=r"401.*TOGETHER_API_KEY") as refused:
        await TogetherBackend(made).start()
    shown = "".join(traceback.format_exception(refused.value, chain=True))
    assert wrong not in f"{shown}{refused.value.__context__}{made!r}{caplog.text}"
    assert fake.seen == []


async def test_unsupported_requests_are_refused(backend: TogetherBackend, fake: FakeTogether) -> None:
    with pytest.raises(ConfigurationError, match="snapshot"):
        await backend.open(LIMITS, snapshot=True)
    with pytest.raises(ConfigurationError, match="no_such_package"):
        await backend.open(LIMITS, packages=("json", "no_such_package"))
    nowhere = TogetherBackend(settings(fake, base_url="http://127.0.0.1:9/v1", retry_timeout_s=0.1))
    with pytest.raises(SandboxUnavailableError, match="gave up after"):
        await nowhere.start()


def test_settings_come_from_the_environment() -> None:
    made = backend_from_environment({"TOGETHER_API_KEY": f" {TOKEN} "})._settings
    assert (made.token, made.base_url) == (TOKEN, "https://api.together.ai/v1")
    urls = ("http://example.com/v1", "https://user:secret@example.com/v1", "example.com")
    refused = [{"TOGETHER_API_KEY": TOKEN, "TOGETHER_BASE_URL": url} for url in urls]
    for environ in [{}, {"TOGETHER_API_KEY": "with space"}, *refused]:
        with pytest.raises(ConfigurationError):
            backend_from_environment(environ)


async def test_code_of_many_sessions_runs_at_once() -> None:
    waiting: list[asyncio.StreamWriter] = []

    async def answer_when_all_ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        waiting.append(writer)
        if len(waiting) == 120:
            body = b'{"data": {"session_id": "s", "outputs": []}}'
            for each in waiting:
                each.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                each.close()

    async with await asyncio.start_server(answer_when_all_ask, "127.0.0.1", 0) as service:
        url = f"http://127.0.0.1:{service.sockets[0].getsockname()[1]}"
        backend = TogetherBackend(TogetherSettings(token=TOKEN, base_url=url))
        async with asyncio.timeout(60):
            options: dict[str, Any] = {"timeout_s": 9.0, "max_bytes": 1000, "repeatable": False}
            await asyncio.gather(*(backend.execute("1", None, **options) for _ in range(120)))
        await backend.close()
