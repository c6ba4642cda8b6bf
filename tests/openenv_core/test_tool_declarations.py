"""Declarations of tools, prompts and resources, and the descriptions that clients get."""

import functools
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from openenv_core import ConfigurationError, Observation, State
from openenv_core.tools import (
    Image,
    ToolContext,
    ToolEnvironment,
    Toolset,
    completion,
    prompt,
    resource,
    tool,
)
from openenv_core.tools.uri_template import UriTemplate


class Base(ToolEnvironment[State]):
    def reset(self) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int


class Shop(Base):
    @tool(title="Paint it", annotations={"readOnlyHint": False}, meta={"k": 1})
    def paint(
        self,
        thing: str,
        schema: Annotated[int, Field(ge=0, description="how often")] = 1,
        colour: Colour = Colour.RED,
    ) -> Point:
        """Paint a thing.

        Twice is better.

        Args:
            thing: What to paint; it has
                to be clean.
            schema: Not this, the annotation says more.

        Returns:
            Where it lies.
        """
        return Point(x=len(thing) + schema)

    @tool(name="look-at", description="See.")
    async def look(self, context: ToolContext, deep: bool = False) -> list[int]:
        return [1]

    @tool
    def picture(self) -> Image | str:
        return "none"

    @resource("shop://all", name="everything", mime_type="text/csv")
    def all_of_it(self) -> str:
        """All things."""
        return ""

    @resource("shop://{thing}/{+path}")
    def one(self, thing: str, path: str) -> bytes:
        return b""

    @prompt(title="Ask")
    def question(self, topic: Annotated[str, Field(description="what about")], tone: str = "dry") -> str:
        return topic

    @completion(prompt="question", argument="tone")
    def tones(self, value: str) -> list[str]:
        return [value]


def spec(name: str) -> dict[str, Any]:
    return next(tool_spec.to_mcp() for tool_spec in Shop().list_tools() if tool_spec.name == name)


def test_tool_is_described_by_types_and_docstring() -> None:
    assert spec("paint") == {
        "name": "paint",
        "title": "Paint it",
        "description": "Paint a thing.\n\nTwice is better.",
        "annotations": {"readOnlyHint": False},
        "_meta": {"k": 1},
        "inputSchema": {
            "type": "object",
            "additionalProperties": False,
            "required": ["thing"],
            "properties": {
                "thing": {"type": "string", "description": "What to paint; it has to be clean."},
                "schema": {"type": "integer", "minimum": 0, "default": 1, "description": "how often"},
                "colour": {"$ref": "#/$defs/Colour", "default": "red"},
            },
            "$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"}},
        },
        "outputSchema": {
            "type": "object",
            "title": "Point",
            "required": ["x"],
            "properties": {"x": {"type": "integer"}},
        },
    }


def test_output_schema_follows_the_return_type() -> None:
    assert spec("look-at")["outputSchema"] == {
        "type": "object",
        "required": ["result"],
        "properties": {"result": {"type": "array", "items": {"type": "integer"}}},
    }
    assert spec("look-at")["description"] == "See."
    # The context is not the caller's to give.
    assert list(spec("look-at")["inputSchema"]["properties"]) == ["deep"]
    assert "outputSchema" not in spec("picture")
    assert set(Shop().list_tools()[0].wire().model_dump()) == {"name", "description", "input_schema"}


def test_resources_and_prompts_are_described() -> None:
    shop = Shop()
    assert [item.to_mcp() for item in shop.list_resources()] == [
        {"uri": "shop://all", "name": "everything", "description": "All things.", "mimeType": "text/csv"}
    ]
    assert [item.to_mcp() for item in shop.list_resource_templates()] == [
        {"uriTemplate": "shop://{thing}/{+path}", "name": "one"}
    ]
    assert [item.to_mcp() for item in shop.list_prompts()] == [
        {
            "name": "question",
            "title": "Ask",
            "arguments": [
                {"name": "topic", "description": "what about", "required": True},
                {"name": "tone", "required": False},
            ],
        }
    ]


