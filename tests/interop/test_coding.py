"""Running code: a folder laid out like the released coding environment, its client, and the code interpreter."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from released import OVER_SOCKETS, drive, our_server, released_server

from envs.code_interpreter_env import CodeInterpreterEnv
from openenv_core import ValidationFailedError, is_infrastructure_failure

pytestmark = [pytest.mark.interop, pytest.mark.soak, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parent / "folders" / "coding_env"
APP = "coding_env.server.app:app"
EVERY_CLIENT = [*((version, "released") for version in OVER_SOCKETS), (None, "ours")]
"""Release whose Python runs the client, and whose package the client stands on."""

RELEASED_FIELDS = {"stdout", "stderr", "exit_code", "done", "reward", "metadata"}


def code(text: str) -> dict[str, Any]:
    return {"step": {"code": text}}


RESET: dict[str, Any] = {"reset": {}}
STATE: dict[str, Any] = {"state": {}}
EPISODE = [
    RESET,
    code("x = 41\nprint('hello')"),
    code("print(x + 1)"),
    code("import sys\nprint('lost', file=sys.stderr)\n1 / 0"),
    STATE,
    code("print(x)"),
    code("import socket"),
    STATE,
    RESET,
    code("print(x)"),
    STATE,
]


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[[str], str]]:
    """Return the URL of the folder, served by a release or by us, or of our own interpreter."""
    with ExitStack() as stack:

        @cache
        def of(whose: str) -> str:
            if whose in OVER_SOCKETS:
                return stack.enter_context(released_server(whose, APP, FOLDER.parent))
            return stack.enter_context(our_server(str(FOLDER) if whose == "folder" else whose))

        yield of


def play_folder(
    url: str, version: str | None, whose: str, plan: list[dict[str, Any]]
) -> dict[str, list[Any]]:
    """Return what the async and the sync client observed."""
    observed: dict[str, list[Any]] = drive(
        version, "folder_client", url, str(FOLDER), whose, "async", "sync", plan=plan
    )
    return observed


def check_episode(outcomes: list[Any]) -> None:
    begun, hello, sum_, wrong, state, still, _, later, again, gone, last = outcomes
    played = (begun, hello, sum_, wrong, still, again, gone)
    assert {(outcome["kind"], outcome["done"]) for outcome in played} == {("CodeObservation", False)}
    seen = [outcome["observation"] for outcome in played]
    assert [one["stdout"] for one in seen] == ["", "hello\n", "42\n", "", "41\n", "", ""]
    assert [one["exit_code"] for one in seen] == [0, 0, 0, 1, 0, 0, 1]
    assert seen[3]["stderr"].startswith("lost\n")
    assert "ZeroDivisionError: division by zero" in seen[3]["stderr"]
    assert state == {"kind": "CodeState", "named": True, "step_count": 3, "last_exit_code": 1}
    assert (later["step_count"], later["last_exit_code"]) == (5, 0)
    assert "NameError" in seen[-1]["stderr"]  # a reset forgets
    assert (last["step_count"], last["last_exit_code"]) == (1, 1)


@pytest.mark.parametrize(
    ("served_by", "version", "whose"),
    # What is expected of us is what each release itself does.
    [
        *((version, version, "released") for version in OVER_SOCKETS),
        *(("folder", *client) for client in EVERY_CLIENT),
    ],
)
def test_folder_is_served_as_by_its_release_to_every_client(
    served_by: str, version: str | None, whose: str, served: Callable[[str], str]
) -> None:
    for outcomes in play_folder(served(served_by), version, whose, EPISODE).values():
        check_episode(outcomes)
        assert outcomes[6]["reward"] == pytest.approx(-0.9)
        if served_by == "folder":
            assert outcomes[1]["reward"] == pytest.approx(0.1)


def test_code_of_the_folder_runs_in_the_sandbox(served: Callable[[str], str]) -> None:
    lines = (
        *("import os\nprint(os.getppid())\n[1, 'a', None]", "import socket\nsocket.socket()"),
        *("open('/etc/passwd').read()", "os._exit(3)", "print(os)", "print(safe_json_dumps({'a': {1, 2}}))"),
    )
    outcomes = play_folder(served("folder"), None, "ours", [RESET, *map(code, lines)])["async"]
    first, network, passwd, ended, lost, helped = (one["observation"] for one in outcomes[1:])
    assert first["stdout"].endswith("\n[1, 'a', None]")
    for refused in (network, passwd):
        assert (refused["exit_code"], "Error" in refused["stderr"]) == (1, True)
    # It ended its own interpreter, and what that knew is gone; what executors give to code comes back.
    assert ended["exit_code"] == 3
    assert "NameError: name 'os'" in lost["stderr"]
    assert helped["stdout"] == '{"a": "{1, 2}"}\n'


@pytest.mark.parametrize(("version", "whose"), EVERY_CLIENT)
def test_released_coding_clients_play_the_code_interpreter(
    version: str | None, whose: str, served: Callable[[str], str]
) -> None:
    """Their observation model refuses every key that the released environment does not send."""
    for outcomes in play_folder(served("code_interpreter"), version, whose, EPISODE).values():
        check_episode(outcomes)
        seen = [outcome["observation"] for outcome in outcomes if "observation" in outcome]
        assert all({"stdout", "stderr", "exit_code"} <= set(one) <= RELEASED_FIELDS for one in seen)
        if version in ("0.10.0", None):  # before 0.4 metadata was dropped on the way
            run = outcomes[1]["observation"]["metadata"]
            assert run["last_code"] == EPISODE[1]["step"]["code"]
            assert run["execution"]["status"] == "ok"
            failed = outcomes[3]["observation"]["metadata"]["execution"]
            assert (failed["status"], failed["error"]["ename"]) == ("error", "ZeroDivisionError")


@pytest.mark.parametrize("version", OVER_SOCKETS)
async def test_typed_client_plays_released_coding_servers(version: str, served: Callable[[str], str]) -> None:
    async with CodeInterpreterEnv(served(version)) as env:
        begun = (await env.reset()).observation
        assert (begun.status, begun.stdout, begun.outputs, begun.isolation) == ("ok", "", (), "")
        assert (await env.execute("x = 41")).observation.exit_code == 0
        run = await env.execute("print(x + 1)")
        assert (run.observation.stdout, run.reward, run.done) == ("42\n", pytest.approx(0.1), False)
        failed = (await env.execute("1 / 0")).observation
        assert (failed.exit_code, failed.status) == (1, "error")
        assert "ZeroDivisionError" in failed.stderr
        assert (failed.error, failed.state_lost, failed.files) == (None, False, ())
        assert not is_infrastructure_failure(failed)
        assert (await env.step({"code": "print(x)"})).observation.stdout == "41\n"
        # What such a server cannot do is refused, and never left out.
        with pytest.raises(ValidationFailedError, match="timeout_s"):
            await env.execute("x", timeout_s=1.0)
        with pytest.raises(ValidationFailedError):
            await env.put_file("a.txt", "a")
        state = await env.state()
        assert (state.last_exit_code, state.step_count, state.execution_count) == (0, 4, 0)
