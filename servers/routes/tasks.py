"""The routes for an environment's tasks: its splits, the number of tasks in each, and the tasks themselves.

They call the methods of `openenv_core.tasks.TaskProvider` on an instance of the environment opened for each request,
which takes a slot like any other session.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from openenv_core.protocol.errors import RefusalError, text_of
from openenv_core.protocol.jsonio import dumps
from openenv_core.tasks import SPLITS
from servers.execution import FATAL
from servers.routes.description import (
    SESSION_STATUSES,
    answer,
    body,
    describe_own,
    parameter,
    problem,
    record,
)
from servers.routes.http import (
    answer_request,
    json_answer,
    read_model,
    refusal_response,
    report_error,
    respond,
)
from servers.security import owner_of
from servers.sessions import MethodRequest, SessionTable


class Split(BaseModel):
    """The body of a request about a split."""

    model_config = ConfigDict(extra="forbid")

    split: str


class TaskAt(Split):
    """The body of a request for one task of a split."""

    index: int


class TaskRange(Split):
    """The body of a request for several tasks of a split; the bounds are those of a Python slice."""

    start: int | None = None
    stop: int | None = None


_ROUTES: Final[Sequence[tuple[str, str, type[Split] | None, str | None, str]]] = (
    ("splits", "list_splits", None, None, "Return the splits, each with its name and type."),
    ("tasks", "list_tasks", Split, "tasks", "Return the tasks of a split."),
    ("num_tasks", "num_tasks", Split, "num_tasks", "Return the number of tasks of a split."),
    ("task", "get_task", TaskAt, "task", "Return one task."),
    ("task_range", "get_task_range", TaskRange, "tasks", "Return the tasks within bounds."),
)
"""The last part of each path, the method, the model of its body, the result's key in the response, and a description.

The fields of the body are the method's arguments in order. Without a key, the response is the list of splits.
"""

_STATUSES: Final = {
    **SESSION_STATUSES,
    "400": problem("The environment does not know this split or index."),
    "404": problem("There is no such environment."),
    "501": problem("The environment has no such method."),
}

_NAME: Final = parameter("path", "env_name", "The environment's name, in upper or lower case.", required=True)


def tasks_router(sessions: SessionTable, env_name: str) -> APIRouter:
    """Return the task routes of an environment, whose name in the paths is `env_name`."""
    router = APIRouter()

    @router.get(
        "/list_environments",
        response_model=None,
        responses={200: answer("Its name.", {"type": "array", "items": {"type": "string"}})},
    )
    async def list_environments() -> list[str]:
        """Return the name of the served environment, in a list."""
        return [env_name]

    for route in _ROUTES:
        _add_route(router, sessions, env_name, *route)
    return router


def _add_route(
    router: APIRouter,
    sessions: SessionTable,
    env_name: str,
    path: str,
    method: str,
    model: type[Split] | None,
    key: str | None,
    text: str,
) -> None:
    more = {"env_name": env_name} if path == "tasks" else {}
    schema = {"type": "array"} if key is None else record({name: {} for name in (key, *more)})

    def to_body(result: Any) -> Any:
        return list(map(_normalize_split, result)) if key is None else {key: result, **more}

    async def endpoint(request: Request) -> Response:
        name = request.path_params["env_name"]
        try:
            arguments = () if model is None else tuple(dict(await read_model(request, model)).values())
        except RefusalError as refusal:
            return refusal_response(refusal, sessions.metrics)
        if name.lower() != env_name.lower():
            return _problem(404, f"unknown environment {name!r}")
        call = _call_method(sessions, owner_of(request.scope), MethodRequest(method, arguments), to_body)
        return await respond(request, call)

    described = {} if model is None else body(describe_own(model), required=True)
    responses: Any = _STATUSES | {"200": answer("The result of the environment's method.", schema)}
    router.add_api_route(
        f"/{{env_name}}/{path}",
        endpoint,
        methods=["GET" if model is None else "POST"],
        name=path,
        description=text,
        response_model=None,
        responses=responses,
        openapi_extra={"parameters": [_NAME], **described},
    )


async def _call_method(
    sessions: SessionTable, owner: str, request: MethodRequest, to_body: Callable[[Any], Any]
) -> Response:
    """Call a method of an instance opened for it, and return the response: `to_body(result)`, encoded."""
    try:
        factory = sessions.factory
        if isinstance(factory, type) and not callable(getattr(factory, request.name, None)):
            raise NotImplementedError  # without an instance, which would take a slot
        async with sessions.session(owner) as session:
            if not session.has_method(request.name):
                raise NotImplementedError
            result = await answer_request(session, request)
    except RefusalError as refusal:
        return refusal_response(refusal, sessions.metrics)
    except NotImplementedError:
        return _problem(501, f"{request.name} is not supported for this environment")
    except IndexError:
        return _problem(400, "Invalid task index")
    except (LookupError, ValueError, OverflowError) as error:  # an unknown split or index
        return _problem(400, f"expected a split and bounds that the environment knows, got: {text_of(error)}")
    except FATAL as error:
        return _problem(500, report_error(error, f"{request.name} failed"))
    try:
        return json_answer(dumps(to_body(result)))
    except FATAL as error:
        return _problem(500, report_error(error, f"{request.name} failed"))


def _normalize_split(split: Any) -> Any:
    """Return a model or mapping of a split unchanged; for a name or any other value, a dict of its name and type."""
    if isinstance(split, BaseModel | Mapping):
        return split
    return {"name": str(split), "type": split if split in SPLITS else "validation"}


def _problem(status: int, text: str) -> Response:
    return json_answer(dumps({"detail": text}), status)
