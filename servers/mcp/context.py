"""The context of an MCP call: sends a tool's progress, log messages and questions to the client that called it."""

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, NamedTuple, TypeVar, get_args

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import AskingUnavailableError, Elicit, LogLevel, Request, Roots, Sample, ToolContext
from servers.mcp.hub import Hub, Outbox, Peer
from servers.sessions import EnvironmentSession


class _Kind(NamedTuple):
    """How MCP expresses one kind of question: the client capability, the method and the SDK's models."""

    capability: str
    method: str
    request: type[Any]
    answer: type[BaseModel]


_KINDS: Final[Mapping[type[Request], _Kind]] = {
    Elicit: _Kind("elicitation", "elicitation/create", types.ElicitRequest, types.ElicitResult),
    Sample: _Kind(
        "sampling", "sampling/createMessage", types.CreateMessageRequest, types.CreateMessageResult
    ),
    Roots: _Kind("roots", "roots/list", types.ListRootsRequest, types.ListRootsResult),
}


def to_mcp(question: Request) -> dict[str, Any]:
    """Return a question as an MCP request, in JSON."""
    request: dict[str, Any] = {"method": _KINDS[type(question)].method}
    match question:
        case Elicit(message=message, schema=schema):
            request["params"] = {"message": message, "requestedSchema": dict(schema)}
        case Sample(messages=messages, max_tokens=max_tokens, options=options):
            if isinstance(messages, str):
                messages = [{"role": "user", "content": {"type": "text", "text": messages}}]
            request["params"] = {"messages": list(map(dict, messages)), "maxTokens": max_tokens, **options}
    return request


def _answer_model(question: Request) -> type[BaseModel]:
    if isinstance(question, Sample) and ("tools" in question.options or "toolChoice" in question.options):
        return types.CreateMessageResultWithTools
    return _KINDS[type(question)].answer


def _read_answer(question: Request, answer: object) -> dict[str, Any] | None:
    """Return a client's answer, or None if it is not a valid answer to this question."""
    try:
        read = _answer_model(question).model_validate(answer, by_name=False)
    except ValidationError:
        return None
    return read.model_dump(mode="json", by_alias=True, exclude_none=True)


def missing_capabilities(
    questions: Mapping[str, Request], capabilities: types.ClientCapabilities | None
) -> dict[str, dict[str, Any]]:
    """Return the capabilities, as MCP JSON, that answering needs and the client has not declared."""
    needed = {_KINDS[type(question)].capability for question in questions.values()}
    return {
        name: {} for name in sorted(needed) if capabilities is None or getattr(capabilities, name) is None
    }


class _AnswerRounds:
    """The answers that a stateless call has received so far; they travel in its `requestState`.

    Attributes:
        open: The unanswered questions that the call ends with; empty if it has none.
    """

    def __init__(self, state: str | None, responses: object) -> None:
        self._answers: list[dict[str, Any]] = [] if state is None else json.loads(state)  # by round and name
        self._responses = responses if isinstance(responses, Mapping) else {}
        self._rounds = 0
        self.open: dict[str, Request] = {}

    def answers(self, questions: Mapping[str, Request]) -> dict[str, Any] | None:
        """Return the answers to a tool's questions; None if the client must be asked first."""
        number, self._rounds = self._rounds, self._rounds + 1
        known = self._answers[number] if number < len(self._answers) else {}
        responses: Mapping[str, Any] = {}
        asked_last = number >= len(self._answers) - 1
        if asked_last:  # the responses are to this round's questions, if they are still the same
            responses, self._responses = self._responses, {}
        answered = {
            key: answer
            for key, question in questions.items()
            if (answer := known.get(key) or _read_answer(question, responses.get(key)))
        }
        self.open = {key: question for key, question in questions.items() if key not in answered}
        if self.open or asked_last:
            self._answers[number:] = [answered]
        return None if self.open else answered

    def result(self) -> dict[str, Any]:
        """Return the result, as MCP JSON, of a call that ends with questions."""
        return {
            "resultType": "input_required",
            "inputRequests": {key: to_mcp(question) for key, question in self.open.items()},
            "requestState": json.dumps(self._answers),
        }


KEY: Final = "ropewalk.mcp"
"""Key of the `RequestOrigin` in an HTTP request's scope."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The caller of a request, and the session that the request is about.

    Attributes:
        owner: Fingerprint of the caller's token.
        session: The session that the request is about; None if it names none.
        hub: The listeners of that session.
        peer: The client of the connection that the request came on; None on the stateless wire.
        named: Whether the request names a session, which need not exist yet.
    """

    owner: str
    session: EnvironmentSession | None = None
    hub: Hub[Any] | None = None
    peer: Peer | None = None
    named: bool = True

    @property
    def binding(self) -> str:
        """The owner and session to which a `requestState` is bound while the client holds it."""
        return f"{self.owner}/{'' if self.session is None else self.session.id}"


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with "?" in place of lone surrogates, which occur in file names and program output.

    The SDK cannot encode them, and its client would get no reply at all.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_surrogates(item) for item in value]
    return value


T = TypeVar("T")

LEVELS: Final[tuple[str, ...]] = get_args(types.LoggingLevel)
"""Least severe first."""


class CallEndedError(Exception):
    """The call ended before its tool returned: the caller cancelled it, or must answer questions first."""


