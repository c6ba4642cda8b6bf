"""What a server says of itself, and whether what it does agrees."""

from typing import Any

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.playing.turns import played, seeds
from openenv_core.checker.runtime.faults import Fault, first_fault
from openenv_core.checker.schemas import fault_of
from openenv_core.checker.subject import Subject
from openenv_core.types import EnvironmentMetadata

SCHEMAS = ("action", "observation", "state")

AGREE = (
    "give the field the type that it has, or return what its type says; a value that is not finite crosses the "
    "wire as null"
)


@check(Level.RUNTIME)
def check_health(subject: Subject) -> None:
    """GET /health answers that the server is healthy."""
    status, body = _get(subject, "/health")
    if status != 200 or not isinstance(body, dict) or body.get("status") != "healthy":
        raise CheckFailed(
            f'expected GET /health to answer 200 {{"status": "healthy"}}, got {status} {body!r:.200}',
            change="serve with create_app; a server that is out of threads says that it is unhealthy: look for "
            "steps that never end",
        )


@check(Level.RUNTIME)
def check_metadata(subject: Subject) -> str:
    """GET /metadata tells the environment's name and what it is."""
    status, body = _get(subject, "/metadata")
    known = set(EnvironmentMetadata.model_fields)
    if status != 200 or not isinstance(body, dict):
        raise CheckFailed(
            f"expected GET /metadata to answer 200 with an object, got {status} {body!r:.200}",
            change="let get_metadata() of the environment return an EnvironmentMetadata",
        )
    if unknown := sorted(set(body) - known):
        raise CheckFailed(
            f"expected GET /metadata to hold {', '.join(sorted(known))}, got {', '.join(unknown)} as well",
            change="leave it out: released clients refuse unknown keys",
        )
    for key in ("name", "description"):
        if not isinstance(body.get(key), str) or not body[key].strip():
            raise CheckFailed(
                f"expected GET /metadata to tell the {key}, got {body.get(key)!r}",
                change="give the environment's class a docstring, or write get_metadata()",
            )
    return str(body["name"])


@check(Level.RUNTIME)
def check_schema_valid(subject: Subject) -> None:
    """GET /schema gives JSON schemas of the action, the observation and the state."""
    for name in SCHEMAS:
        schema = subject.schema[name]
        if fault := fault_of(schema):
            raise CheckFailed(
                f"expected the schema of the {name} to be one, got a fault at {fault.json_path}: {fault.message}",
                change="correct what json_schema_extra or WithJsonSchema says of that field",
            ) from fault
        if not schema:
            raise CheckFailed(
                f"expected the schema of the {name} to say something, got an empty one",
                change="give create_app the models",
            )


@check(Level.RUNTIME)
def check_observations_follow_schema(subject: Subject) -> str:
    """Every observation that comes over the WebSocket follows the schema that the server gives."""
    return _observations(subject, "websocket")


@check(Level.RUNTIME)
def check_http_follows_schema(subject: Subject) -> str:
    """Every observation and state that comes over plain HTTP follows the schema that the server gives."""
    return _observations(subject, "http")


@check(Level.RUNTIME)
def check_states_follow_schema(subject: Subject) -> str:
    """Every state follows the schema that the server gives."""
    seen = 0
    with subject.client() as client:
        for seed in seeds():
            for turn in played(subject, client, seed):
                state = client.state()
                seen += 1
                if (fault := first_fault(subject.schema["state"], state)) is not None:
                    raise _disagreement("state", turn.where, fault)
    return f"{seen} states"


def _observations(subject: Subject, transport: str) -> str:
    schema = subject.schema
    seen = 0
    with subject.client(transport=transport) as client:
        for seed in seeds():
            for turn in played(subject, client, seed):
                seen += 1
                whole = {**turn.result.observation, "reward": turn.result.reward, "done": turn.result.done}
                key = "reset_observation" if turn.action is None else "observation"
                if (fault := first_fault(schema.get(key, schema["observation"]), whole)) is not None:
                    raise _disagreement("observation", turn.where, fault)
            if transport == "http" and (fault := first_fault(schema["state"], client.state())) is not None:
                raise _disagreement("state", "over HTTP", fault)
    return f"{seen} observations"


def _disagreement(what: str, where: str, fault: Fault) -> CheckFailed:
    return CheckFailed(
        f"expected the {what} {where} to follow its schema, got {fault.value!r:.80} at {fault.place}: "
        f"{fault.message}",
        change=AGREE,
    )


def _get(subject: Subject, path: str) -> tuple[int, Any]:
    with subject.http() as http:
        reply = http.get(path)
    if reply.status_code == 404:
        raise NotApplicable(f"the server has no {path}")
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, reply.text
