"""The OpenAPI document: schemas of the environment's models, and the responses of all routes."""

import functools
import inspect
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from openenv_core.lifecycle import hints_of
from openenv_core.protocol.frames import ResetOptions, StepOptions
from openenv_core.protocol.http import SESSION_COOKIE, SESSION_HEADER, SESSION_ID
from openenv_core.protocol.jsonrpc import RpcRequest

_TOOL_ACTION: Final = "CallToolAction"
_SCHEMAS_PREFIX: Final = "#/components/schemas/"
_ANY: Final[dict[str, Any]] = {}

_GUARD_STATUSES: Final = {
    "401": "The token is missing or wrong.",
    "403": "The Origin is not served.",
    "421": "The Host is not served.",
}
"""Responses of the guard, which any request may get before it reaches its route."""

_BODY_STATUSES: Final = {"408": "The body did not arrive in time.", "413": "The body is too large."}


class _Lenient(GenerateJsonSchema):
    """Describes types without a JSON schema, such as arrays, as anything instead of failing."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def describe(model: Any, prefix: str = "#/$defs/") -> dict[str, Any]:
    """Return the JSON schema of a model, or of a union of models."""
    template = prefix + "{model}"
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_json_schema(schema_generator=_Lenient, ref_template=template)
    schema = TypeAdapter(model).json_schema(schema_generator=_Lenient, ref_template=template)
    if "title" not in schema and schema.get("$defs"):
        # Clients recognize an environment of tools by its action's name.
        names = [str(definition.get("title", name)) for name, definition in schema["$defs"].items()]
        schema["title"] = _TOOL_ACTION if _TOOL_ACTION in names else names[0]
    return schema


def describe_each(models: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each model, under its key; a model that has several keys is described once."""
    distinct = {id(model): model for model in models.values()}
    described = {key: describe(model) for key, model in distinct.items()}
    return {name: described[id(model)] for name, model in models.items()}


