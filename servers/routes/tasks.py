"""The routes for an environment's tasks: its splits, the number of tasks in each, and the tasks themselves.

They call the methods of `openenv_core.tasks.TaskProvider` on an instance of the environment opened for each request,
which takes a slot like any other session.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from openenv_core.protocol.errors import RefusalError, text_of
from openenv_core.protocol.jsonio import dumps
from servers.execution import FATAL
from servers.routes.description import answer, body, describe_own, problem
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

_KNOWN_SPLITS: Final = frozenset({"train", "validation", "test"})
"""Types of splits. A split given only as a name has the type of that name if it is one of these, else validation."""


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


class _TaskRoute(NamedTuple):
    """One route that calls a method of the environment.

    Attributes:
        text: Its description.
        method: The name of the method.
        body: The model of the request body, whose fields are the method's arguments in order.
        key: The key of the method's result in the response.
    """

    text: str
    method: str
    body: type[Split]
    key: str


_ROUTES: Final[Mapping[str, _TaskRoute]] = {
    "tasks": _TaskRoute("Return the tasks of a split.", "list_tasks", Split, "tasks"),
    "num_tasks": _TaskRoute("Return the number of tasks of a split.", "num_tasks", Split, "num_tasks"),
    "task": _TaskRoute("Return one task.", "get_task", TaskAt, "task"),
    "task_range": _TaskRoute("Return the tasks within bounds.", "get_task_range", TaskRange, "tasks"),
}

_STATUSES: dict[int | str, dict[str, Any]] = {
    400: problem("The environment does not know this split or index."),
    404: problem("There is no such environment."),
    422: problem("The request does not validate."),
    500: problem("The environment, or its constructor, raised an exception."),
    501: problem("The environment has no such method."),
    503: problem("No slot is free."),
    504: problem("The call exceeded its deadline."),
}

_NAME: Final = {
    "parameters": [
        {
            "name": "env_name",
            "in": "path",
            "required": True,
            "description": "The environment's name, in upper or lower case.",
            "schema": {"type": "string"},
        }
    ]
}


def tasks_router(sessions: SessionTable, env_name: str) -> APIRouter:
    """Return the task routes of an environment, whose name in the paths is `env_name`."""
    router = APIRouter()
    tasks = _Tasks(sessions, env_name)

    @router.get(
        "/list_environments",
        response_model=None,
        responses={200: answer("Its name.", {"type": "array", "items": {"type": "string"}})},
    )
    async def list_environments() -> list[str]:
        """Return the name of the served environment, in a list."""
        return [env_name]

    @router.get(
        "/{env_name}/splits",
        response_model=None,
        responses=_responses({"type": "array"}),
        openapi_extra=_NAME,
    )
    async def splits(request: Request) -> Response:
        """Return the splits, each with its name and type."""
        return await tasks.answer(
            request, "list_splits", lambda result: [_normalize_split(split) for split in result]
        )

    def add(path: str, route: _TaskRoute) -> None:
        extra_fields = {"env_name": env_name} if path == "tasks" else {}

        async def endpoint(request: Request) -> Response:
            return await tasks.answer(
                request, route.method, lambda result: {route.key: result, **extra_fields}, route.body
            )

        router.add_api_route(
            f"/{{env_name}}/{path}",
            endpoint,
            methods=["POST"],
            name=path,
            description=route.text,
            response_model=None,
            responses=_responses({"type": "object", "required": [route.key, *extra_fields]}),
            openapi_extra=_NAME | body(describe_own(route.body), required=True),
        )

    for path, route in _ROUTES.items():
        add(path, route)
    return router


class _Tasks:
    """Calls task methods on an instance of the environment and builds the responses."""

    def __init__(self, sessions: SessionTable, env_name: str) -> None:
        self._sessions = sessions
        self._name = env_name.lower()

    async def answer(
        self,
        request: Request,
        method: str,
        to_body: Callable[[Any], Any],
        model: type[Split] | None = None,
    ) -> Response:
        """Return the response of a route: call `method` with the fields of the body, and encode `to_body(result)`."""
        arguments: Sequence[Any] = ()
        if model is not None:
            try:
                arguments = tuple(dict(await read_model(request, model)).values())
            except RefusalError as refusal:
                return refusal_response(refusal, self._sessions.metrics)
        name = request.path_params["env_name"]
        if name.lower() != self._name:
            return _problem(404, f"unknown environment {name!r}")
        factory = self._sessions.factory
        if isinstance(factory, type) and not callable(getattr(factory, method, None)):
            return _unsupported(method)  # without an instance, which would take a slot
        return await respond(request, self._call_method(owner_of(request.scope), to_body, method, arguments))

    async def _call_method(
        self, owner: str, to_body: Callable[[Any], Any], method: str, arguments: Sequence[Any]
    ) -> Response:
        try:
            async with self._sessions.session(owner) as session:
                if not session.has_method(method):
                    raise NotImplementedError
                result = await answer_request(session, MethodRequest(method, tuple(arguments)))
        except RefusalError as refusal:
            return refusal_response(refusal, self._sessions.metrics)
        except NotImplementedError:
            return _unsupported(method)
        except IndexError:
            return _problem(400, "Invalid task index")
        except (LookupError, ValueError, OverflowError) as error:  # an unknown split or index
            return _problem(
                400, f"expected a split and bounds that the environment knows, got: {text_of(error)}"
            )
        except FATAL as error:
            return _problem(500, report_error(error, f"{method} failed"))
        try:
            return json_answer(dumps(to_body(result)))
        except FATAL as error:
            return _problem(500, report_error(error, f"{method} failed"))


def _normalize_split(split: Any) -> Any:
    """Return a model or mapping of a split unchanged; for a name or any other value, a dict of its name and type."""
    if isinstance(split, BaseModel | Mapping):
        return split
    name = str(split)
    is_known = isinstance(split, str) and name in _KNOWN_SPLITS
    return {"name": name, "type": name if is_known else "validation"}


def _unsupported(method: str) -> Response:
    return _problem(501, f"{method} is not supported for this environment")


def _problem(status: int, text: str) -> Response:
    return json_answer(dumps({"detail": text}), status)


def _responses(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {**_STATUSES, 200: answer("The result of the environment's method.", schema)}
