"""Tools: released clients against our servers, ours against released servers, and standard MCP clients."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import mcp
import pytest
from module_run import ROOT, finished
from released import borrowed, drive, environment, our_server, released_server

from openenv_core import MCPToolClient, ToolCallError
from openenv_core.tools import CallToolAction, CallToolObservation, ToolErrorType

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

WITH_TOOLS = ("0.10.0", "0.3.1")
"""The releases that know tools."""

FOLDER = Path(__file__).parent / "folders" / "tally_env"
OURS = ["add", "greet", "profile", "fail", "wait"]
NAMES = ["add", "greet", "profile", "mumble", "fail", "wait", "block"]
PLAN: list[dict[str, Any]] = [
    {"reset": {"seed": 3, "episode_id": "mine"}},
    {"list": None},
    {"call": ["add", {"amount": 2}]},
    {"call": ["add", {"amount": 1}]},
    {"call": ["profile", {"who": "x"}]},
    {"call": ["fail", {"why": "because"}]},
    {"call": ["add", {"amount": "many"}]},
    {"call": ["nope", {}]},
    {"has": "add"},
    {"has": "reset"},
    {"state": None},
]


@pytest.fixture(scope="module")
def tally_url() -> Iterator[str]:
    with our_server("tally:app") as url:
        yield url


@pytest.fixture(scope="module")
def folder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder that was written for the released package, served by ours; the fastmcp that it wants is borrowed."""
    packages = borrowed("0.3.1", tmp_path_factory.mktemp("packages"))
    with our_server(str(FOLDER), packages=packages) as url:
        yield url


@pytest.fixture(scope="module")
def released_tally() -> Iterator[Callable[[str], str]]:
    """The same folder, served by its release."""
    with ExitStack() as stack:
        yield cache(
            lambda version: stack.enter_context(
                released_server(version, "tally_env.server.app:app", FOLDER.parent)
            )
        )


@pytest.mark.parametrize("version", ["0.10.0", pytest.param("0.3.1", marks=pytest.mark.soak)])
def test_released_clients_see_no_difference(
    version: str, tally_url: str, folder_url: str, released_tally: Callable[[str], str]
) -> None:
    """Against our own tool environment, the released folder on our server, and its own release."""
    urls = (tally_url, folder_url, released_tally(version))
    # The list is a step to 0.3.1; to 0.10 nothing of this is one, since it goes past the step of its own servers.
    steps = {"0.10.0": (6, 6, 0), "0.3.1": (6, 7, 7)}[version]
    played = drive(version, "tool_client", str(FOLDER), *urls, plan=PLAN)
    for outcomes, counted, names in zip(played, steps, (OURS, NAMES, NAMES), strict=True):
        for begun, listed, five, six, profile, failed, wrong, nope, has, has_not, state in outcomes.values():
            assert begun["done"] is False
            assert [tool[0] for tool in listed] == names
            assert listed[0] == ["add", "Add to the total, and return it.", ["amount"]]
            assert (five, six) == (5, 6)
            # The client of 0.3 takes whatever has a key "data" for a wrapping.
            unwrapped = version == "0.3.1" and names is OURS
            assert profile == ([1, 2] if unwrapped else {"who": "x", "data": [1, 2]})
            assert all(outcome["error"] for outcome in (failed, wrong, nope))  # a RuntimeError each time
            assert "because" in failed["text"]
            assert (has, has_not) == (True, False)
            assert state == {"episode_id": "mine", "step_count": counted}


@pytest.mark.soak
@pytest.mark.parametrize("version", [*WITH_TOOLS, "ours"])
@pytest.mark.parametrize("mode", ["simulation", "production"])
async def test_client_calls_tools_of_a_folder(
    version: str, mode: str, folder_url: str, released_tally: Callable[[str], str]
) -> None:
    url = folder_url if version == "ours" else released_tally(version)
    async with MCPToolClient(url, mode=mode) as env:
        first = await env.reset(seed=3, episode_id="mine")
        assert (first.reward, first.observation.done) == (0.0, False)
        tools = await env.list_tools()
        assert [tool.name for tool in tools] == NAMES
        assert tools[0].input_schema["required"] == ["amount"]
        assert await env.call_tool("add", amount=2) == 5
        counted = await asyncio.gather(*(env.call_tool("add", amount=1) for _ in range(10)))
        assert counted == [*range(6, 16)]
        assert await env.call_tool("greet", name="Ada") == "Hello, Ada!"
        assert await env.call_tool("profile", who="x") == {"who": "x", "data": [1, 2]}
        assert json.loads(await env.call_tool("mumble", word="hm")) == ["hm", "hm"]
        kinds = set()
        for name, arguments in (("fail", {"why": "because"}), ("add", {}), ("nope", {})):
            with pytest.raises(ToolCallError) as failed:
                await env.call_tool(name, **arguments)
            kinds.add(failed.value.error_type)
        # The released JSON-RPC does not tell them apart, and counts no steps.
        stepped = mode == "simulation" or version == "ours"
        others = {ToolErrorType.INVALID_ARGS, ToolErrorType.TOOL_NOT_FOUND} if stepped else set()
        assert kinds == {ToolErrorType.EXECUTION_ERROR, *others}
        assert (await env.state()).step_count == (17 if stepped else 0)
        step = await env.step(CallToolAction(tool_name="add", arguments={"amount": 1}))
        assert isinstance(step.observation, CallToolObservation)
        assert step.observation.result["data"] == 16


@pytest.mark.soak
async def test_standard_client_sees_everything_of_the_server_object(folder_url: str) -> None:
    progress_values: list[float] = []

    async def record_progress(progress: float, total: float | None, message: str | None) -> None:
        progress_values.append(progress)

    async with mcp.Client(f"{folder_url}/mcp", mode="legacy") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == NAMES
        assert (await client.call_tool("add", {"amount": 2})).structured_content == {"result": 2}
        assert (await client.call_tool("add", {"amount": 2})).structured_content == {"result": 4}
        failed = await client.call_tool("fail", {"why": "because"})
        assert (failed.is_error, "because" in failed.content[0].text) == (True, True)
        waited = await client.call_tool("wait", {"seconds": 0.01}, progress_callback=record_progress)
        assert (waited.structured_content, progress_values) == ({"result": "waited"}, [0.5])
        rules = await client.read_resource("tally://rules")
        assert rules.contents[0].text == "Numbers add up."
        assert [one.name for one in (await client.list_resources()).resources] == ["rules"]
        prompt = await client.get_prompt("begin", {"goal": "3"})
        assert prompt.messages[0].content.text == "Count to 3."


def test_fastmcp_object_keeps_its_session_for_the_environment(tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT), str(borrowed("0.3.1", tmp_path))))
    driver = str(Path(__file__).parent / "drivers" / "fastmcp_session.py")
    done = finished(sys.executable, driver, env=environment(PYTHONPATH=path), timeout_s=300)
    assert done.returncode == 0, done.stderr
    *visits, (other, count) = json.loads(done.stdout)
    assert [number for _, number in visits] == ["1", "2", "3"]
    assert len({session for session, _ in visits}) == 1
    assert (count, other == visits[0][0]) == ("1", False)
