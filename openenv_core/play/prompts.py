"""Asks for an action, field by field."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.cli.command import sanitize
from openenv_core.errors import PicklableError
from openenv_core.play.form import ABSENT, Form, FormField, Json, as_text, forms_of, value_of
from openenv_core.play.terminal import Terminal

COMMANDS: Final[Mapping[str, str]] = {
    ":reset [SEED|JSON]": "begin another episode, with this seed, or with these options of reset",
    ":state": "show the environment's state",
    ":schema": "show the fields of an action",
    ":tools": "list the environment's tools, if any",
    ":help": "show this",
    ":quit": "leave (Ctrl-D does too)",
}

NAMES: Final = tuple(line.split()[0] for line in COMMANDS)


class CommandTypedError(PicklableError):
    """A command was typed instead of an answer."""

    def __init__(self, name: str, rest: str) -> None:
        super().__init__(name)
        self.name = name
        self.rest = rest


@dataclass(slots=True)
class Prompts:
    """Asks for actions; `refused` counts the invalid answers."""

    terminal: Terminal
    forms: tuple[Form, ...]
    tools: Sequence[Json] = ()
    refused: int = 0

    def line(self, prompt: str, choices: Sequence[str] = ()) -> str:
        """Return an answer; CommandTypedError if it is a command, EOFError at the end of the input."""
        while True:
            text = self.terminal.ask(sanitize(prompt), (*choices, *NAMES))
            if not text.startswith(":"):
                return text
            name, _, rest = text.partition(" ")
            name = ":quit" if name == ":q" else name
            if name in NAMES:
                raise CommandTypedError(name, rest.strip())
            near = difflib.get_close_matches(name, NAMES, n=1)
            self.refuse(
                f"expected a command, got {name}; " + (f"did you mean {near[0]}?" if near else ":help")
            )

    def refuse(self, reason: str) -> None:
        """Report an invalid answer."""
        self.refused += 1
        self.terminal.say(sanitize(reason))

    def action(self) -> Json:
        """Return the next action; CommandTypedError if a command was typed, EOFError at the end of the input."""
        while True:
            form, action = self._choose_form()
            if action is None and form is not None:
                if form.calls_tools and self.tools:
                    action = self._call(form)
                else:
                    action = self._fill(form, first=len(self._playable_forms()) == 1)
            if action is not None:
                return action

    def _playable_forms(self) -> list[Form]:
        return [form for form in self.forms if not form.lists_tools]

    def _choose_form(self) -> tuple[Form | None, Json | None]:
        """Return the form of the action, or a whole action typed as JSON, or neither if the answer was invalid."""
        forms = self._playable_forms()
        if len(forms) == 1:
            return forms[0], None
        if not forms:
            return None, self._parse_action(self.line("action (JSON): "))
        titles = [form.title for form in forms]
        title, action = self._choose("kind", titles)
        return None if title is None else forms[titles.index(title)], action

    def _choose(self, label: str, names: list[str]) -> tuple[str | None, Json | None]:
        """Ask for one of some names; return it, or a whole action typed as JSON, or neither."""
        text = self.line(f"{label} ({'|'.join(names)}): ", names)
        if text.startswith("{"):
            return None, self._parse_action(text)
        try:
            return value_of(FormField(label, "string", choices=tuple(names)), text), None
        except ValueError as error:
            self.refuse(str(error))
            return None, None

    def _parse_action(self, text: str) -> Json | None:
        try:
            return dict(value_of(FormField("action", "object"), text))
        except ValueError as error:
            self.refuse(str(error).replace("a JSON object", "an action as a JSON object", 1))
            return None

    def _fill(self, form: Form, *, first: bool) -> Json | None:
        values: Json = dict(form.fixed)
        if not form.fields:
            text = self.line(f"{form.title} (Enter): ")
            return self._parse_action(text) if text.startswith("{") else values
        for at, field in enumerate(form.fields):
            while True:
                text = self._prompt_field(field)
                if first and at == 0 and text.startswith("{") and _is_action(text, form):
                    return self._parse_action(text)
                if self._set_field(field, text, values):
                    break
        return values

    def _call(self, form: Form) -> Json | None:
        names = [str(tool.get("name")) for tool in self.tools]
        name, action = self._choose("tool", names)
        if name is None:
            return action
        tool = self.tools[names.index(name)]
        arguments = arguments_of(tool)
        values = {} if not arguments.fields else self._fill(arguments, first=False)
        return {**form.fixed, "tool_name": name, "arguments": {**arguments.fixed, **(values or {})}}

    def _prompt_field(self, field: FormField) -> str:
        default = ""
        if not field.required and field.default is not ABSENT:
            default = f" [{as_text(field.default)}]"
        elif not field.required:
            default = " [none]"
        options = [as_text(choice) for choice in field.choices]
        return self.line(f"{field.name} ({field.label}{default}): ", options)

    def _set_field(self, field: FormField, text: str, values: Json) -> bool:
        if not text:
            if not field.required:
                return True  # the environment uses its own default
            self.refuse(f"expected {field.label} for {field.name}, got nothing")
            return False
        try:
            values[field.name] = value_of(field, text)
        except ValueError as error:
            self.refuse(str(error))
            return False
        return True


def arguments_of(tool: Mapping[str, Any]) -> Form:
    """Return the form of a tool's arguments."""
    schema = tool.get("input_schema") or tool.get("inputSchema")
    return forms_of(schema if isinstance(schema, Mapping) else {})[0]


def describe_form(form: Form, title: str | None = None) -> list[str]:
    """Return a form as lines: each field with its type, its default and its description."""
    description = [] if title else form.description.strip().splitlines()
    lines = [(title or form.title) + (f": {description[0]}" if description else "")]
    for field in form.fields:
        default = "" if field.default is ABSENT else f", {as_text(field.default)} by default"
        needed = "" if field.required else ", may be left out"
        text = f"  {field.name} ({field.label}{needed}{default})"
        lines.append(text + (f": {field.description}" if field.description else ""))
    return [sanitize(line) for line in lines]


def _is_action(text: str, form: Form) -> bool:
    """Whether a JSON object is an action rather than the value of its first field."""
    if form.fields[0].kind not in ("object", "any"):
        return True
    try:
        document = json.loads(text)
    except ValueError:
        return False
    names = {field.name for field in form.fields} | set(form.fixed)
    return bool(document) and set(document) <= names | {"metadata"}
