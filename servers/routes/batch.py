"""/ws in the dialect `ropewalk.v1`: requests with ids, each about many sessions of the socket, answered as they end."""

import asyncio
import logging
import math
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from openenv_core import Observation
from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, BatchRequest, FrameError, ObservationEncoder
from openenv_core.protocol.errors import (
    EXECUTION_ERROR,
    INVALID_JSON,
    SESSION_ERROR,
    VALIDATION_ERROR,
    RefusalError,
)
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import encode_model
from openenv_core.protocol.requests import RequestDecoder, given_options
from servers.execution import CLOSE_TIMEOUT_S, keep
from servers.routes.http import reported
from servers.routes.websocket import (
    GOING_AWAY,
    NORMAL_CLOSURE,
    Conversation,
    DisconnectedError,
    Message,
    Receive,
    Send,
    Sockets,
)
from servers.security import owner_of
from servers.sessions import SessionTable
from servers.sessions.batch import BatchRound, Member, MemberCall, SessionBatch

logger = logging.getLogger("servers")

MAX_REQUESTS: Final = 32
"""Requests of one socket under way at once, those whose answers wait to be read among them."""

MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
"""A longer answer is sent in several frames."""


class BatchDialect:
    """Reads and writes the frames of one server's environment.

    Args:
        decoder: Reads actions.
        encoder: Writes observations.
    """

    def __init__(self, decoder: RequestDecoder[Any], encoder: ObservationEncoder) -> None:
        self._decoder = decoder
        self._encoder = encoder

    def refusal(self, refusal: RefusalError, request_id: int | None = None) -> str:
        """Return the frame that refuses a request; the id is null where it could not be read."""
        frame = wire.encode_frame(
            {"id": dumps(request_id), "error": dumps(_data_of(refusal)), "last": b"true"}, []
        )
        assert isinstance(frame, str)
        return frame

    def calls(
        self, request: BatchRequest, arrays: list[Array], members: list[Member], size: int
    ) -> list[MemberCall]:
        """Return what each member is asked; one whose action cannot be read has its outcome already.

        Raises:
            RefusalError: VALIDATION_ERROR.
        """
        match request:
            case wire.ResetRequest(seeds=seeds):
                given = given_options(request.options)
                if seeds is None:
                    return [MemberCall(member, options=given) for member in members]
                _same_length("seeds", seeds, members)
                return [
                    MemberCall(member, options=given if seed is None else {**given, "seed": seed})
                    for member, seed in zip(members, seeds, strict=True)
                ]
            case wire.StepRequest(actions=actions):
                if isinstance(actions, dict):
                    try:
                        actions = wire.rows_of(actions, arrays, len(members))
                    except ValueError as error:  # FrameError is one
                        raise RefusalError(VALIDATION_ERROR, str(error)) from None
                _same_length("actions", actions, members)
                calls = []
                for member, action in zip(members, self._decoder.actions(actions, size), strict=True):
                    call = MemberCall(member, action=action, autoreset=request.autoreset)
                    if isinstance(action, RefusalError) and not call.resets:
                        call.outcome = action
                    calls.append(call)
                return calls
        return [MemberCall(member) for member in members]

    def answers(self, request_id: int, finished: Sequence[MemberCall], last: bool) -> Iterator[str | bytes]:
        """Yield the frames that tell of calls that are over."""
        frame = self._answer(request_id, finished, last)
        if len(frame) <= MAX_REPLY_BYTES or len(finished) == 1:
            yield frame
        else:
            half = len(finished) // 2
            yield from self.answers(request_id, finished[:half], False)
            yield from self.answers(request_id, finished[half:], last)

    def _answer(self, request_id: int, finished: Sequence[MemberCall], last: bool) -> str | bytes:
        errors: dict[int, dict[str, Any]] = {}
        good: list[MemberCall] = []
        for call in finished:
            if isinstance(call.outcome, BaseException):
                errors[call.member.number] = _data_of(call.outcome)
            else:
                good.append(call)
        try:
            arrays: list[Array] = []
            told = self._tell(good, arrays)
        except Exception:
            # One at a time: what cannot be told of one is that one's error.
            for call in list(good):
                try:
                    self._tell([call], [])
                except Exception as error:
                    errors[call.member.number] = _data_of(error)
                    good.remove(call)
            arrays = []
            told = self._tell(good, arrays)
        if errors:
            told["errors"] = dumps(errors)
        return wire.encode_frame({"id": dumps(request_id), **told, "last": dumps(last)}, arrays)

    def _tell(self, calls: list[MemberCall], arrays: list[Array]) -> dict[str, bytes]:
        told = {"members": dumps([call.member.number for call in calls])}
        if not calls:
            return told
        if calls[0].reads:
            states = [encode_model(call.outcome[0]) for call in calls]  # type: ignore[index]
            return {**told, "rows": b"[%b]" % b",".join(states)}
        outcomes: list[tuple[Observation, Observation | None]] = [call.outcome for call in calls]  # type: ignore[misc]
        seen = [observation for observation, _ in outcomes]
        results = [observation if last is None else last for observation, last in outcomes]
        for kind in {*map(type, seen), *map(type, results)}:
            if not issubclass(kind, Observation):
                raise TypeError(
                    f"expected reset() and step() to return an Observation, got {kind.__name__}; "
                    "return an instance of the environment's observation class"
                )
        final = [call for call, (_, last) in zip(calls, outcomes, strict=True) if last is not None]
        rewards = array("d", [math.nan if one.reward is None else one.reward for one in results])
        ends = [wire.ends_of(one) for one in results]
        for name, dtype, data in (
            ("reward", "float64", rewards.tobytes()),
            ("terminated", "bool", bytes([terminated for terminated, _ in ends])),
            ("truncated", "bool", bytes([truncated for _, truncated in ends])),
        ):
            told[name] = dumps(len(arrays))
            arrays.append(Array(dtype, (len(calls),), data))
        told |= self._encoder.encode(seen, arrays)
        if final:
            lasts = self._encoder.encode([call.outcome[1] for call in final], arrays)  # type: ignore[index]
            inner = {"members": dumps([call.member.number for call in final]), **lasts}
            told["final"] = b"{%b}" % b",".join(
                b'"%b":%b' % (name.encode(), value) for name, value in inner.items()
            )
        return told


