"""The code interpreter through a server: tasks, grading, and whether a failure is the infrastructure's."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp_hosts import HANDSHAKE, host, text_of
from serve_process import ServeProcess, run_refused_server, serve
from serving import WAIT_TIMEOUT_S, open_session, serving

from envs.code_interpreter_env import CodeInterpreterEnv, CodeInterpreterObservation, Execute
from envs.code_interpreter_env.server.app import app
from openenv_core import (
    Action,
    Environment,
    ExecutionError,
    GenericEnvClient,
    Observation,
    State,
    ValidationFailedError,
    infrastructure_failure,
    is_infrastructure_failure,
    unscored_reason,
)
from servers import create_app

APP = "envs.code_interpreter_env.server.app:app"
ROOT = Path(__file__).parents[3]
ENVIRON = {"CODE_INTERPRETER_PRELOAD": "none", "PYTHONPATH": str(ROOT)}
# Long enough not to be among the digits of a time, or of an id.
HIDDEN_NUMBER, HIDDEN_TEXT = "246908642", "hemphemp"
TASKS: list[dict[str, Any]] = [
    {
        "kind": "function",
        "id": "double",
        "prompt": "Write double(x).",
        "entry": "double",
        "attempts": 2,
        "files": {"notes.txt": "twice"},
        "public": [{"args": [2], "expected": 4}],
        "hidden": [
            {"args": [123454321], "expected": int(HIDDEN_NUMBER)},
            {"args": ["hemp"], "expected": HIDDEN_TEXT},
        ],
    },
    {"kind": "numeric", "id": "eleven", "prompt": "Print 11.", "answer": 11},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in TASKS))
    with serve(app=APP, **ENVIRON, CODE_INTERPRETER_TASKS=str(folder)) as found:
        yield found


@pytest.fixture
def client(server: ServeProcess) -> Iterator[Any]:  # the sync face passes the typed client's own methods on
    with CodeInterpreterEnv(base_url=f"http://{server.address}").sync() as found:
        yield found


async def test_an_official_client_runs_code_and_sees_figures(server: ServeProcess) -> None:
    async with host(server.address, f"/mcp/{await open_session(server.address)}", HANDSHAKE) as client:
        assert "run_python" in [tool.name for tool in (await client.list_tools()).tools]
        code = "class Figure:\n    def _repr_png_(self): return b'png'\nkept = 1\nFigure()"
        figure = await client.call_tool("run_python", {"code": code})
        assert [block.type for block in figure.content] == ["image", "text"]
        failed = await client.call_tool("run_python", {"code": "1 / 0"})
        assert failed.is_error
        assert "ZeroDivisionError" in text_of(failed)
        assert text_of(await client.call_tool("run_python", {"code": "kept"})) == "1"


def test_a_task_is_given_judged_and_over(client: Any) -> None:
    began = client.reset(task="double", files={"mine.txt": "x"}).observation
    assert (began.prompt, began.task["id"], began.task["hidden_cases"]) == ("Write double(x).", "double", 2)
    assert [file.path for file in began.files] == ["notes.txt", "mine.txt"]
    assert client.execute("open('notes.txt').read()").observation.result == "'twice'"
    wrong = client.submit("def double(x): return 4")
    assert (wrong.reward, wrong.done, wrong.observation.status) == (0.0, False, "ok")
    assert (wrong.observation.verdict.passed, wrong.observation.verdict.total) == (1, 3)
    right = client.submit("def double(x): return x * 2")
    assert (right.reward, right.done, right.observation.verdict.reason) == (1.0, True, "passed")
    assert right.observation.isolation == began.isolation
    told = "".join(seen.model_dump_json() for seen in (began, wrong.observation, right.observation))
    assert HIDDEN_NUMBER not in told
    assert HIDDEN_TEXT not in told
    assert (client.state().task, client.state().done) == ("double", True)
    with pytest.raises(ExecutionError, match="after the end"):
        client.execute("1")
    assert not client.reset().done
    assert client.execute("1").observation.result == "1"


def test_a_task_is_chosen_by_its_place_or_by_the_seed(client: Any) -> None:
    for options in ({"split": "train", "index": 1}, {"task": {"split": "train", "id": "eleven"}}):
        assert client.reset(**options).observation.prompt == "Print 11."
    seeds = [*range(8)] * 2
    prompts = [client.reset(task={"split": "train"}, seed=seed).observation.prompt for seed in seeds]
    assert prompts[:8] == prompts[8:]
    assert len(set(prompts)) == 2
    for task in ("none", {"split": "none"}, {"split": "train", "index": 2}, {"index": 1}, 3):
        with pytest.raises(ExecutionError, match="reset option task"):
            client.reset(task=task)


def test_task_routes_reveal_nothing_hidden(server: ServeProcess) -> None:
    place = "/code_interpreter"
    assert server.get(f"{place}/splits")[1] == [{"name": "train", "type": "train"}]
    assert server.request("POST", f"{place}/num_tasks", {"split": "train"})[1] == {"num_tasks": 2}
    reply = server.request("POST", f"{place}/tasks", {"split": "train"})[1]
    assert [task["id"] for task in reply["tasks"]] == ["double", "eleven"]
    assert HIDDEN_NUMBER not in json.dumps(reply)
    assert server.request("POST", f"{place}/task", {"split": "train", "index": 2})[0] == 400


@pytest.mark.slow
def test_beyond_loopback_weak_walls_are_refused_unless_they_are_named() -> None:
    weak = {**ENVIRON, "CODE_INTERPRETER_STRONGEST_ISOLATION": "process"}
    beyond = ("--host", "0.0.0.0", "--insecure")
    status, output = run_refused_server(*beyond, "--port", "0", app=APP, **weak)
    assert status == 2
    assert "set CODE_INTERPRETER_MINIMUM_ISOLATION=process" in output
    assert "Traceback" not in output
    with serve(*beyond, app=APP, **weak, CODE_INTERPRETER_MINIMUM_ISOLATION="process") as server:
        seen = server.request("POST", "/step", {"action": {"type": "execute", "code": "1"}})[1]
        assert seen["observation"]["isolation"] == "process"
        assert "Isolation: process." in server.get("/metadata")[1]["description"]
    status, output = run_refused_server(app=APP, **ENVIRON, CODE_INTERPRETER_TIMEOUT_S="soon")
    assert (status, "CODE_INTERPRETER_TIMEOUT_S" in output, "Traceback" in output) == (2, True, False)


HOSTILE = (
    "1 / 0",
    "raise SystemExit(-1)",
    "import os; os._exit(255)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os; os.kill(os.getppid(), 9)",
    "import os; [os.close(fd) for fd in range(3, 64)]",
    "print('sandbox_error'); raise RuntimeError('sandbox_error')",
    "class SandboxUnavailableError(Exception): pass\nraise SandboxUnavailableError('sandbox_error')",
    "bytearray(1 << 40)",
    "while True: pass",
    "while True: print('x' * 65536)",
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(app) as address:
        yield f"http://{address}"


def zygotes() -> list[psutil.Process]:
    """Return the processes of this one that interpreters are forked from."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.endswith("sandbox/inside/boot.py") for part in process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
