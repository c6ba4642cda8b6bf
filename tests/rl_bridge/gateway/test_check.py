"""`ropewalk gateway check`: finds nothing wrong with ours, and each kind of fault with one that has it."""

import argparse
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from gateway_fixtures import Stage, calling

from rl_bridge.cli import gateway as command
from rl_bridge.gateway.app import GatewayServer
from rl_bridge.gateway.check import Fault, check_gateway, read_recordings
from rl_bridge.gateway.dialects import ChatDialect
from rl_bridge.gateway.episode import CallSettings, GatewayEpisode
from rl_bridge.gateway.service import GatewayService
from rl_bridge.gateway.tree import CallTree

Make = Callable[..., Stage]


def answer(prompt: str) -> str:
    """Call the last tool that is offered; without one, say something."""
    offered = re.search(r"</tool_call>:(.*?)<\|end\|>", prompt, re.DOTALL)
    if offered is None:
        return "a summary"
    return f"call {len(prompt)} {calling(offered[1].split()[-1], text='a')}"


@pytest.fixture
async def service(stage: Make) -> AsyncIterator[tuple[str, str]]:
    """Serve a gateway; returns its URL, and its owner's key."""
    play = stage(answer)
    service = GatewayService(play.policy, CallSettings())
    server = GatewayServer(service.gateway)
    await server.start()
    try:
        yield server.url, service.key
    finally:
        await server.close()


def test_recordings_are_of_three_agents_in_three_protocols() -> None:
    sequences = dict(read_recordings())
    assert list(sequences) == ["claude-code", "claude-code, subagent", "codex", "opencode"]
    assert len({request["path"] for requests in sequences.values() for request in requests}) == 3
    roots = {
        name: [request["parent"] for request in requests].count(None) for name, requests in sequences.items()
    }
    assert roots == {"claude-code": 2, "claude-code, subagent": 2, "codex": 3, "opencode": 3}


async def test_ours_has_no_fault(
    service: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = await check_gateway(*service)
    assert {report.name: dict(report.faults) for report in reports} == {
        name: {} for name, _ in read_recordings()
    }
    assert sum(report.requests for report in reports) == 22
    parser = argparse.ArgumentParser()
    command.COMMAND.configure(parser)
    url, key = service
    monkeypatch.setenv("GATEWAY_KEY", key)
    assert await command.check(parser.parse_args(["check", url, "--api-key-env", "GATEWAY_KEY"])) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    "arguments", [["check", "http://127.0.0.1:9"], ["folder"], ["folder", "http://127.0.0.1:9"]]
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.COMMAND.configure(parser)
    assert command.COMMAND.run(parser.parse_args(arguments)) == 2
    assert "expected" in capsys.readouterr().err


def lose_parents(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallTree, "_find_parent", lambda self, messages, keys: (None, messages, ()))


def forget_retries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatewayEpisode, "_find_retried", lambda self, request, marks: None)


def cut_streams(patch: pytest.MonkeyPatch) -> None:
    stream = ChatDialect.stream
    patch.setattr(ChatDialect, "stream", lambda self, *arguments: list(stream(self, *arguments))[:-1])


def drop_ids(patch: pytest.MonkeyPatch) -> None:
    edit_rows(patch, lambda row: row["logprobs"].pop())


def lose_answers(patch: pytest.MonkeyPatch) -> None:
    edit_rows(patch, lambda row: row["answers"].pop())


def edit_rows(patch: pytest.MonkeyPatch, edit: Callable[[Any], object]) -> None:
    from rl_bridge.gateway import service

    make_trace = service.make_trace

    def edited(*arguments: Any, **fields: Any) -> Any:
        trace = make_trace(*arguments, **fields)
        for row in trace["rows"]:
            edit(row)
        return trace

    patch.setattr(service, "make_trace", edited)


@pytest.mark.parametrize(
    ("sabotage", "fault"),
    [
        (lose_parents, Fault.MISPARENTED),
        (forget_retries, Fault.DOUBLED),
        (cut_streams, Fault.BROKEN),
        (drop_ids, Fault.WITHOUT_IDS),
        (lose_answers, Fault.LOST),
    ],
)
async def test_faults_are_found(
    service: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
    fault: Fault,
) -> None:
    sabotage(monkeypatch)
    assert any(report.faults[fault] for report in await check_gateway(*service))
