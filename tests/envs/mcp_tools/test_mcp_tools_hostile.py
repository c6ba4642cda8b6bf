"""What a policy or a tool server does on purpose: it costs them, and neither the others nor the truth of who failed."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from tool_houses import call, entry, house_of, kind, names, playing

from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.upstream import stdio, weight
from envs.mcp_tools_env.server.upstream._guard import remove_tree
from envs.mcp_tools_env.server.upstream.fault import Fault
from envs.mcp_tools_env.server.upstream.process import ServerProcess
from envs.mcp_tools_env.server.upstream.schemas import ArgumentCheck
from envs.mcp_tools_env.server.upstream.weight import MAX_VALUES, Pace, Weight
from openenv_core.outcomes import infrastructure_failure
from openenv_core.protocol.jsonio import dumps


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


async def test_arguments_that_no_server_could_read_are_the_policys_fault_and_kill_nothing() -> None:
    async with playing(house_of({"one": entry()})) as env:
        assert (await call(env, "count")).result == 1
        for more in ("\ud800", 10**5000, nested(300), "x" * (2 << 20), [{"\udfff": 1}]):
            seen = await call(env, "echo", text="x", more=more)
            assert (kind(seen), infrastructure_failure(seen)) == ("invalid_args", None)
        assert kind(await call(env, "\ud800")) == "tool_not_found"
        assert kind(await call(env, "echo", text="x", more=nested(60))) is None
        assert (await call(env, "count")).result == 2
        assert dumps(env.state)


COUNTRIES = [f"c{number}" for number in range(250)]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"enum": COUNTRIES}}, ["c249"] * 20_000),
        ({"items": {"properties": {f"p{number}": {} for number in range(9000)}}}, [{}] * 3000),
        ({"items": {}}, [1] * 300_000),
        ({"anyOf": [{"type": "object"}] * 2000}, "x" * 1_000_000),
        ({"items": {"enum": [[[1] * 1000 + [n]] for n in range(20)]}}, [[[1] * 1000 + [19]]] * 300),
        ({"allOf": [{"uniqueItems": True}] * 1000}, list(range(40_000))),
    ],
    ids=["enum", "properties", "items", "told", "whole", "unique"],
)
def test_what_takes_too_long_to_check_is_left_to_the_server(schema: dict[str, Any], value: Any) -> None:
    check = ArgumentCheck({"properties": {"a": schema, "b": {"type": "string"}}})
    assert check.faults({"a": value, "b": 1}) == []


def test_what_a_policy_writes_in_earnest_is_checked() -> None:
    check = ArgumentCheck({"properties": {"a": {"items": {"enum": COUNTRIES}}}, "required": ["a"]})
    assert check.faults({"a": ["c1"] * 100}) == []
    assert check.faults({"a": [*["c1"] * 100, "no"]})
    assert ArgumentCheck({"properties": {"text": {"type": "integer"}}}).faults({"text": "x" * 500_000})


async def test_values_and_texts_of_an_answer_are_bounded_before_they_are_parsed() -> None:
    async with playing(house_of({"one": entry(max_result_bytes=32 << 20)})) as env:
        half = '{"jsonrpc": "2.0", "id": 3, "result": {"content": [{"type": "text", "text": "a\\ud83d"}]}}'
        seen = await call(env, "garbage", line=half)
        assert (kind(seen), seen.result) == (None, "a?")
        seen = await call(env, "many", size=MAX_VALUES)
        assert kind(seen) == "transport_error"
        assert "values" in (infrastructure_failure(seen) or "")
        assert len((await call(env, "many", size=1000)).result["many"]) == 1000


def test_values_are_counted_in_pieces_and_not_within_texts() -> None:
    text = rb'{"a": [1, 2, "[[,{\"[,\\\\", {}], "\\": "[[["}'
    expected = text.replace(rb'"[[,{\"[,\\\\"', b"").replace(b'"[[["', b"").count(b",") + 3
    for size in (1, 2, 3, 1000):
        found = Weight()
        assert all(found.add(text[at : at + size]) for at in range(0, len(text), size))
        assert found.values == expected
    assert not Weight().add(b'"",' * (MAX_VALUES + 1))


async def test_who_sends_too_many_messages_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(weight.asyncio, "sleep", sleep)
    pace = Pace()
    for _ in range(4000):
        await pace.keep()
    assert len(slept) == 2
    assert sum(slept) <= 2


@pytest.mark.soak
async def test_a_server_that_reads_nothing_is_not_written_to_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stdio, "MAX_UNREAD_BYTES", 1 << 20)
    process = await ServerProcess.start(("sleep", "60"), {"PATH": os.defpath}, tmp_path, tmp_path)
    fault = Fault()
    try:
        async with stdio.stdio_wire(process, fault) as (_, to_server):
            message = stdio.SessionMessage(
                stdio.jsonrpc_message_adapter.validate_python(
                    {"jsonrpc": "2.0", "method": "x", "params": {"x": "x" * (1 << 19)}}
                )
            )
            sent = 0
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while sent < 100:
                    await to_server.send(message)
                    sent += 1
        assert sent < 10
        assert "does not read" in (fault.take() or "")
    finally:
        await process.close()


@pytest.mark.soak
async def test_a_list_without_end_has_one_time_for_all_its_pages() -> None:
    env = McpToolsEnvironment(house_of({"one": entry("--endless", start_timeout_s=0.3)}))
    began = await env.reset()
    assert began.done
    assert "within 0.3 s" in (infrastructure_failure(began) or "")
    await env.close()


async def test_a_list_is_no_longer_than_a_policy_can_be_given() -> None:
    async with playing(house_of({"one": entry("--long")})) as env:
        assert 20 < len(await names(env)) < 45


def test_a_tree_that_is_deeper_than_there_are_calls_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "shut" / "in").mkdir(parents=True)
    (root / "shut" / "in" / "file").touch()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (root / "link").symlink_to(elsewhere)
    (root / "shut" / "in").chmod(0)
    (root / "shut").chmod(0o500)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(root)
        for _ in range(sys.getrecursionlimit() + 200):
            os.mkdir("a")
            os.chdir("a")
    finally:
        os.fchdir(here)
        os.close(here)
    remove_tree(str(root))
    assert not root.exists()
    assert (elsewhere / "kept").exists()


@pytest.mark.soak
@pytest.mark.parametrize("line", [r"\n", '{"jsonrpc": "2.0", "method": "x"}\\n'])
async def test_a_server_that_never_stops_talking_costs_the_others_little(line: str) -> None:
    program = f"import os\nwhile True: os.write(1, b'{line}' * 4096)"
    talker = {
        "command": sys.executable,
        "args": ["-I", "-S", "-c", program],
        "ropewalk": {"start_timeout_s": 1},
    }
    env = McpToolsEnvironment(house_of({"talker": talker}))
    async with playing(house_of({"one": entry()}, calls=10**6)) as other:
        talking = asyncio.create_task(env.reset())
        calls = 0
        while not talking.done():
            assert (await call(other, "count")).result == (calls := calls + 1)
    assert infrastructure_failure(await talking)
    assert calls
    await env.close()
