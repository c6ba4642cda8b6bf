"""What authors write by mistake or on purpose, and what hostile callers send: told, and never in silence."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar, cast

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from openenv_core import ConfigurationError, Observation, State
from openenv_core.tools import (
    SILENT,
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    Text,
    ToolContext,
    ToolEnvironment,
    ToolErrorType,
    ToolResult,
    completion,
    prompt,
    resource,
    tool,
)
from openenv_core.tools.addresses import AddressForm

F = TypeVar("F", bound=Callable[..., Any])


class Base(ToolEnvironment[State]):
    def reset(self) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


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


async def outcome(name: str, **arguments: Any) -> Any:
    """Call a tool; return what it gave, or how it failed and why."""
    result = Odd().call_tool(name, arguments, SILENT)
    result = result if isinstance(result, ToolResult) else await result
    return result.value if result.error is None else (result.error.error_type, result.error.message)


@pytest.mark.parametrize("name", ["static", "still", "below", "above", "promised"])
async def test_decorators_stand_in_any_order(name: str) -> None:
    assert await outcome(name, x=3) == 3
    assert (await outcome(name, x="3"))[0] is ToolErrorType.INVALID_ARGS


async def test_a_method_of_the_class_is_a_tool() -> None:
    assert await outcome("of_class", x=1) == "Odd 1"


def test_what_is_yet_to_be_awaited_is_not_run_on_the_spot() -> None:
    asynchronous = {name for name, declared in Odd.TOOLSET.tools.items() if declared.asynchronous}
    assert asynchronous == {"below", "above", "promised", "leave_later"}


async def test_a_plain_tool_that_returns_an_awaitable_says_how_to_write_it() -> None:
    kind, why = await outcome("forgotten", x=1)
    assert kind is ToolErrorType.EXECUTION_ERROR
    assert "async def" in why


async def test_arguments_are_called_as_the_author_likes() -> None:
    assert await outcome("names", copy=9, model_config=8) == [9, 2, 8, 4, 5, 1]
    assert await outcome("twice_heard") is True


async def test_bytes_are_base64_both_ways() -> None:
    assert await outcome("data", blob="aGk=") == "aGk="
    assert (await outcome("data", blob="%%"))[0] is ToolErrorType.INVALID_ARGS


async def test_what_holds_others_of_its_kind_is_an_object_too() -> None:
    schema = Odd.TOOLSET.tools["tree"].spec.output_schema
    assert schema is not None
    assert schema["type"] == "object"
    result = Odd().call_tool("tree", {"tree": {"below": [{}]}, "options": {"deep": True}}, SILENT)
    assert isinstance(result, ToolResult)
    assert result.structured == {"value": 0.0, "below": [{"value": 0.0, "below": []}]}


def test_a_number_that_is_none_is_null_and_the_schema_says_so() -> None:
    schema = Odd.TOOLSET.tools["tree"].spec.output_schema
    assert schema is not None
    assert schema["properties"]["value"]["type"] == ["number", "null"]
    given = Odd.TOOLSET.tools["tree"].spec.input_schema["$defs"]["Node"]["properties"]
    assert given["value"]["type"] == "number", "but nobody may send one"


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
async def test_whatever_a_tool_does_is_told(name: str, how: str, why: str) -> None:
    kind, message = await outcome(name, how=how)
    assert kind is ToolErrorType.EXECUTION_ERROR
    assert why in message


async def test_a_call_that_is_given_up_ends_before_whoever_gave_it_up_goes_on() -> None:
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


async def test_a_result_is_held_against_the_object_that_was_promised() -> None:
    assert "expected an object" in (await outcome("liar"))[1]


async def test_a_type_that_cannot_be_read_is_the_author_s_fault_and_is_told() -> None:
    kind, message = await outcome("bounded", x="a")
    assert kind is ToolErrorType.EXECUTION_ERROR
    assert "TypeError" in message


async def test_who_presses_the_keys_ends_a_tool() -> None:
    with pytest.raises(KeyboardInterrupt):
        await outcome("leave", how="key")


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
async def test_hostile_arguments_are_invalid_in_few_words(arguments: dict[str, Any]) -> None:
    kind, why = await outcome("static", **arguments)
    assert kind is ToolErrorType.INVALID_ARGS
    assert len(why) < 5000
    assert "of 0 characters" not in why


@pytest.mark.parametrize(
    ("form", "uri", "values"),
    [
        ("x://{a}/{b}", "x://1/2", {"a": "1", "b": "2"}),
        ("x://{a}/{b}", "x://1/2/3", None),
        ("x://{a}", "x://", None),
        ("x://{+a}/{b}", "x://1/2/3", {"a": "1/2", "b": "3"}),
        ("x://{+a}x{b}", "x://1x/x2", {"a": "1x/", "b": "2"}),
        ("x://{a}-{b}", "x://1-2-3", {"a": "1-2", "b": "3"}),
        ("x://{a}", "x://..%2F..%2Fetc", None),
        ("x://{+a}", "x://..%2Fetc", {"a": "../etc"}),
        ("x://{a}", "x://50%25%20", {"a": "50% "}),
        ("x://(.*)", "x://anything", None),
        ("x://{a}", "x://" + "a" * 10_000, None),
    ],
)
def test_an_address_is_of_a_form_or_not(form: str, uri: str, values: dict[str, str] | None) -> None:
    assert AddressForm(form).match(uri) == values


def test_an_address_that_fits_in_too_many_ways_takes_no_longer() -> None:
    # A backtracking expression takes the fourth power of the length: years.
    form = AddressForm("x://{+a}/{+b}/{+c}/{+d}z")
    begun = time.process_time()
    assert form.match("x://" + "/" * 8000) is None
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("uri", ["x://{a}/{a}", "x://{?q}", "x://{a,b}", "x://{1}", "x://{a", "x://{}"])
def test_a_form_of_another_kind_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="expected values"):
        AddressForm(uri)


def test_junk_in_prompts_and_completions_is_said_to_be() -> None:
    with pytest.raises(TypeError, match="messages from junk, got int"):
        Odd().get_prompt("junk", {}, SILENT)
    for argument in ("a", "b"):
        with pytest.raises(TypeError, match="expected a list of texts"):
            Odd().complete({"type": "ref/prompt", "name": "junk"}, {"name": argument, "value": "v"}, SILENT)


def test_one_method_is_several_things_and_an_override_is_described_as_what_it_overrides() -> None:
    class Task(Base):
        @resource("task://current")
        @prompt
        @tool
        def task(self) -> str:
            """What to do."""
            return "do it"

        @tool
        def look(self, where: str) -> str:
            """Look.

            Args:
                where: At what.
            """
            return where

    class Other(Task):
        def look(self, where: str) -> str:
            return where * 2

    assert (list(Other.TOOLSET.resources), list(Other.TOOLSET.prompts)) == (["task://current"], ["task"])
    assert list(Other.TOOLSET.tools) == ["task", "look"]
    told = Other.TOOLSET.tools["look"].spec
    assert (told.description, told.input_schema["properties"]["where"]["description"]) == (
        "Look.",
        "At what.",
    )


def complete() -> Callable[[Any], str]:
    def complete(self: Any) -> str: ...  # type: ignore[empty-body]

    return complete


def fielded(self: Any, x: int = Field(3, ge=0)) -> int: ...


def broken(self: Any, x: "1 +") -> int: ...  # type: ignore[valid-type]  # noqa: F722


async def before_call(self: Any, name: str, arguments: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("message", "members"),
    [
        ("name of its own, got .*complete, which servers call", {"complete": tool(complete())}),
        ("Field as its default: write Annotated", {"fielded": tool(fielded)}),
        ("types that can be found where broken", {"broken": tool(broken)}),
        ("expected a plain before_call", {"before_call": before_call}),
        ("expected a method, got the property 'complete'", {"p": property(tool(complete()))}),
        ("expected a method, got the cached_property", {"p": functools.cached_property(tool(complete()))}),
        ("letters without accents", {"größe": tool(complete())}),
        ("letters without accents", {"other": tool(name="two words")(complete())}),
        ("None takes the declaration back", {"static": 3}),
    ],
)
def test_what_would_not_work_is_refused_when_the_class_is_made(message: str, members: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        type("Made", (Odd,), members)


def test_a_hook_that_forgets_its_result_says_so() -> None:
    class Forgetful(Odd):
        def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
            replace(result, reward=1.0)
            return cast(ToolResult, None)

    for name in ("static", "unknown"):
        with pytest.raises(TypeError, match="expected a ToolResult from after_call, got NoneType"):
            Forgetful().step(CallToolAction(tool_name=name, arguments={"x": 1}))

    class Eager(Odd):
        def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
            return cast(ToolResult, True)

    with pytest.raises(TypeError, match="expected a ToolResult from before_call, got bool"):
        Eager().step(CallToolAction(tool_name="static", arguments={"x": 1}))


async def test_a_step_is_typed_for_its_author() -> None:
    """The type checker reads this one: no assertions are needed between a step and what it says."""
    odd = Odd()
    seen: CallToolObservation = odd.step(CallToolAction(tool_name="static", arguments={"x": 1}))
    assert seen.result == 1
    assert odd.step(ListToolsAction()).tools[0].name == "static"