async def test_no_misbehaviour_of_code_counts_as_infrastructure_failure(url: str) -> None:
    async with CodeInterpreterEnv(url) as env, GenericEnvClient(url) as released:
        for code in HOSTILE:
            await env.reset(limits={"timeout_s": 1.0, "grace_s": 0.1})
            result = await env.execute(code)
            assert result.observation.status != "sandbox_error", code
            assert not is_infrastructure_failure(result), code
            assert unscored_reason(result) is None
        for code in HOSTILE[:-2]:
            await released.reset()
            assert not is_infrastructure_failure(await released.step({"code": code})), code


async def test_killed_zygote_is_infrastructure_failure_and_the_next_episode_works(url: str) -> None:
    async with CodeInterpreterEnv(url) as env, GenericEnvClient(url) as released:
        for client in (env, released):
            await client.reset()
            await client.step({"code": "x = 'kept'"})
        before = zygotes()
        assert before
        for process in before:
            process.kill()
        for client in (env, released):
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while not (
                    failure := infrastructure_failure(told := await client.step({"code": "print(x)"}))
                ):
                    # The interpreters end a moment after what they were forked from.
                    assert "kept" in str(told.observation)
            assert infrastructure_failure(told.observation) == failure
            await client.reset()
            sound = await client.step({"code": "print(2)"})
            assert not is_infrastructure_failure(sound)


class CodeAlone(Action):
    code: str


class Printed(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class Repeats(Environment[CodeAlone, Printed, State]):
    """Runs nothing: it repeats the code, and fails where it is told to."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Printed:
        return Printed()

    def step(self, action: CodeAlone) -> Printed:
        failed = action.code == "fail"
        told = {"stderr": "it failed" if failed else "", "metadata": {"last_code": action.code}}
        return Printed(stdout=action.code, exit_code=int(failed), reward=0.5, **told)

    @property
    def state(self) -> State:
        return State(last_exit_code=0)


async def test_code_alone_is_sent_once_a_type_was_refused() -> None:
    app = create_app(Repeats, CodeAlone, Printed)
    async with serving(app) as address, CodeInterpreterEnv(f"http://{address}") as env:
        sent: list[Any] = []
        payload = env._step_payload
        env._step_payload = lambda action: sent.append(made := payload(action)) or made  # type: ignore[method-assign]
        first = (await env.reset()).observation
        assert first == CodeInterpreterObservation()
        result = await env.execute("one")
        assert (result.observation.stdout, result.observation.status, result.reward) == ("one", "ok", 0.5)
        assert result.observation.metadata == {"last_code": "one"}
        failed = (await env.execute("fail")).observation
        # Such a server has no status; what it says is the code's fault, and nobody else's.
        assert (failed.status, failed.error, failed.state_lost) == ("error", None, False)
        assert not is_infrastructure_failure(failed)
        assert (await env.step({"code": "two"})).observation.stdout == "two"  # type: ignore[arg-type]
        assert sent == [Execute(code="one"), {"code": "one"}, {"code": "fail"}, {"code": "two"}]
        # What it cannot do is refused by it, and not left out.
        for refused in (env.execute("three", timeout_s=1.0), env.execute("three", stdin="in"), env.restart()):
            with pytest.raises(ValidationFailedError):
                await refused
        assert (await env.execute("four")).observation.stdout == "four"
