"""Calls in an environment of tools and their results, with odd and hostile ones."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar, cast

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from openenv_core import Observation, State, is_infrastructure_failure
from openenv_core.errors import EpisodeOverError
from openenv_core.tools import (
    SILENT,
    ArgumentCompletion,
    AskingUnavailableError,
    Audio,
    CallToolAction,
    CallToolObservation,
    Embedded,
    Image,
    ListToolsAction,
    ListToolsObservation,
    NoSuchResourceError,
    PromptMessage,
    PromptResult,
    ResourceLink,
    Text,
    ToolContext,
    ToolEnvironment,
    ToolErrorType,
    ToolFailedError,
    ToolResult,
    ToolUnavailableError,
    completion,
    prompt,
    resource,
    tool,
)

F = TypeVar("F", bound=Callable[..., Any])


class Base(ToolEnvironment[State]):
    def reset(self) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


class Point(BaseModel):
    x: int


class Room(Base):
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.over = False

    @property
    def state(self) -> State:
        return State(step_count=len(self.calls))

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        if self.over:
            raise EpisodeOverError
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
            "told": ToolFailedError("no paint left"),
            "down": ToolUnavailableError("it burned"),
            "both": ExceptionGroup("tasks", [ValueError("oh"), ToolUnavailableError("it burned")]),
            "": ValueError("oh"),
        }[how]

    @tool
    def odd(self) -> object:
        return object()

    @tool
    def end(self) -> None:
        raise EpisodeOverError

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
    def greet(self, name: str = "you") -> list[str | PromptMessage]:
        return [f"Hello {name}", PromptMessage(Image(b"\x01"), role="assistant")]

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


def test_steps_list_and_call_and_results_have_text_and_structured_content(room: Room) -> None:
    listed = room.step(ListToolsAction())
    assert isinstance(listed, ListToolsObservation)
    assert [tool_spec.name for tool_spec in listed.tools][:2] == ["add", "win"]
    assert step(room, "add", a=1) == CallToolObservation(tool_name="add", result=2.5)
    assert room.state.step_count == 1, "a list is no call"
    assert call(room, "add", a=1) == ToolResult(
        content=[{"type": "text", "text": "2.5"}], value=2.5, structured={"result": 2.5}
    )
    assert call(room, "move", to={"x": 3}) == ToolResult(
        content=[{"type": "text", "text": '{"x":3}'}], value={"x": 3}, structured={"x": 3}
    )


def test_arguments_are_validated_against_the_schema(room: Room) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({}, "a"),
        ({"a": "1"}, "a"),
        ({"a": True}, "a"),
        ({"a": 1, "c": 2}, "c"),
    ]
    for arguments, fault in faults:
        error = call(room, "add", **arguments).error
        assert (error.error_type, f"{fault}: " in error.message) == (ToolErrorType.INVALID_ARGS, True)
    assert room.calls == [("add", True)] * 4, "a failed call counts"


def test_tool_failure_is_a_typed_result(room: Room) -> None:
    for how, kind, message in (
        ("told", ToolErrorType.EXECUTION_ERROR, "no paint left"),
        ("down", ToolErrorType.TRANSPORT_ERROR, "it burned"),
        ("both", ToolErrorType.TRANSPORT_ERROR, "it burned"),
        ("", ToolErrorType.EXECUTION_ERROR, "ValueError: oh"),
    ):
        observation = step(room, "fail", how=how)
        assert (observation.error.error_type, observation.error.message) == (kind, message)
        assert is_infrastructure_failure(observation) is (how in ("down", "both"))
    assert "TypeError" in step(room, "odd").error.message
    nobody = step(room, "x" * 999).error
    assert nobody.error_type is ToolErrorType.TOOL_NOT_FOUND
    assert len(nobody.message) < 400


def test_hooks_set_reward_and_end_of_a_call(room: Room) -> None:
    assert step(room, "forbidden").result == "not today"
    assert room.calls == []
    won = step(room, "win")
    assert (won.result, won.reward, won.done) == ("won", 1.0, True)
    with pytest.raises(EpisodeOverError):
        step(room, "add", a=1)
    room.over = False
    with pytest.raises(EpisodeOverError):
        step(room, "end")


async def test_asynchronous_tools_are_awaited_time_out_and_cannot_ask_in_a_step(room: Room) -> None:
    waiting = room.step(CallToolAction(tool_name="wait", arguments={"seconds": 0}))
    assert not isinstance(waiting, Observation)
    assert await waiting == CallToolObservation(tool_name="wait", result="waited")
    for name, kind, message in (
        ("hang", ToolErrorType.TIMEOUT, ""),
        ("ask", ToolErrorType.EXECUTION_ERROR, "call the tool over MCP"),
    ):
        result = room.call_tool(name, {}, SILENT)
        assert not isinstance(result, ToolResult)
        error = (await result).error
        assert (error.error_type, message in error.message) == (kind, True)
    assert room.calls == [("wait", False), ("hang", True), ("ask", True)]
    with pytest.raises(AskingUnavailableError):
        await SILENT.roots()


async def test_resources_are_read_by_uri(room: Room) -> None:
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
        with pytest.raises(NoSuchResourceError):
            read(uri)


def test_prompts_are_messages_and_completions_are_bounded(room: Room) -> None:
    assert room.get_prompt("greet", {"name": "Ada"}, SILENT) == PromptResult(
        messages=[
            {"role": "user", "content": {"type": "text", "text": "Hello Ada"}},
            {"role": "assistant", "content": {"type": "image", "data": "AQ==", "mimeType": "image/png"}},
        ]
    )
    ref = {"type": "ref/resource", "uri": "room://{thing}/{number}"}
    completions = room.complete(ref, {"name": "thing", "value": "c"}, SILENT)
    assert isinstance(completions, ArgumentCompletion)
    assert completions.values == [f"c{number}" for number in range(100)]
    assert (completions.total, completions.has_more) == (101, True)
    assert room.complete(ref, {"name": "number", "value": ""}, SILENT) == ArgumentCompletion(values=[])


def test_content_becomes_blocks() -> None:
    parts = [
        Audio(b"a"),
        Embedded("x://y", "text", "text/plain"),
        ResourceLink("x://z", "z", mime_type="a/b"),
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


# What authors write by mistake or on purpose, and what hostile callers send


class Node(BaseModel):
    value: float = 0.0
    below: "list[Node]" = []


class Options(TypedDict, total=False):
    deep: bool


def logged(function: F) -> F:
    """Stand for any decorator of an author's: a plain function, whatever is below it."""

    @functools.wraps(function)
    def wrapper(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return cast(F, wrapper)


async def later(value: int) -> int:
    return value


class Odd(Base):
    @tool
    @staticmethod
    def static(x: int) -> int:
        return x

    @staticmethod
    @tool
    def still(x: int) -> int:
        return x

    @classmethod
    @tool
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    @logged
    @tool
    async def below(self, x: int) -> int:
        return x

    @tool
    @logged
    async def above(self, x: int) -> int:
        return x

    @tool
    def promised(self, x: int) -> Awaitable[int]:
        return later(x)

    @tool
    def forgotten(self, x: int) -> Any:
        return later(x)

    @tool
    def names(
        self,
        *,
        copy: int = 1,
        json: int = 2,
        model_config: int = 3,
        schema: int = 4,
        argument_x: int = 5,
        secret: object = SILENT,
    ) -> list[int]:
        return [copy, json, model_config, schema, argument_x, int(secret is SILENT)]

    @tool
    def twice_heard(self, one: ToolContext, other: ToolContext) -> bool:
        return one is other

    @tool
    def data(self, blob: bytes) -> bytes:
        return blob

    @tool
    def tree(self, tree: Node, options: Options | None = None) -> Node:
        return tree

    @tool
    def liar(self) -> dict[str, int]:
        return cast(dict[str, int], [1])

    @tool
    def words(self, how: str) -> Any:
        return {"plain": "\ud800", "content": [Text("\ud800")], "data": ["\ud800"]}[how]

    @tool
    def bounded(self, x: Annotated[str, Field(ge=3)]) -> str:
        return x

    @tool
    def leave(self, how: str) -> None:
        raise {"exit": SystemExit(3), "cancelled": asyncio.CancelledError(), "key": KeyboardInterrupt()}[how]

    @tool
    async def leave_later(self, how: str) -> None:
        if how == "exit":
            raise SystemExit(3)
        if how == "itself":
            cast(asyncio.Task[Any], asyncio.current_task()).cancel()
            await asyncio.sleep(60)
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    @resource("odd://{name}.{end}")
    def named(self, name: str, end: str) -> str:
        return f"{name} {end}"

    @prompt
    def junk(self, a: str = "", b: str = "") -> list[str]:
        return cast(list[str], [3])

    @completion(prompt="junk", argument="a")
    def word(self, value: str) -> list[str]:
        return cast(list[str], value)

    @completion(prompt="junk", argument="b")
    def nothing(self, value: str) -> list[str]:
        return cast(list[str], None)


async def call_outcome(name: str, **arguments: Any) -> Any:
    """Call a tool; return what it gave, or how it failed and why."""
    result = Odd().call_tool(name, arguments, SILENT)
    result = result if isinstance(result, ToolResult) else await result
    return result.value if result.error is None else (result.error.error_type, result.error.message)


async def test_decorators_work_in_any_order() -> None:
    for name in ("static", "still", "below", "above", "promised"):
        assert await call_outcome(name, x=3) == 3
        assert (await call_outcome(name, x="3"))[0] is ToolErrorType.INVALID_ARGS
    assert await call_outcome("of_class", x=1) == "Odd 1"
    asynchronous = {name for name, declared in Odd.TOOLSET.tools.items() if declared.method.asynchronous}
    assert asynchronous == {"below", "above", "promised", "leave_later"}


async def test_argument_names_and_result_types_are_free() -> None:
    assert await call_outcome("names", copy=9, model_config=8) == [9, 2, 8, 4, 5, 1]
    assert await call_outcome("twice_heard") is True
    assert await call_outcome("data", blob="aGk=") == "aGk="
    assert (await call_outcome("data", blob="%%"))[0] is ToolErrorType.INVALID_ARGS
    for name, arguments, expected in (
        ("forgotten", {"x": 1}, "async def"),
        ("liar", {}, "expected an object"),
        ("bounded", {"x": "a"}, "TypeError"),
    ):
        kind, why = await call_outcome(name, **arguments)
        assert (kind, expected in why) == (ToolErrorType.EXECUTION_ERROR, True)


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("words", "plain", "surrogates"),
        ("words", "content", "surrogates"),
        ("words", "data", "surrogates"),
        ("leave", "exit", "SystemExit: 3"),
        ("leave", "cancelled", "CancelledError"),
        ("leave_later", "exit", "SystemExit: 3"),
        ("leave_later", "cancelled", "awaited what was cancelled"),
        ("leave_later", "itself", "cancelled itself"),
    ],
)
async def test_any_exception_of_a_tool_but_ctrl_c_is_an_error_result(name: str, how: str, why: str) -> None:
    kind, message = await call_outcome(name, how=how)
    assert kind is ToolErrorType.EXECUTION_ERROR
    assert why in message
    with pytest.raises(KeyboardInterrupt):
        await call_outcome("leave", how="key")


