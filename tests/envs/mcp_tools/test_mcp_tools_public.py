"""Public MCP servers, unchanged, as one environment: four of npm's and three of PyPI's, all offline."""

import json
from typing import Any

import pytest
from public_servers import of_npm, of_pypi
from tool_houses import call, house_of, kind, names, playing

from openenv_core.tools import ToolContext
from openenv_core.tools.openai import openai_tools

pytestmark = pytest.mark.slow


class Told(ToolContext):
    def __init__(self) -> None:
        self.progressed: list[float] = []

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.progressed.append(progress)


def configuration() -> dict[str, Any]:
    return {
        "files": of_npm("server-filesystem", "${SESSION_DIR}"),
        "memory": of_npm("server-memory", env={"MEMORY_FILE_PATH": "${SESSION_DIR}/memory.json"}),
        # It would fetch any address that a policy names, so that tool is not offered.
        "all": {
            **of_npm("server-everything"),
            "ropewalk": {"timeout_s": 10.0, "deny": ["gzip-file-as-resource"]},
        },
        "think": of_npm("server-sequential-thinking"),
        "time": of_pypi("mcp-server-time", "--local-timezone", "UTC"),
        "sqlite": of_pypi("mcp-server-sqlite", "--db-path", "${SESSION_DIR}/data.db"),
        "git": of_pypi("mcp-server-git"),
    }


async def test_public_servers_play_unchanged_and_sessions_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROPEWALK_TOKENS", "canary")
    house = house_of(configuration())
    async with playing(house) as env:
        servers = {info.name: info for info in env.state.servers}
        assert {name for name, info in servers.items() if info.tools} == set(house.settings.servers)
        tools = await env.list_tools()
        assert len(openai_tools(tools)) == len(tools) > 50
        assert "all__gzip-file-as-resource" not in await names(env)
        await files(env)
        await memory(env)
        await everything(env)
        await three_of_pypi(env)
        async with playing(house, servers=["files", "memory", "sqlite"]) as other:
            assert kind(await call(other, "files__read_text_file", path="a.txt")) == "execution_error"
            assert (await call(other, "memory__read_graph")).result == {"entities": [], "relations": []}
            assert (await call(other, "sqlite__list_tables")).result == "[]"
            assert kind(await call(other, "time__get_current_time", timezone="UTC")) == "tool_not_found"
        assert not [entry for entry in env.state.transcript if "infrastructure_error" in entry.metadata]
        assert not any(info.restarts for info in env.state.servers)


async def files(env: Any) -> None:
    assert kind(await call(env, "files__write_file", path="a.txt", content="rope")) is None
    assert (await call(env, "files__read_text_file", path="a.txt")).result == {"content": "rope"}
    assert "a.txt" in str((await call(env, "files__list_directory", path=".")).result)
    outside = await call(env, "files__read_text_file", path="/etc/passwd")
    assert kind(outside) == "execution_error"
    assert kind(await call(env, "files__read_text_file")) == "invalid_args"


async def memory(env: Any) -> None:
    tar = {"name": "Tar", "entityType": "thing", "observations": ["black"]}
    assert kind(await call(env, "memory__create_entities", entities=[tar])) is None
    assert (await call(env, "memory__read_graph")).result == {"entities": [tar], "relations": []}


async def everything(env: Any) -> None:
    assert (await call(env, "all__echo", message="hi")).result == "Echo: hi"
    assert "5" in (await call(env, "all__get-sum", a=2, b=3)).result
    assert kind(await call(env, "all__get-sum", a="2", b=3)) == "invalid_args"
    assert "temperature" in (await call(env, "all__get-structured-content", location="Chicago")).result
    image = (await call(env, "all__get-tiny-image")).result
    assert [block["type"] for block in image][:2] == ["text", "image"]
    variables = json.loads((await call(env, "all__get-env")).result)
    assert "canary" not in variables.values()
    told = Told()
    await env.call_tool("all__trigger-long-running-operation", {"duration": 0.2, "steps": 2}, told)
    assert told.progressed == [1, 2]
    hung = await call(env, "all__trigger-long-running-operation", duration=60, steps=2)
    assert kind(hung) == "timeout"
    assert (await call(env, "all__echo", message="still")).result == "Echo: still"
    thought = {"thought": "knots", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    assert (await call(env, "think__sequentialthinking", **thought)).result["thoughtHistoryLength"] == 1


async def three_of_pypi(env: Any) -> None:
    noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    assert json.loads((await call(env, "time__convert_time", **noon)).result)["time_difference"] == "+9.0h"
    nowhere = await call(env, "time__convert_time", **{**noon, "source_timezone": "Nowhere"})
    assert kind(nowhere) == "execution_error"
    await call(env, "sqlite__create_table", query="CREATE TABLE knots (name TEXT)")
    await call(env, "sqlite__write_query", query="INSERT INTO knots VALUES ('bowline')")
    assert "bowline" in (await call(env, "sqlite__read_query", query="SELECT * FROM knots")).result
    assert kind(await call(env, "git__git_status", repo_path=".")) == "execution_error"
    assert kind(await call(env, "git__git_status", repo_path=7)) == "invalid_args"
