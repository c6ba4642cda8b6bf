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

    def line(self, prompt: str) -> str:
        """Return an answer; CommandTypedError if it is a command, EOFError at the end of the input."""
        while True:
            text = self.terminal.ask(sanitize(prompt))
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
            try:
                return self._read_action()
            except ValueError as error:
                self.refuse(str(error))

    def _read_action(self) -> Json:
        forms = [form for form in self.forms if not form.lists_tools]
        if not forms:
            return _parse_action(self.line("action (JSON): "))
        form = forms[0]
        if len(forms) > 1:
            titles = [form.title for form in forms]
            if isinstance(chosen := self._choose("kind", titles), dict):
                return chosen
            form = forms[titles.index(chosen)]
        if form.calls_tools and self.tools:
            return self._call(form)
        return self._fill(form, first=len(forms) == 1)

    def _choose(self, label: str, names: list[str]) -> str | Json:
        """Ask for one of some names; return it, or a whole action typed as JSON."""
        text = self.line(f"{label} ({'|'.join(names)}): ")
        if text.startswith("{"):
            return _parse_action(text)
        return str(value_of(FormField(label, "string", choices=tuple(names)), text))

    def _fill(self, form: Form, *, first: bool) -> Json:
        values: Json = dict(form.fixed)
        if not form.fields:
            text = self.line(f"{form.title} (Enter): ")
            return _parse_action(text) if text.startswith("{") else values
        for at, field in enumerate(form.fields):
            while True:
                text = self._prompt_field(field)
                if first and at == 0 and text.startswith("{") and _is_action(text, form):
                    return _parse_action(text)
                if not text and not field.required:
                    break  # the environment uses its own default
                try:
                    if not text:
                        raise ValueError(f"expected {field.label} for {field.name}, got nothing")
                    values[field.name] = value_of(field, text)
                    break
                except ValueError as error:
                    self.refuse(str(error))
        return values

    def _call(self, form: Form) -> Json:
        names = [str(tool.get("name")) for tool in self.tools]
        if isinstance(name := self._choose("tool", names), dict):
            return name
        arguments = arguments_of(self.tools[names.index(name)])
        values = self._fill(arguments, first=False) if arguments.fields else arguments.fixed
        return {**form.fixed, "tool_name": name, "arguments": values}

    def _prompt_field(self, field: FormField) -> str:
        default = ""
        if not field.required:
            default = " [none]" if field.default is ABSENT else f" [{as_text(field.default)}]"
        return self.line(f"{field.name} ({field.label}{default}): ")


def _parse_action(text: str) -> Json:
    """Return a whole action typed as JSON; ValueError if it is none."""
    try:
        return dict(value_of(FormField("action", "object"), text))
    except ValueError as error:
        raise ValueError(str(error).replace("a JSON object", "an action as a JSON object", 1)) from None


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
