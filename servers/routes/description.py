"""The OpenAPI document: what it takes from the environment's models, and the answers that every route can give."""

from typing import Any, Final

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from openenv_core.protocol.requests import ResetOptions

CALL: Final = "CallToolAction"
_PLACE = "#/components/schemas/"
_ANY: dict[str, Any] = {}

GUARD_STATUSES = {
    "401": "The token is missing or wrong.",
    "403": "The Origin is not served.",
    "421": "The Host is not served.",
}
"""What any request may meet before it reaches its route."""

BODY_STATUSES = {"408": "The body did not arrive in time.", "413": "The body is too large."}


class _Lenient(GenerateJsonSchema):
    """Describes arrays and other foreign types as anything, instead of failing."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def describe(model: Any, place: str = "#/$defs/") -> dict[str, Any]:
    """Return the JSON schema of a model, or of a union of models."""
    template = place + "{model}"
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_json_schema(schema_generator=_Lenient, ref_template=template)
    schema = TypeAdapter(model).json_schema(schema_generator=_Lenient, ref_template=template)
    if "title" not in schema and schema.get("$defs"):
        # Callers tell an environment of tools by the name of its action.
        names = [str(one.get("title", name)) for name, one in schema["$defs"].items()]
        schema["title"] = CALL if CALL in names else names[0]
    return schema


def describe_api(document: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Complete the document that the framework makes: bodies that it does not read, and what the guard answers."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, model in (
        ("Action", models["action"]),
        ("State", models["state"]),
        ("ResetOptions", ResetOptions),
    ):
        schema = describe(model, _PLACE)
        schemas.update(schema.pop("$defs", {}))
        schemas[f"Served{name}"] = schema
    schemas["ServedProblem"] = _PROBLEM
    for path in document["paths"].values():
        for method, operation in path.items():
            responses = operation["responses"]
            statuses = dict(GUARD_STATUSES)
            if method == "post":
                statuses |= BODY_STATUSES
            for status, text in statuses.items():
                responses.setdefault(status, problem(text))
    return document


def problem(text: str) -> dict[str, Any]:
    """Describe an answer whose body holds the detail of what went wrong."""
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"{_PLACE}ServedProblem"}}},
    }


def answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Describe an answer."""
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def body(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """Describe what a request brings."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def ref(name: str) -> dict[str, Any]:
    """Point to one of the schemas that `describe_api` brings in."""
    return {"$ref": f"{_PLACE}Served{name}"}


_PROBLEM: dict[str, Any] = {"type": "object", "properties": {"detail": _ANY}, "required": ["detail"]}

ENVELOPE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "observation": {"type": "object"},
        "reward": {"type": ["number", "null"]},
        "done": {"type": "boolean"},
        "metadata": {"type": ["object", "null"]},
    },
    "required": ["observation", "reward", "done", "metadata"],
}

RESET_BODY = body(ref("ResetOptions"), required=False)

STEP_BODY = body(
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "action": ref("Action"),
                    "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
                    "request_id": {"type": ["string", "null"], "maxLength": 255},
                },
                "required": ["action"],
            },
            {
                "allOf": [ref("Action"), {"type": "object", "minProperties": 1}],
                "not": {"required": ["action"]},
            },
        ]
    },
    required=True,
)

RPC_BODY = body(
    {
        "type": "object",
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["string", "integer", "null"]},
            "method": {"type": "string"},
            "params": {"type": "object"},
        },
        "required": ["jsonrpc", "method"],
        "additionalProperties": False,
    },
    required=True,
)

RPC_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer", "null"]},
        "result": {"type": "object"},
        "error": {
            "type": "object",
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "data": _ANY},
            "required": ["code", "message", "data"],
        },
    },
    "required": ["jsonrpc", "id"],
}
