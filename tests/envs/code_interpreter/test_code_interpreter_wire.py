"""The code interpreter through a real server, as its callers meet it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_hosts import HANDSHAKE, PATIENCE_S, STATELESS, host, text_of
from serve_process import ServeProcess, refusal, serve
from serving import opened

from envs.code_interpreter_env import (
    CodeInterpreterEnv,
)
from openenv_core import (
    ExecutionFailed,
    GenericEnvClient,
)

APP = "envs.code_interpreter_env.server.app:app"
ROOT = Path(__file__).parents[3]
ENVIRON = {"CODE_INTERPRETER_PRELOAD": "none", "PYTHONPATH": str(ROOT)}
RUNGS = ("namespaces", "lsm", "seccomp", "process")

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


@pytest.fixture
def raw(server: ServeProcess) -> Iterator[Any]:
    with GenericEnvClient(base_url=f"http://{server.address}").sync() as found:
        yield found


def test_state_is_kept_from_step_to_step(client: Any) -> None:
    began = client.reset(seed=3, episode_id="mine")
    assert (began.reward, began.done, began.observation.status) == (None, False, "ok")
    assert began.observation.isolation in RUNGS
    assert client.execute("x = 20").observation.result is None
    seen = client.execute("print('out')\nx + 1").observation
    assert (seen.stdout, seen.result, seen.execution_count) == ("out\n", "21", 2)
    seen = client.execute("1 / 0").observation
    assert (seen.status, seen.error.ename, seen.exit_code) == ("error", "ZeroDivisionError", 1)
    assert seen.isolation == began.observation.isolation
    assert client.execute("input()", stdin="typed\n").observation.result == "'typed'"
    state = client.state()
    assert (state.episode_id, state.seed, state.step_count, state.execution_count) == ("mine", 3, 4, 4)
    assert (state.isolation, state.last_exit_code) == (seen.isolation, 0)
    assert client.reset().observation.session_id != seen.session_id
    assert client.execute("x").observation.error.ename == "NameError"


def test_released_clients_find_their_keys_and_no_other(raw: Any) -> None:
    for result in (raw.reset(), raw.step({"code": "print(1)"})):
        assert set(result.observation) - {"reward", "done"} == {"metadata", "stdout", "stderr", "exit_code"}
        assert set(result.metadata) <= {"execution", "last_code"}
    assert (result.observation["stdout"], result.metadata["last_code"]) == ("1\n", "print(1)")
    assert raw.state()["last_exit_code"] == 0
    typed = raw.step({"type": "execute", "code": "print(1)"})
    assert {"status", "isolation", "truncated"} <= set(typed.observation)


@pytest.mark.parametrize("era", [HANDSHAKE, pytest.param(STATELESS, marks=pytest.mark.soak)])
async def test_an_official_client_runs_code_sees_figures_and_gives_up(server: ServeProcess, era: str) -> None:
    path = f"/mcp/{await opened(server.address)}"
    begun = asyncio.Event()

    async def progress(*_: Any) -> None:
        begun.set()

    async with host(server.address, path, era) as client:
        assert "run_python" in [tool.name for tool in (await client.list_tools()).tools]
        code = "class Figure:\n    def _repr_png_(self): return b'png'\nkept = 1\nFigure()"
        figure = await client.call_tool("run_python", {"code": code})
        assert [block.type for block in figure.content] == ["image", "text"]
        failed = await client.call_tool("run_python", {"code": "1 / 0"})
        assert failed.is_error
        assert "ZeroDivisionError" in text_of(failed)
        endless = {"code": "while True: pass"}
        call = asyncio.create_task(client.call_tool("run_python", endless, progress_callback=progress))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        call.cancel()
        await asyncio.wait([call], timeout=PATIENCE_S)
        after = await client.call_tool("run_python", {"code": "kept"})
        assert text_of(after) == "1"


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
    for seen in (began, wrong.observation, right.observation):
        said = seen.model_dump_json()
        assert HIDDEN_NUMBER not in said
        assert HIDDEN_TEXT not in said
    assert (client.state().task, client.state().done) == ("double", True)
    with pytest.raises(ExecutionFailed, match="after the end"):
        client.execute("1")
    assert not client.reset().done
    assert client.execute("1").observation.result == "1"


def test_a_task_is_chosen_by_its_place_or_by_the_seed(client: Any) -> None:
    for options in ({"split": "train", "index": 1}, {"task": {"split": "train", "id": "eleven"}}):
        assert client.reset(**options).observation.prompt == "Print 11."
    drawn = [client.reset(task={"split": "train"}, seed=seed).observation.prompt for seed in [*range(8)] * 2]
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) == 2
    for task in ("none", {"split": "none"}, {"split": "train", "index": 2}, {"index": 1}, 3):
        with pytest.raises(ExecutionFailed, match="reset option task"):
            client.reset(task=task)


def test_the_task_routes_tell_nothing_that_is_hidden(server: ServeProcess) -> None:
    place = "/code_interpreter"
    assert server.get(f"{place}/splits")[1] == [{"name": "train", "type": "train"}]
    assert server.request("POST", f"{place}/num_tasks", {"split": "train"})[1] == {"num_tasks": 2}
    told = server.request("POST", f"{place}/tasks", {"split": "train"})[1]
    assert [task["id"] for task in told["tasks"]] == ["double", "eleven"]
    assert HIDDEN_NUMBER not in json.dumps(told)
    assert server.request("POST", f"{place}/task", {"split": "train", "index": 2})[0] == 400


@pytest.mark.slow
def test_beyond_loopback_weak_walls_are_refused_unless_they_are_named() -> None:
    weak = {**ENVIRON, "CODE_INTERPRETER_STRONGEST_ISOLATION": "process"}
    beyond = ("--host", "0.0.0.0", "--insecure")
    status, said = refusal(*beyond, "--port", "0", app=APP, **weak)
    assert status == 2
    assert "set CODE_INTERPRETER_MINIMUM_ISOLATION=process" in said
    assert "Traceback" not in said
    with serve(*beyond, app=APP, **weak, CODE_INTERPRETER_MINIMUM_ISOLATION="process") as server:
        seen = server.request("POST", "/step", {"action": {"type": "execute", "code": "1"}})[1]
        assert seen["observation"]["isolation"] == "process"
        assert "Isolation: process." in server.get("/metadata")[1]["description"]
    status, said = refusal(app=APP, **ENVIRON, CODE_INTERPRETER_TIMEOUT_S="soon")
    assert (status, "CODE_INTERPRETER_TIMEOUT_S" in said, "Traceback" in said) == (2, True, False)