def test_nested_model_schemas_are_objects_with_nullable_numbers() -> None:
    spec = Odd.TOOLSET.tools["tree"].spec
    schema = spec.output_schema
    assert (schema["type"], schema["properties"]["value"]["type"]) == ("object", ["number", "null"])
    # Nobody may send one that is none.
    assert spec.input_schema["$defs"]["Node"]["properties"]["value"]["type"] == "number"
    result = Odd().call_tool("tree", {"tree": {"below": [{}]}, "options": {"deep": True}}, SILENT)
    assert isinstance(result, ToolResult)
    assert result.structured == {"value": 0.0, "below": [{"value": 0.0, "below": []}]}


class Forgetful(Odd):
    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        return cast(ToolResult, None)


def test_wrong_return_types_of_hooks_prompts_and_completions_are_reported() -> None:
    for name in ("static", "unknown"):
        with pytest.raises(TypeError, match="expected a ToolResult from after_call, got NoneType"):
            Forgetful().step(CallToolAction(tool_name=name, arguments={"x": 1}))
    with pytest.raises(TypeError, match="messages from junk, got int"):
        Odd().get_prompt("junk", {}, SILENT)
    for argument in ("a", "b"):
        with pytest.raises(TypeError, match="expected a list of texts"):
            Odd().complete({"type": "ref/prompt", "name": "junk"}, {"name": argument, "value": "v"}, SILENT)


async def test_cancelled_call_finishes_before_its_caller_continues() -> None:
    ended: list[str] = []

    class Slow(Base):
        @tool
        async def slow(self) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                ended.append("slow")

    waiting = asyncio.ensure_future(cast(Awaitable[ToolResult], Slow().call_tool("slow", {}, SILENT)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["slow"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": "\ud800"},
        {"\ud800": 1},
        {"x": functools.reduce(lambda inner, _: [inner], range(300), [])},
        {"x": 10**5000},
        {"x": float("nan")},
        {"x": object()},
        {str(number): 1 for number in range(10_000)},
        {str(number) * 10_000: 1 for number in range(20)},
        {"x": "long" * 250_000},
    ],
)
async def test_hostile_arguments_get_a_short_error(arguments: dict[str, Any]) -> None:
    kind, why = await call_outcome("static", **arguments)
    assert kind is ToolErrorType.INVALID_ARGS
    assert len(why) < 5000
    assert "of 0 characters" not in why
