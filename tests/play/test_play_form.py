"""Actions read from schemas, typed text turned into values, observations made harmless. No process, no socket."""

import io
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from envs.blackjack_env import BlackjackAction
from openenv_core.cli.command import sanitize
from openenv_core.play.form import ABSENT, forms_of, value_of
from openenv_core.play.prompts import Prompts
from openenv_core.play.terminal import LONGEST, Terminal, format_number, observation_lines
from openenv_core.tools import CallToolAction, ListToolsAction


class Colour(Enum):
    RED = "red"
    REDDISH = "reddish"
    BLUE = "blue"


class Spot(BaseModel):
    x: int


class Everything(BaseModel):
    kind: Literal["all"] = "all"
    whole: int = Field(ge=-3, le=3, description="a number")
    real: float = 0.5
    text: str
    flag: bool = False
    colour: Colour = Colour.RED
    maybe: Colour | None = None
    numbers: list[int] = Field(default_factory=list)
    spot: Spot | None = None
    either: int | str = 1
    metadata: dict[str, Any] = Field(default_factory=dict)


(FORM,) = forms_of(Everything.model_json_schema())
FIELDS = {field.name: field for field in FORM.fields}


def test_form_has_what_can_be_chosen_and_no_more() -> None:
    assert (FORM.fixed, FORM.calls_tools, FORM.lists_tools) == ({"kind": "all"}, False, False)
    assert {name: field.label for name, field in FIELDS.items()} == {
        "whole": "integer -3..3",
        "real": "number",
        "text": "string",
        "flag": "true|false",
        "colour": "red|reddish|blue",
        "maybe": "red|reddish|blue",
        "numbers": "list of integers",
        "spot": "JSON object of x or null",
        "either": "JSON",
    }
    assert [name for name, field in FIELDS.items() if field.required] == ["whole", "text"]
    assert FIELDS["whole"].description == "a number"
    assert [FIELDS[name].default for name in ("text", "colour", "maybe")] == [ABSENT, "red", None]
    assert (FIELDS["maybe"].nullable, FIELDS["colour"].nullable) == (True, False)


def test_union_is_several_forms_and_tools_are_known() -> None:
    union = Annotated[CallToolAction | ListToolsAction, Field(discriminator="type")]
    for adapter in (TypeAdapter(union), TypeAdapter(CallToolAction | ListToolsAction)):
        call, listing = forms_of(adapter.json_schema())
        assert call.calls_tools
        assert call.fixed == {"type": "call_tool"}
        assert listing.lists_tools


def test_schema_that_says_little_is_a_form_all_the_same() -> None:
    schemas: list[dict[str, Any]] = [
        {},
        {"type": "object"},
        {"properties": {"a": True}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
        {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"},
        {"properties": {"a": {"anyOf": []}}},
    ]
    for schema in schemas:
        for form in forms_of(schema):
            assert all(field.label for field in form.fields)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "-3", -3),
        ("real", "1e3", 1000.0),
        ("text", "two words", "two words"),
        ("text", '"two\\nlines"', "two\nlines"),
        ("text", '"', '"'),
        ("flag", "Y", True),
        ("colour", "BLUE", "blue"),
        ("colour", "b", "blue"),
        ("maybe", "null", None),
        ("numbers", "1, 2 3", [1, 2, 3]),
        ("spot", '{"x": 1}', {"x": 1}),
        ("either", "3", 3),
        ("either", "three", "three"),
    ],
)
def test_text_becomes_a_value(name: str, text: str, value: Any) -> None:
    found = value_of(FIELDS[name], text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("whole", "1.5", "a whole number"),
        ("real", "nan", "JSON can carry"),
        ("real", "much", "a number"),
        ("flag", "maybe", "true or false"),
        ("colour", "re", "one of red, reddish, blue"),
        ("colour", "", "one of red, reddish, blue"),
        ("numbers", "[1", "a JSON list"),
        ("spot", "[1]", "a JSON object"),
    ],
)
def test_text_that_is_no_value_is_refused(name: str, text: str, why: str) -> None:
    with pytest.raises(ValueError, match="expected") as refused:
        value_of(FIELDS[name], text)
    assert why in str(refused.value)


def test_text_of_an_environment_does_not_move_the_terminal() -> None:
    nasty = "a\x1b[2J\x1b]0;title\x07b\x1b[31mred\x1b[0m\x9b\x00\u202e\r\n\tc\x1b"
    assert sanitize(nasty) == "abred\n\tc"
    assert sanitize(nasty, colours=True) == "ab\x1b[31mred\x1b[0m\n\tc\x1b[0m"
    screen = io.StringIO()
    tool = {"name": f"to{nasty}", "input_schema": {}}
    terminal = Terminal(io.StringIO("x\n"), screen)
    with pytest.raises(EOFError):
        Prompts(terminal, forms_of(CallToolAction.model_json_schema()), [tool]).action()
    assert "tool (toabred" in screen.getvalue()
    assert "expected one of toabred" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_observation_shows_its_text_first() -> None:
    observation = {
        "n": None,
        "metadata": {"a": 1},
        "board": [[1, 2]] * 40,
        "text": "first\nlines",
        "s": "x\ny",
    }
    lines = list(observation_lines(observation))
    assert lines[:5] == ["first", "lines", "  n: null", "  board:", "    [1, 2]"]
    assert lines[-3:] == ["  s:", "    x", "    y"]
    (long,) = observation_lines({"text": "x" * (LONGEST + 7)})
    assert "7 more characters" in long
    figures = (0.1 + 0.2, 1.0, -1.5, None)
    assert [format_number(figure) for figure in figures] == ["0.3", "1", "-1.5", "none"]


def test_number_for_a_name_is_left_to_the_server() -> None:
    # The server's model takes Gymnasium's numbers, although its schema names the two moves.
    (form,) = forms_of(BlackjackAction.model_json_schema())
    (field,) = form.fields
    assert value_of(field, "1") == 1
    assert BlackjackAction(action=value_of(field, "0")).action == "stand"
    assert value_of(field, "h") == "hit"
    with pytest.raises(ValueError, match="expected one of hit, stand"):
        value_of(field, "1.5")
