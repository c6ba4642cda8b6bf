"""Tool servers that die, hang, babble and do harm on purpose: a typed outcome each, the other sessions alive."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from serve_process import gone
from serving import eventually as until
from tool_houses import call, entry, failure_to_begin, house_of, kind, names, playing

from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.upstream import schemas as weight
from envs.mcp_tools_env.server.upstream import stdio
from envs.mcp_tools_env.server.upstream.errors import FirstFailure
from envs.mcp_tools_env.server.upstream.schemas import ArgumentChecker, MessageThrottle
from envs.mcp_tools_env.server.upstream.stdio import ServerProcess
from openenv_core.errors import EpisodeOverError
from openenv_core.guard import remove_tree
from openenv_core.outcomes import infrastructure_failure
from openenv_core.protocol.jsonio import dumps

ROOT = Path(__file__).parents[3]


async def test_a_server_that_dies_in_a_call_is_started_anew_for_the_next_and_others_do_not_notice() -> None:
    house = house_of({"one": entry()})
    async with playing(house) as env, playing(house) as other:
        assert (await call(env, "count")).result == 1
        assert (await call(other, "count")).result == 1
        death = await call(env, "die", code=3)
        assert kind(death) == "transport_error"
        failure = infrastructure_failure(death) or ""
        assert "status 3" in failure
        assert "I am dying" in failure
        assert not death.done
        again = await call(env, "count")
        assert again.result == 1  # of a new process
        assert "one" in again.metadata["state_lost"]
        assert "state_lost" not in (await call(env, "count")).metadata
        assert (await call(other, "count")).result == 2
        assert env.state.servers[0].restarts == 1


async def test_a_server_that_is_killed_between_calls_is_started_anew() -> None:
    async with playing(house_of({"one": entry()})) as env:
        os.kill(int((await call(env, "about")).result["pid"]), signal.SIGKILL)
        await until(lambda: "SIGKILL" in str(env.state.servers[0].dead))
        seen = await call(env, "count")
        assert (kind(seen), seen.result, "state_lost" in seen.metadata) == (None, 1, True)


async def test_without_restarts_a_death_ends_the_episode() -> None:
    async with playing(house_of({"one": entry(restart=False)})) as env:
        death = await call(env, "die", code=0)
        assert (kind(death), death.done, death.reward) == ("transport_error", True, None)
        assert infrastructure_failure(death)
        assert env.state.ended == "infrastructure"
        with pytest.raises(EpisodeOverError):
            await call(env, "count")
        assert not (await env.reset_async()).done
        assert (await call(env, "count")).result == 1
    async with playing(house_of({"one": entry(max_restarts=1)})) as env:
        for _ in range(2):
            assert not (await call(env, "die", code=1)).done
        last = await call(env, "count")
        assert (kind(last), last.done) == ("transport_error", True)
        assert infrastructure_failure(last)


@pytest.mark.slow
async def test_hanging_tool_times_out_and_its_server_goes_on() -> None:
    async with playing(house_of({"one": entry(timeout_s=2.0)})) as env:
        assert (await call(env, "count")).result == 1
        hung = await call(env, "hang", seconds=60)
        assert kind(hung) == "timeout"
        assert infrastructure_failure(hung) is None
        assert (await call(env, "count")).result == 2
        assert "notifications/cancelled" in (await call(env, "heard")).result


async def test_cancelled_call_is_cancelled_at_the_server_too() -> None:
    async with playing(house_of({"one": entry()})) as env:
        hanging = asyncio.create_task(call(env, "hang", seconds=60))
        await until(lambda: env.state.servers[0].calls == 1)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await call(env, "heard")).result == ["notifications/initialized", "notifications/cancelled"]


@pytest.mark.soak
async def test_a_server_that_hears_nothing_after_a_hang_is_started_anew() -> None:
    async with playing(house_of({"one": entry(timeout_s=2.0)})) as env:
        pid = int((await call(env, "about")).result["pid"])
        assert kind(await call(env, "wedge", seconds=600)) == "timeout"
        seen = await call(env, "count")
        assert (seen.result, "state_lost" in seen.metadata) == (1, True)
        await until(lambda: gone(pid))


async def test_ten_megabytes_are_cut_with_a_flag_or_passed_whole() -> None:
    size = 10 << 20
    house = house_of({"cut": entry(), "whole": entry(max_result_bytes=16 << 20)})
    async with playing(house) as env:
        cut = await call(env, "cut__big", size=size)
        assert kind(cut) is None
        assert cut.metadata["cut"]["bytes"] > size
        assert len(cut.result) == 1 << 20
        uncut = await call(env, "whole__big", size=size)
        assert (len(uncut.result), uncut.metadata) == (size, {})
        assert (await call(env, "cut__count")).result == 1


@pytest.mark.soak
async def test_a_message_without_end_is_dropped() -> None:
    async with playing(house_of({"one": entry()})) as env:
        endless = await call(env, "big", size=40 << 20)
        assert kind(endless) == "transport_error"
        assert "more than" in (infrastructure_failure(endless) or "")
        assert (await call(env, "count")).result == 1


async def test_invalid_json_fails_the_call_and_not_the_server() -> None:
    async with playing(house_of({"one": entry()})) as env:
        for line in ('{"jsonrpc": "2.0", "id": 3, "result": {', '{"id": 1}', '{"result"' * 5000):
            broken = await call(env, "garbage", line=line)
            assert kind(broken) == "transport_error"
            assert "no JSON-RPC message" in (infrastructure_failure(broken) or "")
        for line in ("[INFO] ready", "", "\x00\xff", '{"seen": 1}', "{'text': 1}", "{"):
            assert (await call(env, "chatter", line=line)).result == "said it"
        assert (await call(env, "count")).result == 1


async def test_entries_that_are_not_mcp_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async with playing(house_of({"one": entry("--odd")})) as env:
        assert await names(env) == ["blocks"]
        result = (await call(env, "blocks")).result
    assert [block["type"] for block in result] == ["text", "text", "text", "image"]
    assert "type 'video'" in result[1]["text"]
    assert "the tool 'either' is left out" in caplog.text
    assert "inputSchema.type: Field required" in caplog.text


async def test_a_list_that_changes_is_seen_and_a_removed_tool_is_not_found() -> None:
    house = house_of({"one": entry()})
    async with playing(house) as env, playing(house) as other:
        assert "extra" not in await names(env)
        await call(env, "add", name="extra")
        assert "extra" in await names(env)
        assert (await call(env, "extra", text="new")).result == "new"
        await call(env, "remove", name="extra")
        assert kind(await call(env, "extra", text="old")) == "tool_not_found"
        await call(env, "add", name="more")
        assert (await call(env, "more", text="unlisted")).result == "unlisted"
        # Without a word of it from the server too.
        await call(env, "quietly_remove", name="echo")
        assert kind(await call(env, "echo", text="x")) == "tool_not_found"
        assert "more" not in await names(other)
        assert (await call(other, "echo", text="x")).result == "x"


async def test_closing_leaves_no_process_or_folder() -> None:
    house = house_of({"one": entry(), "two": entry()})
    env = McpToolsEnvironment(house)
    await env.reset_async()
    about = (await call(env, "one__about")).result
    pids = [about["pid"], (await call(env, "two__about")).result["pid"]]
    stray = int((await call(env, "one__spawn")).result)
    folder = about["environ"]["HOME"]
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert not gone(stray)
    await env.close_async()
    assert all(map(gone, (*pids, stray)))
    await until(lambda: not os.path.exists(folder))


OWNER = """
import asyncio
from tool_houses import call, entry, house_of, playing
async def main():
    async with playing(house_of({"one": entry()})) as env:
        about = (await call(env, "about")).result
        print(about["pid"], (await call(env, "spawn")).result, about["environ"]["HOME"], flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.soak
async def test_a_server_of_the_environment_that_is_killed_takes_its_tool_servers_along() -> None:
    places = [str(ROOT), str(ROOT / "tests" / "support")]
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
    assert owner.stdout is not None
    pid, stray, folder = (await asyncio.wait_for(owner.stdout.readline(), 30)).decode().split()
    children = [child.pid for child in psutil.Process(owner.pid).children()]  # the guard and the validator
    owner.kill()
    await owner.wait()
    await until(lambda: all(map(gone, (int(pid), int(stray), *children))) and not os.path.exists(folder))


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({"one": {"command": "no-such-program"}}, "No such file"),
        pytest.param(
            {"one": entry(), "two": entry("--start-s", "60", start_timeout_s=0.2)},
            "within 0.2 s",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"one": entry("--endless", start_timeout_s=0.3)}, "within 0.3 s", marks=pytest.mark.soak
        ),
        pytest.param(
            {"one": {"command": "sh", "args": ["-c", "yes '{\"id\"}'"]}},
            "no JSON-RPC message: '{\"id\"}'",
            marks=pytest.mark.soak,
        ),
        (
            {name: {"command": "sh", "args": ["-c", "echo I cannot >&2; exit 7"]} for name in "abc"},
            "I cannot",
        ),
    ],
)
async def test_server_that_does_not_start_is_an_infrastructure_failure(servers: Any, why: str) -> None:
    assert why in await failure_to_begin(servers)