class CallContext(ToolContext):
    """The context of one call; created on the event loop.

    Args:
        ctx: The SDK's context of the request.
        session: The session that is called.
        origin: The request's caller and session.
        answer_s: Seconds that the client may take to answer a question; None: no limit.

    Attributes:
        session: The session that is called.
        lacking: Capabilities that the tool's questions needed and the client has not declared.
    """

    def __init__(
        self,
        ctx: ServerRequestContext[Any, Any],
        session: EnvironmentSession,
        origin: RequestOrigin,
        answer_s: float | None,
    ) -> None:
        self._ctx = ctx
        self.session = session
        self._origin = origin
        self._answer_s = answer_s
        self._outbox = Outbox()
        self._level = _min_log_level(ctx, origin)
        self._cancelled = False
        self._task: asyncio.Future[Any] | None = None
        self._rounds: _AnswerRounds | None = None
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            params = ctx.params or {}
            self._rounds = _AnswerRounds(params.get("requestState"), params.get("inputResponses"))
        self.lacking: dict[str, dict[str, Any]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled the call."""
        return self._cancelled

    @property
    def stateless(self) -> bool:
        """Whether the call came over the stateless wire."""
        return self._rounds is not None

    @property
    def questions(self) -> dict[str, Any] | None:
        """The result of the call if it ends with questions to its caller, otherwise None."""
        return self._rounds.result() if self._rounds is not None and self._rounds.open else None

    # For tools

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report the call's progress. Never blocks; callable from any thread."""
        if self._ctx.meta is not None and "progress_token" in self._ctx.meta and isfinite(progress):
            text = replace_surrogates(message)
            self._outbox.put(lambda: self._ctx.session.report_progress(progress, total, text))

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Send a log message to the caller. Never blocks; callable from any thread."""
        if self._level is None or LEVELS.index(level) < self._level:
            return
        plain = json.loads(dumps(data))
        params = types.LoggingMessageNotificationParams(level=level, data=plain, logger=logger)
        message = types.LoggingMessageNotification(params=params)
        self._outbox.put(lambda: self._ctx.session.send_notification(message, self._ctx.request_id))

    def tools_changed(self) -> None:
        """Notify subscribers that the list of tools has changed."""
        self._publish(ToolsListChanged())

    def resources_changed(self) -> None:
        """Notify subscribers that the list of resources has changed."""
        self._publish(ResourcesListChanged())

    def prompts_changed(self) -> None:
        """Notify subscribers that the list of prompts has changed."""
        self._publish(PromptsListChanged())

    def resource_updated(self, uri: str) -> None:
        """Notify a resource's subscribers that it has changed."""
        self._publish(ResourceUpdated(uri))

    async def ask(self, requests: Mapping[str, Request]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the caller; on the stateless wire the call ends here, and the client repeats it with the answers.

        Raises:
            AskingUnavailableError: The client lacks the capability, or does not answer.
        """
        if missing := missing_capabilities(requests, self._ctx.session.client_capabilities):
            self.lacking |= missing
            raise AskingUnavailableError(
                f"expected a client that has declared {', '.join(missing)}, got one that has not; let the tool do "
                "without, or connect with a client that answers such questions"
            )
        if self._rounds is None:
            names = list(requests)
            answers = await asyncio.gather(*(self._send_question(requests[name]) for name in names))
            return dict(zip(names, answers, strict=True))
        if (answered := self._rounds.answers(requests)) is not None:
            return answered
        assert self._task is not None
        self._task.cancel()
        await asyncio.get_running_loop().create_future()  # until the cancellation arrives
        raise AssertionError

    # For handlers

    async def run(self, call: Awaitable[T]) -> T:
        """Await the rest of a call so that it can be cancelled by itself; CallEndedError if it was."""
        if self._cancelled:
            if isinstance(call, Coroutine):
                call.close()
            raise CallEndedError
        self._task = task = asyncio.ensure_future(call)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and (self._cancelled or self.questions is not None):
                raise CallEndedError from None
            raise

    def cancel(self) -> None:
        """Cancel the call: asynchronous tools are cancelled, synchronous ones can check `cancelled`."""
        self._cancelled = True
        self._outbox.close()
        if self._task is not None:
            self._task.cancel()

    async def flush(self) -> None:
        """Wait until the call's messages have been sent."""
        await self._outbox.flush()
        self._outbox.close()

    def _publish(self, event: ServerEvent) -> None:
        if self._origin.hub is not None:
            self._origin.hub.publish(event)

    async def _send_question(self, question: Request) -> Mapping[str, Any]:
        try:
            answer = await self._ctx.session.send_request(
                # Validation fails if MCP has no such question.
                _KINDS[type(question)].request.model_validate(to_mcp(question), by_name=False),
                _answer_model(question),
                request_read_timeout_seconds=self._answer_s,
                metadata=ServerMessageMetadata(related_request_id=self._ctx.request_id),
            )
        except (MCPError, NoBackChannelError, ValidationError) as error:
            raise AskingUnavailableError(f"expected an answer of the client, got: {error}") from error
        return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def _min_log_level(ctx: ServerRequestContext[Any, Any], origin: RequestOrigin) -> int | None:
    """Return the rank of the lowest log level that the caller wants; None if it wants no messages."""
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        level = (ctx.meta or {}).get(types.LOG_LEVEL_META_KEY)
        return LEVELS.index(level) if level in LEVELS else None
    return LEVELS.index("debug" if origin.peer is None else origin.peer.level)
