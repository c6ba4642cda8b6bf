"""The tasks of an environment that knows some: which splits there are, how many tasks, and what each is.

The methods are the environment's own (`openenv_core.tasks.TaskProvider`). Each request asks an instance of its own,
which counts as a session like any other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from openenv_core.protocol.errors import RefusalError, text_of
from openenv_core.protocol.jsonio import dumps
from servers.execution import FATAL, EnvironmentRunner
from servers.routes.description import answer, body, describe, problem
from servers.routes.http import json_answer, read_model, refusal_response, report_error, respond
from servers.security import owner_of
from servers.sessions import SessionTable

_KNOWN_SPLITS: Final = frozenset({"train", "validation", "test"})
"""Types that a split can have. One that is given as a mere name has its name's type where it is one of these."""


class Split(BaseModel):
    """Names a split."""

    model_config = ConfigDict(extra="forbid")

    split: str


class TaskAt(Split):
    """Names one task of a split."""

    index: int


class TaskRange(Split):
    """Names tasks of a split, with the meaning that a slice gives the bounds."""

    start: int | None = None
    stop: int | None = None


class _TaskRoute(NamedTuple):
    """One route: what it tells, the method that it asks, what its body holds, what its answer holds.

    The body has the method's arguments in order; the answer is an object with what the method returns under its key.
    """

    text: str
    method: str
    body: type[Split]
    key: str


_ROUTES: Final[Mapping[str, _TaskRoute]] = {
    "tasks": _TaskRoute("Return the tasks of a split.", "list_tasks", Split, "tasks"),
    "num_tasks": _TaskRoute("Return how many tasks a split has.", "num_tasks", Split, "num_tasks"),
    "task": _TaskRoute("Return one task.", "get_task", TaskAt, "task"),
    "task_range": _TaskRoute("Return the tasks within bounds.", "get_task_range", TaskRange, "tasks"),
}

_STATUSES: dict[int | str, dict[str, Any]] = {
    400: problem("The environment does not know this split or index."),
    404: problem("There is no such environment."),
    422: problem("The request does not validate."),
    500: problem("The environment, or its constructor, raised an exception."),
    501: problem("The environment has no such method."),
    503: problem("Every session is taken."),
    504: problem("The environment took too long."),
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
    """Return the task routes of one environment, which is called `env_name` in the paths."""
    router = APIRouter()
    tasks = _Tasks(sessions, env_name)

    @router.get(
        "/list_environments",
        response_model=None,
        responses={200: answer("Its name.", {"type": "array", "items": {"type": "string"}})},
    )
    async def list_environments() -> list[str]:
        """Name the environment that is served."""
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
            openapi_extra=_NAME | body(describe(route.body), required=True),
        )

    for path, route in _ROUTES.items():
        add(path, route)
    return router


class _Tasks:
    """Asks an instance of the environment."""

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
        """Return what a method of the environment returns, in the shape of the route."""
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
        async def work(runner: EnvironmentRunner) -> Any:
            if not runner.has(method):
                raise NotImplementedError
            return await runner.call(method, *arguments)

        try:
            async with self._sessions.session(owner) as session:
                result = await session.run(work)
        except RefusalError as refusal:
            return refusal_response(refusal, self._sessions.metrics)
        except NotImplementedError:
            return _unsupported(method)
        except IndexError:
            return _problem(400, "Invalid task index")
        except (LookupError, ValueError, OverflowError) as error:  # a split or an index that it does not know
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
    """Return the name and type of a split that an environment gives as a model, a mapping, a name or anything."""
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
    return {**_STATUSES, 200: answer("What the environment says.", schema)}
