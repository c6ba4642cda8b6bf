"""An environment of tools: its calls, whoever makes them, and what they come to."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from openenv_core import Observation, State, is_infrastructure_failure
from openenv_core.errors import EpisodeOver
from openenv_core.tools import (
    SILENT,
    AskingUnavailable,
    Audio,
    CallToolAction,
    CallToolObservation,
    Completion,
    Embedded,
    Image,
    InvalidArguments,
    Link,
    ListToolsAction,
    ListToolsObservation,
    Message,
    NoSuchPrompt,
    NoSuchResource,
    PromptResult,
    Text,
    ToolContext,
    ToolEnvironment,
    ToolErrorType,
    ToolFailed,
    ToolResult,
    ToolUnavailable,
    completion,
    is_tool_host,
    prompt,
    resource,
    tool,
)


class Point(BaseModel):
    x: int


class Room(ToolEnvironment[State]):
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.over = False

    def reset(self) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State(step_count=len(self.calls))

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        if self.over:
            raise EpisodeOver
        return ToolResult.of("not today") if name == "forbidden" else None

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        self.calls.append((name, result.is_error))
        self.over = name == "win"
        return (
            ToolResult.of(result)
            if not self.over
            else ToolResult(content=[], value="won", reward=1.0, done=True)
        )

    @tool
    def add(self, a: int, b: float = 1.5) -> float:
        return a + b

    @tool
    def win(self) -> None: ...

    @tool
    def move(self, to: Point) -> Point:
        return to

    @tool
    def fail(self, how: str) -> None:
        raise {
            "told": ToolFailed("no paint left"),
            "down": ToolUnavailable("it burned"),
            "both": ExceptionGroup("tasks", [ValueError("oh"), ToolUnavailable("it burned")]),
            "": ValueError("oh"),
        }[how]

    @tool
    def odd(self) -> object:
        return object()

    @tool
    def end(self) -> None:
        raise EpisodeOver

    @tool
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    @tool(timeout_s=0.01)
    async def hang(self) -> None:
        await asyncio.sleep(60)

    @tool
    async def ask(self, context: ToolContext) -> str:
        return str(await context.elicit("Name?", {"type": "object"}))

    @resource("room://{thing}/{number}")
    async def thing(self, thing: str, number: int) -> str:
        return f"{thing} {number}"

    @resource("room://picture")
    def picture(self) -> bytes:
        return b"\x00"

    @resource("room://table")
    def table(self) -> list[int]:
        return [1, 2]

    @prompt
    def greet(self, name: str = "you") -> list[str | Message]:
        return [f"Hello {name}", Message(Image(b"\x01"), role="assistant")]

    @completion(resource="room://{thing}/{number}", argument="thing")
    def things(self, value: str) -> list[str]:
        return [f"{value}{number}" for number in range(101)]


@pytest.fixture
def room() -> Room:
    return Room()


def call(room: Room, name: str, **arguments: Any) -> ToolResult:
    result = room.call_tool(name, arguments, SILENT)
    assert isinstance(result, ToolResult)
    return result


def step(room: Room, name: str, **arguments: Any) -> CallToolObservation:
    observation = room.step(CallToolAction(tool_name=name, arguments=arguments))
    assert isinstance(observation, CallToolObservation)
    return observation


def test_a_step_lists_and_calls(room: Room) -> None:
    listed = room.step(ListToolsAction())
    assert isinstance(listed, ListToolsObservation)
    assert [found.name for found in listed.tools][:2] == ["add", "win"]
    assert step(room, "add", a=1) == CallToolObservation(tool_name="add", result=2.5)
    assert room.state.step_count == 1, "a list is no call"


def test_a_call_is_told_to_readers_and_to_programs(room: Room) -> None:
    assert call(room, "add", a=1) == ToolResult(
        content=[{"type": "text", "text": "2.5"}], value=2.5, structured={"result": 2.5}
    )
    assert call(room, "move", to={"x": 3}) == ToolResult(
        content=[{"type": "text", "text": '{"x":3}'}], value={"x": 3}, structured={"x": 3}
    )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "a: Field required"),
        ({"a": "1"}, "a: Input should be a valid integer"),
        ({"a": True}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
    ],
)
def test_arguments_are_held_against_the_schema(room: Room, arguments: dict[str, Any], fault: str) -> None:
    result = call(room, "add", **arguments)
    assert result.error is not None
    assert result.error.error_type is ToolErrorType.INVALID_ARGS
    assert fault in result.error.message
    assert room.calls == [("add", True)], "a failed call counts"


def test_a_failure_is_an_outcome(room: Room) -> None:
    for how, kind, message in (
        ("told", ToolErrorType.EXECUTION_ERROR, "no paint left"),
        ("down", ToolErrorType.TRANSPORT_ERROR, "it burned"),
        ("both", ToolErrorType.TRANSPORT_ERROR, "it burned"),
        ("", ToolErrorType.EXECUTION_ERROR, "ValueError: oh"),
    ):
        observation = step(room, "fail", how=how)
        assert observation.error is not None
        assert (observation.error.error_type, observation.error.message) == (kind, message)
        assert is_infrastructure_failure(observation) is (how in ("down", "both"))
    odd = step(room, "odd").error
    assert odd is not None
    assert "TypeError" in odd.message
    nobody = step(room, "x" * 999).error
    assert nobody is not None
    assert nobody.error_type is ToolErrorType.TOOL_NOT_FOUND
    assert len(nobody.message) < 400


def test_hooks_decide_what_a_call_is_worth(room: Room) -> None:
    assert step(room, "forbidden").result == "not today"
    assert room.calls == []
    won = step(room, "win")
    assert (won.result, won.reward, won.done) == ("won", 1.0, True)
    with pytest.raises(EpisodeOver):
        step(room, "add", a=1)


def test_the_end_of_an_episode_is_no_failure_of_a_tool(room: Room) -> None:
    with pytest.raises(EpisodeOver):
        step(room, "end")


async def test_an_asynchronous_tool_is_awaited(room: Room) -> None:
    waiting = room.step(CallToolAction(tool_name="wait", arguments={"seconds": 0}))
    assert not isinstance(waiting, Observation)
    assert await waiting == CallToolObservation(tool_name="wait", result="waited")
    assert room.calls == [("wait", False)]


async def test_a_tool_that_takes_too_long_is_given_up(room: Room) -> None:
    hanging = room.call_tool("hang", {}, SILENT)
    assert not isinstance(hanging, ToolResult)
    result = await hanging
    assert result.error is not None
    assert result.error.error_type is ToolErrorType.TIMEOUT
    assert room.calls == [("hang", True)]


async def test_a_call_that_is_cancelled_is(room: Room) -> None:
    waiting = room.call_tool("wait", {"seconds": 60}, SILENT)
    assert not isinstance(waiting, ToolResult)
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nobody_answers_behind_a_step(room: Room) -> None:
    asking = room.call_tool("ask", {}, SILENT)
    assert not isinstance(asking, ToolResult)
    result = await asking
    assert result.error is not None
    assert "call the tool over MCP" in result.error.message
    with pytest.raises(AskingUnavailable):
        await SILENT.roots()


async def test_resources_are_read_by_address(room: Room) -> None:
    def read(uri: str) -> Any:
        return room.read_resource(uri, SILENT)

    assert await read("room://a%20chair/4") == [
        {"uri": "room://a%20chair/4", "mimeType": "text/plain", "text": "a chair 4"}
    ]
    assert read("room://picture") == [
        {"uri": "room://picture", "mimeType": "application/octet-stream", "blob": "AA=="}
    ]
    assert read("room://table") == [{"uri": "room://table", "mimeType": "application/json", "text": "[1,2]"}]
    for uri in ("room://a/b/4", "room://chair/many", "else://where", ""):
        with pytest.raises(NoSuchResource):
            read(uri)


def test_prompts_are_messages(room: Room) -> None:
    assert room.get_prompt("greet", {"name": "Ada"}, SILENT) == PromptResult(
        messages=[
            {"role": "user", "content": {"type": "text", "text": "Hello Ada"}},
            {"role": "assistant", "content": {"type": "image", "data": "AQ==", "mimeType": "image/png"}},
        ]
    )
    with pytest.raises(NoSuchPrompt):
        room.get_prompt("other", {}, SILENT)
    with pytest.raises(InvalidArguments):
        room.get_prompt("greet", {"age": "3"}, SILENT)


def test_completions_are_bounded(room: Room) -> None:
    ref = {"type": "ref/resource", "uri": "room://{thing}/{number}"}
    found = room.complete(ref, {"name": "thing", "value": "c"}, SILENT)
    assert isinstance(found, Completion)
    assert (found.values[0], len(found.values), found.total, found.has_more) == ("c0", 100, 101, True)
    assert room.complete(ref, {"name": "number", "value": ""}, SILENT) == Completion(values=[])


def test_content_becomes_blocks() -> None:
    parts = [
        Audio(b"a"),
        Embedded("x://y", "text", "text/plain"),
        Link("x://z", "z", mime_type="a/b"),
        "word",
        {"k": 1},
    ]
    result = ToolResult.of(parts)
    assert result.content == [
        {"type": "audio", "data": "YQ==", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "x://y", "mimeType": "text/plain", "text": "text"}},
        {"type": "resource_link", "uri": "x://z", "name": "z", "mimeType": "a/b"},
        {"type": "text", "text": "word"},
        {"type": "text", "text": '{"k":1}'},
    ]
    assert result.value == result.content
    assert result.structured is None
    assert ToolResult.of([Text("a"), Text("b")]).value == "a\nb"
    assert ToolResult.of(None) == ToolResult(content=[], structured={"result": None})


def test_who_has_tools() -> None:
    assert is_tool_host(Room)
    assert is_tool_host(Room())
    assert not is_tool_host(object())
