"""The tools, resources and prompts of a class, read from its declarations and checked once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from openenv_core.errors import ConfigurationError
from openenv_core.tools.declare import Declared, declared_as
from openenv_core.tools.signature import Method, Signature, read_method, returned_schema
from openenv_core.tools.specs import (
    PromptArgument,
    PromptSpec,
    ResourceSpec,
    ResourceTemplateSpec,
    ToolSpec,
)
from openenv_core.tools.uri_template import UriTemplate
from openenv_core.tools.wire import RESERVED_TOOL_NAMES

SpecT = TypeVar("SpecT", ResourceSpec, ResourceTemplateSpec)

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""Names that MCP allows for tools."""


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool and its method; `wrapped` says whether the structured result is `{"result": value}`."""

    spec: ToolSpec
    method: Method
    signature: Signature
    wrapped: bool | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class DeclaredResource(Generic[SpecT]):
    """A resource or resource template, and its method."""

    spec: SpecT
    method: Method
    signature: Signature
    form: UriTemplate


@dataclass(frozen=True, slots=True)
class DeclaredPrompt:
    """A prompt and its method."""

    spec: PromptSpec
    method: Method
    signature: Signature


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

    tools: dict[str, DeclaredTool] = field(default_factory=dict)
    resources: dict[str, DeclaredResource[ResourceSpec]] = field(default_factory=dict)
    templates: dict[str, DeclaredResource[ResourceTemplateSpec]] = field(default_factory=dict)
    prompts: dict[str, DeclaredPrompt] = field(default_factory=dict)
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
            method = read_method(owner, attribute)
            for declared in declared_list:
                match declared.kind:
                    case "tool":
                        toolset._add_tool(declared, method)
                    case "resource":
                        toolset._add_resource(declared, method)
                    case "prompt":
                        toolset._add_prompt(declared, method)
                    case "completion":
                        toolset.completions[declared.completes, declared.argument] = attribute
        toolset._check_completions()
        return toolset

    def _add_tool(self, declared: Declared, method: Method) -> None:
        name = declared.name or method.attribute
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
        signature = Signature(method)
        output_schema, wrapped = returned_schema(method)
        spec = ToolSpec(
            **_common_fields(name, declared, method),
            input_schema=signature.schema,
            output_schema=output_schema,
            annotations=None if declared.annotations is None else dict(declared.annotations),
        )
        self.tools[name] = DeclaredTool(spec, method, signature, wrapped, declared.timeout_s)

    def _add_resource(self, declared: Declared, method: Method) -> None:
        form, signature = UriTemplate(declared.uri), Signature(method)
        if sorted(form.names) != sorted(signature.names):
            raise ConfigurationError(
                f"expected {method.attribute} to take the values in {declared.uri!r}, "
                f"{', '.join(form.names) or 'none'}, got {', '.join(signature.names) or 'none'}"
            )
        fields = _common_fields(declared.name or method.attribute, declared, method)
        fields |= {"description": fields["description"] or None, "mime_type": declared.mime_type}
        if declared.uri in self.templates or declared.uri in self.resources:
            raise ConfigurationError(f"expected one resource at each address, got {declared.uri!r} twice")
        if form.names:
            template = ResourceTemplateSpec(uri_template=declared.uri, **fields)
            self.templates[declared.uri] = DeclaredResource(template, method, signature, form)
        else:
            spec = ResourceSpec(uri=declared.uri, **fields)
            self.resources[declared.uri] = DeclaredResource(spec, method, signature, form)

    def _add_prompt(self, declared: Declared, method: Method) -> None:
        name, signature = declared.name or method.attribute, Signature(method)
        if name in self.prompts:
            raise ConfigurationError(f"expected prompts with names of their own, got {name!r} twice")
        properties = signature.schema["properties"]
        fields = _common_fields(name, declared, method)
        fields["description"] = fields["description"] or None
        spec = PromptSpec(
            **fields,
            arguments=tuple(
                PromptArgument(
                    name=argument,
                    description=properties[argument].get("description"),
                    required=argument in signature.required,
                )
                for argument in signature.names
            ),
        )
        self.prompts[name] = DeclaredPrompt(spec, method, signature)

    def _check_completions(self) -> None:
        for (kind, owner), argument in self.completions:
            completable: Mapping[str, DeclaredPrompt | DeclaredResource[ResourceTemplateSpec]] = (
                self.prompts if kind == "ref/prompt" else self.templates
            )
            if owner not in completable or argument not in completable[owner].signature.names:
                raise ConfigurationError(
                    f"expected a completion of an argument that is there, got {argument!r} of {owner!r}; declare a "
                    "prompt of that name, or a resource of that form, which takes it"
                )


def _common_fields(name: str, declared: Declared, method: Method) -> dict[str, Any]:
    return {
        "name": name,
        "title": declared.title,
        "description": method.description if declared.description is None else declared.description,
        "meta": None if declared.meta is None else dict(declared.meta),
    }