def test_subclass_adds_overrides_and_removes_tools() -> None:
    class Smaller(Shop):
        picture = None  # type: ignore[assignment]

        async def look(self, context: ToolContext, deep: bool = False) -> list[int]:
            return [2]

        @tool
        def more(self) -> int:
            return 3

    assert list(Smaller.TOOLSET.tools) == ["paint", "look-at", "more"]
    assert list(Shop.TOOLSET.tools) == ["paint", "look-at", "picture"]


def plain() -> Callable[[Any], None]:
    def method(self: Any) -> None: ...

    return method


def step(self: Any) -> None: ...
def untyped(self: Any, x) -> None: ...  # type: ignore[no-untyped-def]
def rest(self: Any, *x: int) -> None: ...
def opaque(self: Any, x: Base) -> None: ...
def valued(self: Any, b: str) -> None: ...
def unknown(self: Any, x: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("message", "methods"),
    [
        ("expected a tool with a name of its own, got 'step'", {"step": tool(step)}),
        ("x of untyped, which has no type", {"untyped": tool(untyped)}),
        ("x of rest, which is not a named one", {"rest": tool(rest)}),
        ("parameters of opaque", {"opaque": tool(opaque)}),
        ("a name of 1 to 128 characters", {"a": tool(name="x" * 129)(plain())}),
        ("got 'one' twice", {"a": tool(name="one")(plain()), "b": tool(name="one")(plain())}),
        ("asynchronous tool for timeout_s", {"plain": tool(timeout_s=1.0)(plain())}),
        ("valued to take the values in 'x://{a}', a, got b", {"valued": resource("x://{a}")(valued)}),
        ("one resource at each address", {"a": resource("x://a")(plain()), "b": resource("x://a")(plain())}),
        ("prompts with names of their own", {"a": prompt(name="p")(plain()), "b": prompt(name="p")(plain())}),
        ("types that can be found", {"unknown": tool(unknown)}),
        ("got 'x' of 'p'", {"typed": completion(prompt="p", argument="x")(plain()), "p": prompt(plain())}),
        ("got 'x' of 'q'", {"typed": completion(prompt="q", argument="x")(plain())}),
    ],
)
def test_invalid_declaration_is_refused_at_class_creation(message: str, methods: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Toolset.of(type("Declared", (), methods))
    with pytest.raises(ConfigurationError, match="expected a method below @tool, got staticmethod"):
        tool(staticmethod(7))  # type: ignore[type-var, arg-type]
    with pytest.raises(ConfigurationError, match="neither or both"):
        completion(argument="x")


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
        ("None takes the declaration back", {"paint": 3}),
    ],
)
def test_unusable_member_is_refused_at_class_creation(message: str, members: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        type("Made", (Shop,), members)


def test_method_may_be_tool_prompt_and_resource_and_overrides_inherit_descriptions() -> None:
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
    look_spec = Other.TOOLSET.tools["look"].spec
    assert (look_spec.description, look_spec.input_schema["properties"]["where"]["description"]) == (
        "Look.",
        "At what.",
    )


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
def test_uri_matches_template_or_not(form: str, uri: str, values: dict[str, str] | None) -> None:
    assert UriTemplate(form).match(uri) == values


def test_ambiguous_uri_is_matched_in_linear_time_and_unsupported_templates_are_refused() -> None:
    # A backtracking expression takes the fourth power of the length: years.
    assert UriTemplate("x://{+a}/{+b}/{+c}/{+d}z").match("x://" + "/" * 8000) is None
    for uri in ("x://{a}/{a}", "x://{?q}", "x://{a,b}", "x://{1}", "x://{a", "x://{}"):
        with pytest.raises(ConfigurationError, match="expected values"):
            UriTemplate(uri)