@functools.cache
def describe_own(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of one of our models, which is the same for every app. It must not be modified."""
    return describe(model)


def describe_reset(factory: Any) -> dict[str, Any]:
    """Return the JSON schema of a reset's options, from the signature of the environment class if there is one."""
    schema = {**describe(ResetOptions), "title": "Reset"}
    reset = getattr(factory, "reset_async", None) or getattr(factory, "reset", None)
    if not isinstance(factory, type) or not callable(reset):
        return schema
    hints, properties, required, definitions = hints_of(reset), dict[str, Any](), [], schema.get("$defs", {})
    takes_others = False
    for parameter in list(inspect.signature(reset).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:  # the base refuses others
            takes_others = not getattr(factory, "KEEPS_EPISODES", False)
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            try:
                property_schema = describe(hints.get(parameter.name, Any))
            except Exception:  # pydantic does not know the type
                property_schema = {}
            definitions |= property_schema.pop("$defs", {})
            if parameter.default is parameter.empty:
                required.append(parameter.name)
            elif isinstance(parameter.default, bool | int | float | str):
                property_schema = {**property_schema, "default": parameter.default}
            properties[parameter.name] = property_schema
    if "seed" in properties:
        properties["seed"] = schema["properties"]["seed"]
    more = {"required": required, "$defs": definitions}
    schema |= {"properties": properties, "additionalProperties": takes_others}
    return schema | {key: value for key, value in more.items() if value}


def describe_api(document: dict[str, Any], models: dict[str, Any], *, production: bool) -> dict[str, Any]:
    """Complete the OpenAPI document of FastAPI, in place, and return it.

    Adds plain Starlette routes, the models of their bodies, and the responses of the guard.

    Args:
        document: The document that FastAPI generated.
        models: The models of the environment, under the keys of /schema.
        production: Whether reset, step and state are not served.
    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, model in (
        ("Action", models["action"]),
        ("State", models["state"]),
        ("ResetOptions", ResetOptions),
    ):
        schema = describe(model, _SCHEMAS_PREFIX)
        schemas.update(schema.pop("$defs", {}))
        schemas[f"Served{name}"] = schema
    schemas["ServedProblem"] = _PROBLEM
    undescribed_paths = _rpc_route() if production else _step_routes() | _rpc_route()
    document["paths"] = undescribed_paths | document["paths"]
    for path in document["paths"].values():
        for method, operation in path.items():
            statuses = _GUARD_STATUSES | (_BODY_STATUSES if method == "post" else {})
            for status, text in statuses.items():
                operation["responses"].setdefault(status, problem(text))
    return document


def problem(text: str) -> dict[str, Any]:
    """Return the description of an error response, whose body has a `detail`."""
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS_PREFIX}ServedProblem"}}},
    }


def answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a JSON response."""
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def body(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """Return the description of a JSON request body, as part of an operation."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _ref(name: str) -> dict[str, Any]:
    """Return a reference to a schema that `describe_api` adds."""
    return {"$ref": f"{_SCHEMAS_PREFIX}Served{name}"}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties."""
    return {"type": "object", "properties": required | optional, "required": list(required)}


def parameter(place: str, name: str, text: str, **more: Any) -> dict[str, Any]:
    """Return the description of a parameter in the `place` of a request, such as its path; a text by default."""
    return {"name": name, "in": place, "description": text, "schema": {"type": "string"}, **more}


_PROBLEM: Final = record({"detail": _ANY})

_ENVELOPE: Final = record(
    {
        "observation": {"type": "object"},
        "reward": {"type": ["number", "null"]},
        "done": {"type": "boolean"},
        "metadata": {"type": ["object", "null"]},
    }
)

_RPC_ANSWER: Final = record(
    {"jsonrpc": {"const": "2.0"}, "id": {"type": ["string", "integer", "null"]}},
    result={"type": "object"},
    error=record({"code": {"type": "integer"}, "message": {"type": "string"}, "data": _ANY}),
)

_SESSION_ID: Final = {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"}
_NO_SESSION: Final = "The session to call; without it, each call gets an environment of its own."
_PARAMETERS: Final = [
    parameter("header", SESSION_HEADER, _NO_SESSION, schema=_SESSION_ID),
    parameter("cookie", SESSION_COOKIE, "The same; the header takes precedence.", schema=_SESSION_ID),
]
"""The parameters of routes that accept a session id."""

SESSION_STATUSES: Final = {
    "422": problem("The request does not validate."),
    "429": problem("Too many calls are waiting for the session."),
    "500": problem("The environment, or its constructor, raised an exception."),
    "503": problem("No slot is free."),
    "504": problem("The call exceeded its deadline, and the session was ended."),
}
"""Responses of routes that call an environment."""
_UNKNOWN_SESSION: Final = {"404": problem("There is no such session.")}
_OBSERVED: Final = {"200": answer("The observation, reward, done and metadata.", _ENVELOPE)}
_STATE: Final = {"200": answer("The state of the episode.", _ref("State"))}


def _operation(name: str, text: str, responses: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"summary": name.title(), "description": text, "operationId": name, **more, "responses": responses}


def _step_routes() -> dict[str, Any]:
    """Return the descriptions of /reset, /step and /state, plain Starlette routes."""
    step = describe(StepOptions)
    step["properties"]["action"] = _ref("Action")
    bare_action: dict[str, Any] = {"allOf": [_ref("Action"), {"type": "object", "minProperties": 1}]}
    bare_action["not"] = {"required": ["action"]}
    text = "Start an episode and return its first observation; a named session that does not exist is opened."
    reset = _operation(
        "reset", text, SESSION_STATUSES | _OBSERVED, **body(_ref("ResetOptions"), required=False)
    )
    responses = SESSION_STATUSES | _UNKNOWN_SESSION
    apply = _operation(
        "step",
        "Apply an action and return the observation.",
        responses | _OBSERVED,
        **body({"anyOf": [step, bare_action]}, required=True),
    )
    state = _operation("state", "Return the state of the episode.", responses | _STATE)
    for operation in (reset, apply, state):
        operation["parameters"] = _PARAMETERS
    return {"/reset": {"post": reset}, "/step": {"post": apply}, "/state": {"get": state}}


def _rpc_route() -> dict[str, Any]:
    text = "Answer one JSON-RPC request; errors are in the body, the status is 200. Standard MCP is served here too."
    responses = {"200": answer("The response.", _RPC_ANSWER)}
    return {"/mcp": {"post": _operation("mcp", text, responses, **body(describe(RpcRequest), required=True))}}
