"""Plain HTTP: reset, step and state, in a session that the request names or in an environment of its own."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from openenv_core.protocol import replies
from openenv_core.protocol.errors import VALIDATION_ERROR, RefusalError
from openenv_core.protocol.http import SESSION_COOKIE, SESSION_HEADER, SESSION_ID
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.requests import RequestDecoder, http_reset
from servers.execution import FATAL, EnvironmentRunner
from servers.routes import description
from servers.routes.answers import json_answer, json_body, refused, reported, while_connected
from servers.routes.description import answer, problem
from servers.security.guard import owner_of
from servers.sessions import EnvironmentSession, SessionTable

NEW = "new"
"""The value that asks for a session under an id of the server's choice."""


def session_named_by(request: Request) -> str | None:
    """Return the id of the session that a request names, the header before the cookie; None where it names none.

    Raises:
        RefusalError: VALIDATION_ERROR: it is no id.
    """
    named: str | None = None
    for place, name, value in (
        ("cookie", SESSION_COOKIE, request.cookies.get(SESSION_COOKIE)),
        ("header", SESSION_HEADER, request.headers.get(SESSION_HEADER)),
    ):
        if value is None:
            continue
        if place == "header" and len(request.headers.getlist(name)) > 1:
            value = ", ".join(request.headers.getlist(name))  # which is no id
        if SESSION_ID.fullmatch(value) is None:
            text = "String should be 1 to 128 of the characters A-Z a-z 0-9 . _ -"
            fault = {
                "type": "string_pattern_mismatch",
                "loc": [place, name.lower()],
                "msg": text,
                "input": value,
            }
            raise RefusalError(VALIDATION_ERROR, "Invalid session id", {"errors": [fault]})
        named = value
    return named


def naming(request: Request, session_id: str, keep: bool = False) -> dict[str, str]:
    """Return the headers of a reply that tell its session.

    Args:
        request: What is replied to.
        session_id: The session.
        keep: Ask the caller to keep it as a cookie, for as much of the address space as this app has.
    """
    headers = {SESSION_HEADER: session_id}
    if keep:
        path = request.scope.get("root_path") or "/"
        secure = "; Secure" if _encrypted(request) else ""
        headers["Set-Cookie"] = (
            f"{SESSION_COOKIE}={session_id}; HttpOnly; SameSite=Strict; Path={path}{secure}"
        )
    return headers


def _encrypted(request: Request) -> bool:
    """Whether the caller speaks TLS, to this server or to a proxy before it: to say so falsely only hides a cookie."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return request.url.scheme == "https" or forwarded == "https"


PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": place_name,
            "in": place,
            "required": False,
            "description": text,
            "schema": {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"},
        }
        for place_name, place, text in (
            (SESSION_HEADER, "header", "The session to speak to; without it each call stands alone."),
            (SESSION_COOKIE, "cookie", "The same; the header goes first."),
        )
    ]
}
"""What the routes that take a session say of it in the OpenAPI document."""


_STATUSES: dict[int | str, dict[str, Any]] = {
    404: problem("There is no such session."),
    422: problem("The request does not validate."),
    429: problem("Too many calls wait for the session."),
    500: problem("The environment, or its constructor, raised an exception."),
    503: problem("Every session is taken."),
    504: problem("The environment took too long; the session has been ended."),
}


def http_router(sessions: SessionTable, decoder: RequestDecoder[Any]) -> APIRouter:
    """Return the plain HTTP routes of one environment.

    Args:
        sessions: Where sessions come from.
        decoder: Reads actions.
    """
    router = APIRouter()
    plain = _PlainHttp(sessions)
    envelope = {**_STATUSES, 200: answer("The observation, and what came with it.", description.ENVELOPE)}
    state_statuses = {**_STATUSES, 200: answer("Where the episode stands.", description.ref("State"))}

    @router.post(
        "/reset",
        response_model=None,
        responses={status: text for status, text in envelope.items() if status != 404},
        openapi_extra=description.RESET_BODY | PARAMETERS,
    )
    async def reset(request: Request) -> Response:
        """Start an episode and return the first observation; a session that is named is opened where there is none."""

        async def work(runner: EnvironmentRunner) -> bytes:
            return replies.encode_http_result(await runner.reset(options))

        try:
            options = http_reset(await json_body(request))
        except RefusalError as refusal:
            return refused(refusal)
        return await plain.answer(request, work, opening=True)

    @router.post(
        "/step", response_model=None, responses=envelope, openapi_extra=description.STEP_BODY | PARAMETERS
    )
    async def step(request: Request) -> Response:
        """Apply an action and return what follows."""

        async def work(runner: EnvironmentRunner) -> bytes:
            return replies.encode_http_result(await runner.step(action, options))

        try:
            action, options = decoder.http_step(await json_body(request))
        except RefusalError as refusal:
            return refused(refusal)
        return await plain.answer(request, work)

    @router.get("/state", response_model=None, responses=state_statuses, openapi_extra=PARAMETERS)
    async def state(request: Request) -> Response:
        """Return where the episode stands."""

        async def work(runner: EnvironmentRunner) -> bytes:
            return replies.encode_model(await runner.state())

        return await plain.answer(request, work)

    return router


class _PlainHttp:
    """Does the work of a request in the session that it names, or in one of its own."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions

    async def answer(
        self, request: Request, work: Callable[[EnvironmentRunner], Awaitable[bytes]], opening: bool = False
    ) -> Response:
        """Return the reply, unless the client leaves before.

        Args:
            request: The request; its body has been read.
            work: What to do.
            opening: A session that is named and not there is opened.
        """
        try:
            named = session_named_by(request)
        except RefusalError as refusal:
            return refused(refusal)
        reply = self._alone(request, work) if named is None else self._standing(request, named, work, opening)
        return await while_connected(request, reply)

    async def _alone(
        self, request: Request, work: Callable[[EnvironmentRunner], Awaitable[bytes]]
    ) -> Response:
        try:
            async with self._sessions.session(owner_of(request.scope)) as session:
                return await self._work(session, work)
        except RefusalError as refusal:
            return refused(refusal)

    async def _standing(
        self,
        request: Request,
        named: str,
        work: Callable[[EnvironmentRunner], Awaitable[bytes]],
        opening: bool,
    ) -> Response:
        sessions, owner = self._sessions, owner_of(request.scope)
        try:
            if not opening:
                session = sessions.find(owner, named)
            elif named == NEW:
                session = await sessions.open(owner)
            else:
                session = await sessions.find_or_open(owner, named)
            reply = await self._work(session, work)
        except RefusalError as refusal:
            return refused(refusal)
        reply.headers.update(naming(request, session.id, keep=opening))
        return reply

    async def _work(
        self, session: EnvironmentSession, work: Callable[[EnvironmentRunner], Awaitable[bytes]]
    ) -> Response:
        try:
            return json_answer(await self._sessions.call(session, work))
        except FATAL as error:
            if isinstance(error, RefusalError):
                raise
            return json_answer(dumps({"detail": reported(error)}), 500)