class BatchConversation(Conversation):
    """One socket in this dialect.

    Args:
        scope: Of the connection.
        receive: Likewise.
        send: Likewise.
        sessions: Where sessions come from.
        dialect: Reads and writes its frames.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    __slots__ = ("_batches", "_running", "_sending")

    accept: Message = {"type": "websocket.accept", "subprotocol": wire.SUBPROTOCOL}  # noqa: RUF012 - as its base's

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        sessions: SessionTable,
        dialect: BatchDialect,
        send_timeout_s: float,
    ) -> None:
        super().__init__(scope, receive, send, sessions, dialect, send_timeout_s)
        self._batches = dialect
        self._running: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    @asynccontextmanager
    async def batch(self, owner: str) -> AsyncIterator[SessionBatch]:
        """Hold the sessions that the socket opens for as long as the block runs."""
        batch = SessionBatch(self._sessions, owner)
        try:
            yield batch
        finally:
            await batch.close()

    async def _talk(self, held: SessionBatch) -> int:
        inline = self._sessions.inline
        try:
            while not self.leaving:
                self.busy = bool(self._running)
                frame = await self._next_frame()
                self.busy = True
                if inline:
                    await self._answer(held, frame)
                else:
                    full = len(self._running) >= MAX_REQUESTS
                    task = keep(asyncio.create_task(self._answer(held, frame, full)))
                    self._running.add(task)
                    task.add_done_callback(self._answered)
            if self._running:
                await asyncio.wait(self._running)
            return GOING_AWAY
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running, timeout=CLOSE_TIMEOUT_S)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.busy = bool(self._running)
        if self.leaving:
            self.leave()

    async def _answer(self, batch: SessionBatch, frame: str | bytes, full: bool = False) -> None:
        request_id: int | None = None
        try:
            try:
                header, arrays = wire.decode_frame(frame)
                request_id = header["id"] if type(header.get("id")) is int else None
                if full:
                    raise RefusalError(
                        EXECUTION_ERROR,
                        f"expected at most {MAX_REQUESTS} requests at once; wait for their answers",
                    )
                request = wire.read_request(header, len(frame))
                await self._do(batch, request, arrays, len(frame))
            except FrameError as error:
                raise RefusalError(INVALID_JSON, str(error)) from None
        except RefusalError as refusal:
            await self._say(self._batches.refusal(refusal, request_id))
        except (DisconnectedError, OSError):
            self._interrupt()
        except Exception:
            logger.exception("a connection ended by a fault of the server")
            fault = RefusalError(SESSION_ERROR, "the server failed; its log tells why")
            self.end(NORMAL_CLOSURE, self._batches.refusal(fault, request_id))

    async def _do(self, batch: SessionBatch, request: BatchRequest, arrays: list[Array], size: int) -> None:
        if isinstance(request, wire.OpenRequest):
            if len(batch.members) + request.count > wire.MAX_MEMBERS:
                raise RefusalError(
                    VALIDATION_ERROR,
                    f"expected at most {wire.MAX_MEMBERS} sessions of one connection; open another",
                )
            opened = await batch.open(request.count)
            numbers = dumps([member.number for member in opened])
            told = {"id": dumps(request.id), "members": numbers, "last": b"true"}
            await self._say(wire.encode_frame(told, []))
            return
        calls = self._batches.calls(request, arrays, _asked(batch, request.members), size)
        at_least = getattr(request, "at_least", None) or len(calls)
        asked = BatchRound(self._sessions, calls)
        try:
            await asked.start()
            while not asked.over:
                finished = await asked.next(at_least)
                for frame in self._batches.answers(request.id, finished, asked.over):
                    await self._say(frame)
        finally:
            asked.close()

    async def _say(self, frame: str | bytes) -> None:
        async with self._sending:
            if self.over:
                raise DisconnectedError
            self._watch.expect(self._patience_s, self._drop)
            await self._send({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})
            self._watch.stop()


class BatchRoute:
    """An ASGI application that speaks this dialect on every socket.

    Args:
        sessions: Where sessions come from.
        dialect: Reads and writes frames.
        sockets: Keeps count.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    def __init__(
        self, sessions: SessionTable, dialect: BatchDialect, sockets: Sockets, send_timeout_s: float
    ) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._sockets = sockets
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        conversation = BatchConversation(
            scope, receive, send, self._sessions, self._dialect, self._send_timeout_s
        )
        await conversation.serve(self._sockets, conversation.batch(owner_of(scope)))


def _asked(batch: SessionBatch, numbers: list[int] | None) -> list[Member]:
    if not batch.members:
        raise RefusalError(SESSION_ERROR, "expected sessions, got none; send a request `open` first")
    if numbers is None:
        return batch.members
    if max(numbers) >= len(batch.members) or len(set(numbers)) < len(numbers):
        raise RefusalError(
            VALIDATION_ERROR,
            f"expected members from 0 to {len(batch.members) - 1}, each once, got {str(numbers)[:100]}",
        )
    return [batch.members[number] for number in numbers]


def _same_length(what: str, given: Sequence[Any], members: Sequence[Member]) -> None:
    if len(given) != len(members):
        raise RefusalError(VALIDATION_ERROR, f"expected {what} for {len(members)} members, got {len(given)}")


def _data_of(error: BaseException) -> dict[str, Any]:
    """Return the data of an error frame."""
    if isinstance(error, RefusalError):
        return {"message": error.message, "code": error.code, **error.extra}
    return {"message": reported(error), "code": EXECUTION_ERROR}
