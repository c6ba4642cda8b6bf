"""The tools, resources and prompts of a class, read from its declarations and checked once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from openenv_core.errors import ConfigurationError
from openenv_core.tools.declare import Declared, declared_as
from openenv_core.tools.signature import Method, returned_schema
from openenv_core.tools.specs import (
    PromptArgument,
    PromptSpec,
    ResourceSpec,
    ResourceTemplateSpec,
    ToolSpec,
)
from openenv_core.tools.uri_template import UriTemplate
from openenv_core.tools.wire import RESERVED_TOOL_NAMES

SpecT = TypeVar("SpecT")

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""Names that MCP allows for tools."""


@dataclass(frozen=True, slots=True)
class DeclaredMethod(Generic[SpecT]):
    """A tool, resource, resource template or prompt, and its method.

    Attributes:
        timeout_s: Seconds that a call of a tool may take.
        wrapped: Whether a tool's structured result is `{"result": value}`; None if its return type does not say.
        form: Form of a resource's URI.
    """

    spec: SpecT
    method: Method
    timeout_s: float | None = None
    wrapped: bool | None = None
    form: UriTemplate = field(default_factory=lambda: UriTemplate(""))


@dataclass(frozen=True, slots=True)
class Toolset:
    """All declarations of a class.

    Attributes:
        tools: Tools by name, in source order; those of base classes first.
        resources: Resources by URI.
        templates: Resource templates by URI template.
        prompts: Prompts by name.
        completions: Names of methods, by MCP's reference and the argument's name.
    """

    tools: dict[str, DeclaredMethod[ToolSpec]] = field(default_factory=dict)
    resources: dict[str, DeclaredMethod[ResourceSpec]] = field(default_factory=dict)
    templates: dict[str, DeclaredMethod[ResourceTemplateSpec]] = field(default_factory=dict)
    prompts: dict[str, DeclaredMethod[PromptSpec]] = field(default_factory=dict)
    completions: dict[tuple[tuple[str, str], str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, owner: type) -> "Toolset":
        """Read the declarations of a class.

        A method that overrides a declared one inherits its declarations. Setting it to None removes them.

        Raises:
            ConfigurationError: A declaration is invalid, or two conflict.
        """
        declarations: dict[str, tuple[Declared, ...]] = {}
        for base in reversed(owner.__mro__):
            for attribute, value in vars(base).items():
                if declared_list := declared_as(value):
                    declarations[attribute] = declared_list
        toolset = cls()
        for attribute, declared_list in declarations.items():
            if getattr(owner, attribute) is None:
                continue
            for declared in declared_list:
                if declared.kind == "completion":
                    toolset.completions[declared.completes, declared.argument] = attribute
                else:
                    toolset._add(declared, Method(owner, attribute))
        toolset._check_completions()
        return toolset

    def _add(self, declared: Declared, method: Method) -> None:
        name = declared.name or method.attribute
        description = method.description if declared.description is None else declared.description
        fields: dict[str, Any] = {"name": name, "title": declared.title, "meta": declared.meta}
        match declared.kind:
            case "tool":
                self._check_tool(name, declared, method)
                output_schema, wrapped = returned_schema(method.returned)
                tool = ToolSpec(
                    **fields,
                    description=description,
                    input_schema=method.schema,
                    output_schema=output_schema,
                    annotations=None if declared.annotations is None else dict(declared.annotations),
                )
                self.tools[name] = DeclaredMethod(tool, method, declared.timeout_s, wrapped)
            case "resource":
                form = UriTemplate(declared.uri)
                self._check_resource(form, method)
                fields |= {"description": description or None, "mime_type": declared.mime_type}
                if form.names:
                    template = ResourceTemplateSpec(uri_template=declared.uri, **fields)
                    self.templates[declared.uri] = DeclaredMethod(template, method, form=form)
                else:
                    resource = ResourceSpec(uri=declared.uri, **fields)
                    self.resources[declared.uri] = DeclaredMethod(resource, method, form=form)
            case "prompt":
                if name in self.prompts:
                    raise ConfigurationError(f"expected prompts with names of their own, got {name!r} twice")
                arguments = tuple(
                    PromptArgument(
                        name=argument,
                        description=schema.get("description"),
                        required=argument in method.required,
                    )
                    for argument, schema in method.schema["properties"].items()
                )
                prompt = PromptSpec(**fields, description=description or None, arguments=arguments)
                self.prompts[name] = DeclaredMethod(prompt, method)

    def _check_tool(self, name: str, declared: Declared, method: Method) -> None:
        if name in RESERVED_TOOL_NAMES:
            raise ConfigurationError(
                f"expected a tool with a name of its own, got {name!r}; {', '.join(sorted(RESERVED_TOOL_NAMES))} are "
                "what clients call themselves"
            )
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"expected a tool with a name of 1 to 128 characters, which are letters without accents, digits, and "
                f"_ - . /, got {name!r}; hosts refuse others: give it one by @tool(name=...)"
            )
        if name in self.tools:
            raise ConfigurationError(f"expected tools with names of their own, got {name!r} twice")
        if declared.timeout_s is not None and not method.asynchronous:
            raise ConfigurationError(
                f"expected an asynchronous tool for timeout_s, got {name!r}; no thread can be stopped: make it "
                "`async def`, or leave the bound to the server's limit on a step"
            )

    def _check_resource(self, form: UriTemplate, method: Method) -> None:
        uri = form.template
        if sorted(form.names) != sorted(method.names):
            raise ConfigurationError(
                f"expected {method.attribute} to take the values in {uri!r}, "
                f"{', '.join(form.names) or 'none'}, got {', '.join(method.names) or 'none'}"
            )
        if uri in self.templates or uri in self.resources:
            raise ConfigurationError(f"expected one resource at each address, got {uri!r} twice")

    def _check_completions(self) -> None:
        for (kind, owner), argument in self.completions:
            completable: Mapping[str, DeclaredMethod[Any]] = (
                self.prompts if kind == "ref/prompt" else self.templates
            )
            if owner not in completable or argument not in completable[owner].method.names:
                raise ConfigurationError(
                    f"expected a completion of an argument that is there, got {argument!r} of {owner!r}; declare a "
                    "prompt of that name, or a resource of that form, which takes it"
                )
