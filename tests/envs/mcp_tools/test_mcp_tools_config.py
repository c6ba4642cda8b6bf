"""Configuration by the operator, options of a reset, and the environment of a child process."""

import json
from pathlib import Path
from typing import Any

import pytest
from tool_houses import call, entry, house_of, kind, names, playing

from envs.mcp_tools_env import InvalidResetOptionError
from envs.mcp_tools_env.server.config import McpToolsSettings
from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.options import read_options
from openenv_core.errors import ConfigurationError, EpisodeOverError

WELL: dict[str, Any] = {"command": "true"}


def settings(config: Any = None, **environ: str) -> McpToolsSettings:
    inline = {} if config is None else {"MCP_TOOLS_SERVERS": json.dumps(config)}
    return McpToolsSettings.from_environment({**inline, **environ})


def test_the_usual_json_is_read_from_a_file_or_inline(tmp_path: Path) -> None:
    config = {
        "mcpServers": {
            "files": {
                "command": "npx",
                "args": ["-y", "server", "${SESSION_DIR}"],
                "env": {"A": "${env:HOME}"},
            },
            "site": {"type": "http", "url": "https://example.com/mcp", "headers": {"X": "$${env:HOME}"}},
        }
    }
    (tmp_path / "mcp.json").write_text("\ufeff" + json.dumps(config), encoding="utf-8")
    inline = settings(config, HOME="/home/me${x}")
    assert settings(MCP_TOOLS_CONFIG=str(tmp_path / "mcp.json"), HOME="/home/me${x}") == inline
    files, site = inline.servers.values()
    assert files.env == {"A": "/home/me$${x}"}  # type: ignore[union-attr]
    assert site.headers == {"X": "${env:HOME}"}  # type: ignore[union-attr]
    assert list(settings().servers) == ["demo"]
    readme = (Path(__file__).parents[3] / "envs" / "mcp_tools_env" / "README.md").read_text()
    (block,) = readme.split("```json\n")[1:]
    of_readme = settings(json.loads(block.partition("```")[0]), SEARCH_TOKEN="x")
    assert list(of_readme.servers) == ["files", "sqlite", "search"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"mcpServers": {"a": {**WELL, "comand": "x"}}},
            r"no key but type, command.*got mcpServers\.a\.comand",
        ),
        ({"mcpServers": {"a": {**WELL, "ropewalk": {"alow": ["*"]}}}}, r"no key but allow.*ropewalk\.alow"),
        ({"mcpServers": {"a": {**WELL, "url": "https://example.com"}}}, 'either "command"'),
        ({"mcpServers": {"a b": WELL}}, "letters, digits"),
        ({"mcpServers": {}}, "at least one"),
        ([], "mcpServers"),
        ({"mcpServers": {"a": {"command": 7}}}, r"mcpServers\.a\.command"),
        ({"mcpServers": {"a": {**WELL, "args": ["${HOME}"]}}}, r"\$\$\{HOME\}"),
        ({"mcpServers": {"a": {**WELL, "args": ["${env:ABSENT}"]}}}, "ABSENT"),
        ({"mcpServers": {"a": {"command": "${SESSION_DIR}/x"}}}, "before the session"),
        ({"mcpServers": {"a": {**WELL, "args": ["a\0b"]}}}, "NUL"),
        ({"mcpServers": {"a": {"type": "sse", "url": "https://example.com"}}}, "type"),
        ({"mcpServers": {"a": {"url": "ftp://example.com"}}}, "http://"),
        ({"mcpServers": {"a": {"url": "https://me:secret@example.com"}}}, "headers"),
        ({"mcpServers": {"a": {"url": "https://example.com/${SESSION_DIR}"}}}, "SESSION_DIR"),
        ({"mcpServers": {"a": {"url": "https://example.com", "headers": {"A": "b\r\nC: d"}}}}, "of one line"),
        ({"mcpServers": {"a": {"url": "https://example.com", "headers": {"A": "\u20ac"}}}}, "ASCII"),
        ({"mcpServers": {"a": {**WELL, "ropewalk": {"timeout_s": 0}}}}, r"ropewalk\.timeout_s"),
        ({"mcpServers": {"a": {**WELL, "ropewalk": {"allow_private": True}}}}, "for a url"),
    ],
)
def test_invalid_configuration_is_refused_with_its_place(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refusal:
        settings(config)
    assert "secret" not in str(refusal.value)


def test_invalid_variables_are_refused() -> None:
    refused: list[dict[str, str]] = [{"MCP_TOOLS_SERVERS": "{"}, {"MCP_TOOLS_SERVERS": "[" * 100_000}]
    refused += [{"MCP_TOOLS_SERVERS": '{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}'}]
    refused += [{"MCP_TOOLS_CONFIG": "/no/such/file"}, {"MCP_TOOLS_CONFIG": "a", "MCP_TOOLS_SERVERS": "b"}]
    refused += [{"MCP_TOOLS_CALLS": value} for value in ("many", "0", "9" * 5000)]
    for environ in [*refused, {"MCP_TOOLS_TIME_S": "nan"}]:
        with pytest.raises(ConfigurationError):
            settings(**environ)


async def test_child_gets_its_folder_and_configured_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWALK_TOKENS", "canary")
    monkeypatch.setenv("WANTED", "passed")
    one = {**entry("${SESSION_DIR}/data", "$${x}", env_pass=["WANTED"]), "env": {"OWN": "${SESSION_DIR}/own"}}
    async with playing(house_of({"one": one})) as env, playing(house_of({"one": one})) as other:
        about = (await call(env, "about")).result
        home = about["environ"]["HOME"]
        assert about["cwd"] == home
        assert about["argv"] == [f"{home}/data", "${x}"]
        assert about["environ"]["OWN"] == f"{home}/own"
        assert about["environ"]["WANTED"] == "passed"
        assert "canary" not in json.dumps(about)
        known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR", "OWN", "WANTED"}
        assert set(about["environ"]) <= known
        assert (await call(other, "about")).result["environ"]["HOME"] != home


async def test_tools_not_allowed_are_not_listed() -> None:
    house = house_of({"one": entry(allow=["c*", "echo", "die"], deny=["die"])})
    async with playing(house) as env:
        assert await names(env) == ["echo", "count", "chatter"]
        assert kind(await call(env, "die", code=1)) == "tool_not_found"
    async with playing(house, allow=["ch*", "e*", "die"], deny=["chatter"]) as env:
        assert await names(env) == ["echo"]
        assert kind(await call(env, "count")) == "tool_not_found"


async def test_budgets_end_an_episode_with_a_typed_outcome() -> None:
    house = house_of({"one": entry(calls=2), "two": entry()}, calls=5)
    async with playing(house) as env:
        assert [(await call(env, "one__count")).result for _ in range(2)] == [1, 2]
        answer = await call(env, "one__count")
        assert (kind(answer), answer.metadata["budget"], answer.done) == ("execution_error", "one", False)
        assert (await call(env, "two__count")).result == 1
        assert kind(await call(env, "nothing")) == "tool_not_found"
        over = await call(env, "two__count")
        assert (kind(over), over.metadata["budget"], over.truncated) == ("execution_error", "calls", True)
        assert env.state.ended == "calls"
        with pytest.raises(EpisodeOverError):
            await call(env, "two__count")
        transcript = env.state.transcript
        outcomes = [entry.outcome for entry in transcript[2:]]
        assert outcomes == ["execution_error", "ok", "tool_not_found", "execution_error"]
        assert (transcript[0].tool, transcript[0].arguments, transcript[0].result) == ("one__count", {}, "1")
        began = await env.reset_async(time_s=0.05, transcript=False, servers=["one"])
        assert {tool.name.partition("__")[0] for tool in began.tools} == {"one"}
        late = await call(env, "one__hang", seconds=60)
        assert (kind(late), late.metadata["budget"], late.truncated) == ("timeout", "time", True)
        assert env.state.ended == "time"
        assert env.state.transcript == []


@pytest.mark.parametrize(
    "options",
    [
        *({"command": "sh"}, {"url": "http://example.com"}, {"headers": {}}, {"mcpServers": {}}),
        *({"servers": ["other"]}, {"servers": []}, {"servers": "one"}, {"calls": 257}, {"calls": True}),
        *({"time_s": 1e9}, {"time_s": 0}, {"allow": "*"}, {"deny": ["x" * 1000]}, {"transcript": 1}),
    ],
)
def test_reset_cannot_exceed_the_configuration(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidResetOptionError):
        read_options(options, house_of({"one": entry()}).settings)


async def test_a_first_step_begins_an_episode_and_a_refused_reset_leaves_it() -> None:
    env = McpToolsEnvironment(house_of({"one": entry()}))
    assert (await call(env, "count")).result == 1
    with pytest.raises(InvalidResetOptionError, match="no reset options but"):
        await env.reset_async(command="sh")
    assert (await call(env, "count")).result == 2
    assert env.state.step_count == 2
    await env.close_async()