async def test_session_without_a_folder_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/place")
    assert "/no/such/place" in await failure_to_begin({"one": entry()})


@pytest.mark.parametrize("cancellations", [0, 1, 2])  # a deadline cancels, and then the end of its socket
async def test_failed_reset_ends_the_servers_already_started(
    cancellations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, folders = tmp_path / "gate", tmp_path / "folders"
    os.mkfifo(gate)
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    words = ["-c", f"read line < '{gate}'; exit 7"]
    late = {"command": "sh", "args": words, "ropewalk": {"protocol": "handshake"}}  # tried once
    house = house_of({"quick": entry(), "late": late})
    env = McpToolsEnvironment(house)
    before = set(psutil.Process().children(recursive=True))
    reset = asyncio.create_task(env.reset_async())
    await until(lambda: "quick" in house.modes)  # which is known of those that are up
    started = [child.pid for child in set(psutil.Process().children(recursive=True)) - before]
    assert started
    assert any(folders.iterdir())
    if cancellations:
        for _ in range(cancellations):
            reset.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await reset
    else:
        await asyncio.to_thread(gate.write_text, "\n")
        assert "late" in (infrastructure_failure(await reset) or "")
    if cancellations < 2:
        assert all(map(gone, started))
    await until(lambda: all(map(gone, started)) and not any(folders.iterdir()))
    await env.close_async()


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


async def test_lone_surrogates_of_an_answer_are_replaced() -> None:
    async with playing(house_of({"one": entry()})) as env:
        half = '{"jsonrpc": "2.0", "id": 3, "result": {"content": [{"type": "text", "text": "a\\ud83d"}]}}'
        seen = await call(env, "garbage", line=half)
        assert (kind(seen), seen.result) == (None, "a?")


async def test_a_schema_that_takes_too_long_is_left_to_the_server() -> None:
    house = house_of({"one": entry()})
    house.checker = ArgumentChecker(cpu_s=0.1)
    async with playing(house) as env:
        member = env._episode._members["one"]  # type: ignore[union-attr]
        member.tools["echo"].input_schema["properties"]["text"]["pattern"] = "^(a+)+$"
        for _ in range(2):
            assert (await call(env, "echo", text="a" * 60 + "!")).result == "a" * 60 + "!"
        assert member._unchecked == {"echo"}
        assert kind(await call(env, "fail")) == "invalid_args"  # checked by another process


async def test_server_that_sends_too_many_messages_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(weight.asyncio, "sleep", sleep)
    pace = MessageThrottle()
    for _ in range(4000):
        await pace.wait()
    assert len(slept) == 2
    assert sum(slept) <= 2


@pytest.mark.soak
async def test_a_server_that_reads_nothing_is_not_written_to_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stdio, "MAX_UNREAD_BYTES", 1 << 20)
    process = await ServerProcess.start(("sleep", "60"), {"PATH": os.defpath}, tmp_path, tmp_path)
    fault = FirstFailure()
    try:
        async with stdio.stdio_streams(process, fault) as (_, to_server):
            long = {"jsonrpc": "2.0", "method": "x", "params": {"x": "x" * (1 << 19)}}
            message = stdio.SessionMessage(stdio.jsonrpc_message_adapter.validate_python(long))
            sent = 0
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while sent < 100:
                    await to_server.send(message)
                    sent += 1
        assert sent < 10
        assert "does not read" in (fault.take() or "")
    finally:
        await process.close()


async def test_a_list_is_no_longer_than_a_policy_can_be_given() -> None:
    async with playing(house_of({"one": entry("--long")})) as env:
        assert 20 < len(await names(env)) < 45


@pytest.mark.slow
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
    command = {"command": sys.executable, "args": ["-I", "-S", "-c", program]}
    env = McpToolsEnvironment(house_of({"talker": {**command, "ropewalk": {"start_timeout_s": 1}}}))
    async with playing(house_of({"one": entry()}, calls=10**6)) as other:
        talking = asyncio.create_task(env.reset_async())
        calls = 0
        while not talking.done():
            assert (await call(other, "count")).result == (calls := calls + 1)
    assert infrastructure_failure(await talking)
    assert calls
    await env.close_async()


async def test_a_close_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    process = await ServerProcess.start(("sleep", "60"), {"PATH": os.defpath}, tmp_path, tmp_path)
    assert set(psutil.Process().children()) - before
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert set(psutil.Process().children()) == before  # not even one that nobody has waited for
