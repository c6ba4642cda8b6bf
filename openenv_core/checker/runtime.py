"""What a server says of itself and of its tools, and whether what it does agrees."""

from typing import Any, Final

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check, need
from openenv_core.checker.drawing import is_of_tools, require_own_names, require_schema
from openenv_core.checker.playing import plays
from openenv_core.checker.subject import Subject
from openenv_core.errors import ServerError
from openenv_core.types import EnvironmentMetadata

_NO_SUCH_TOOL: Final = "ropewalk_no_such_tool"


@check(CheckLevel.RUNTIME)
def check_health(subject: Subject) -> None:
    """GET /health answers that the server is healthy."""
    status, body = _get(subject, "/health")
    if status != 200 or not isinstance(body, dict) or body.get("status") != "healthy":
        raise CheckError(
            f'expected GET /health to answer 200 {{"status": "healthy"}}, got {status} {body!r:.200}',
            change="serve with create_app; a server that is out of threads says that it is unhealthy: look for "
            "steps that never end",
        )


@check(CheckLevel.RUNTIME)
def check_metadata(subject: Subject) -> str:
    """GET /metadata tells the environment's name and what it is."""
    status, body = _get(subject, "/metadata")
    if status != 200 or not isinstance(body, dict):
        raise CheckError(
            f"expected GET /metadata to answer 200 with an object, got {status} {body!r:.200}",
            change="let get_metadata() of the environment return an EnvironmentMetadata",
        )
    known = set(EnvironmentMetadata.model_fields)
    if unknown := sorted(set(body) - known):
        raise CheckError(
            f"expected GET /metadata to hold {', '.join(sorted(known))}, got {', '.join(unknown)} as well",
            change="leave it out: released clients refuse unknown keys",
        )
    for key in ("name", "description"):
        if not isinstance(body.get(key), str) or not body[key].strip():
            raise CheckError(
                f"expected GET /metadata to tell the {key}, got {body.get(key)!r}",
                change="give the environment's class a docstring, or write get_metadata()",
            )
    return str(body["name"])


@check(CheckLevel.RUNTIME)
def check_schema_valid(subject: Subject) -> None:
    """GET /schema gives JSON schemas of the action, the observation and the state."""
    for name in ("action", "observation", "state"):
        schema = subject.schema[name]
        require_schema(
            schema, f"the {name}", "correct what json_schema_extra or WithJsonSchema says of that field"
        )
        if not schema:
            raise CheckError(
                f"expected the schema of the {name} to say something, got an empty one",
                change="give create_app the models",
            )


@check(CheckLevel.RUNTIME)
def check_observations_follow_schema(subject: Subject) -> str:
    """Every observation that comes over the WebSocket follows the schema that the server gives."""
    return _observations(subject, "websocket")


@check(CheckLevel.RUNTIME)
def check_http_follows_schema(subject: Subject) -> str:
    """Every observation and state that comes over plain HTTP follows the schema that the server gives."""
    return _observations(subject, "http")


@check(CheckLevel.RUNTIME)
def check_states_follow_schema(subject: Subject) -> str:
    """Every state follows the schema that the server gives."""
    seen = 0
    with subject.client() as client:
        for turn in plays(subject, client):
            seen += 1
            _require_agreement("state", turn.where, subject.schema["state"], client.state())
    return f"{seen} states"


def _observations(subject: Subject, transport: str) -> str:
    schema = subject.schema
    seen = 0
    with subject.client(transport=transport) as client:
        for turn in plays(subject, client):
            seen += 1
            whole = {**turn.result.observation, "reward": turn.result.reward, "done": turn.done}
            key = "reset_observation" if turn.action is None else "observation"
            _require_agreement("observation", turn.where, schema.get(key, schema["observation"]), whole)
        if transport == "http":
            _require_agreement("state", "over HTTP", schema["state"], client.state())
    return f"{seen} observations"


def _require_agreement(what: str, where: str, schema: dict[str, Any], value: Any) -> None:
    jsonschema = need("jsonschema")
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if fault is not None:
        raise CheckError(
            f"expected the {what} {where} to follow its schema, got {fault.instance!r:.80} at {fault.json_path}: "
            f"{fault.message:.300}",
            change="give the field the type that it has, or return what its type says; a value that is not finite "
            "crosses the wire as null",
        )


def _get(subject: Subject, path: str) -> tuple[int, Any]:
    with subject.http() as http:
        reply = http.get(path)
    if reply.status_code == 404:
        raise NotApplicableError(f"the server has no {path}")
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, reply.text


@check(CheckLevel.RUNTIME)
def check_tools_listed(subject: Subject) -> str:
    """The tools that are listed have names of their own and schemas, and are those that the manifest declares."""
    tools = _tools(subject)
    names = [str(tool.get("name")) for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckError(
            f"expected each tool once, got {', '.join(twice)} several times", change="rename or remove one"
        )
    require_own_names(names)
    for tool in tools:
        schema = tool.get("input_schema") or tool.get("inputSchema") or {}
        require_schema(schema, f"the arguments of {tool.get('name')}", "describe the tool's arguments")
    declared = set(subject.promises.validation.capabilities.declared_tools)
    if declared and declared != set(names):
        raise CheckError(
            f"expected the tools that the manifest declares, {', '.join(sorted(declared))}, "
            f"got {', '.join(sorted(names)) or 'none'}",
            change="correct validation.capabilities.declared_tools in openenv.yaml",
        )
    return ", ".join(names)


@check(CheckLevel.RUNTIME)
def check_unknown_tool(subject: Subject) -> None:
    """A call of a tool that is not there comes back as an observation that says so."""
    _tools(subject)
    change = "answer with CallToolObservation(tool_name=..., error=ToolError(error_type=TOOL_NOT_FOUND, ...))"
    with subject.client() as client:
        subject.reset(client)
        try:
            result = client.step({"type": "call_tool", "tool_name": _NO_SUCH_TOOL, "arguments": {}})
        except ServerError as error:
            raise CheckError(
                f"expected an observation with an error for a tool that is not there, got {error}",
                change=change,
            ) from error
    found = result.observation.get("error")
    if not isinstance(found, dict) or not found.get("error_type"):
        raise CheckError(
            f"expected error.error_type in the observation for a tool that is not there, got {found!r:.200}",
            change=change,
        )


def _tools(subject: Subject) -> list[dict[str, Any]]:
    if not is_of_tools(subject.schema["action"]):
        raise NotApplicableError("its actions are no calls of tools")
    with subject.client() as client:
        subject.reset(client)
        try:
            found = client.step({"type": "list_tools"}).observation.get("tools")
        except ServerError as error:
            raise CheckError(
                f"expected the list of tools for the action list_tools, got {error}",
                change="let the action be a union of ListToolsAction and CallToolAction, and step answer both",
            ) from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise CheckError(
            f"expected the list of tools for the action list_tools, got {found!r:.200}",
            change="answer with ListToolsObservation(tools=[...])",
        )
    return found
