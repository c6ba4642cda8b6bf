"""A request whose caller awaits the reply: over HTTP, JSON-RPC, MCP, and of the page."""

import asyncio
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from servers.sessions import EnvironmentSession
from servers.sessions.session import Options, RequestCall, ResultCall

_NO_OPTIONS: Final[Options] = MappingProxyType({})


class _AnsweredCall(RequestCall, ResultCall):
    """A request whose caller awaits the reply, `result`."""

    def __init__(
        self,
        session: EnvironmentSession,
        request: Any,
        encode: Callable[[Any], Any],
        kind: int | None,
        received_at: float,
        options: Options,
        traceparent: str | None,
    ) -> None:
        self.received_at = received_at
        self.bind(session, request, options, traceparent)
        if kind is not None:
            self.counts = session.metrics.counts.calls[kind]
        self._encode = encode
        self.result = asyncio.get_running_loop().create_future()

    def encode(self, observation: Any, _: int | None, /) -> Any:
        """Return the reply."""
        return self._encode(observation)

    encode_state = encode

    def reply(self, reply: Any, /) -> None:
        """Set the result."""
        if not self.result.done():  # or else the caller has gone
            self.result.set_result(reply)

    def refuse(self, error: BaseException, /) -> None:
        """Set the error."""
        if not self.result.done():
            self.result.set_exception(error)


async def answer_request(
    session: EnvironmentSession,
    request: Any,
    encode: Callable[[Any], Any] = lambda result: result,
    *,
    kind: int | None = None,
    received_at: float = 0.0,
    options: Options = _NO_OPTIONS,
    traceparent: str | None = None,
) -> Any:
    """Have a session answer a request, and return the reply; for callers that await it.

    Args:
        session: The session to call.
        request: What the dialect has decoded.
        encode: Makes the reply of what the environment returned.
        kind: What the call counts as, in place of a reset or step: an index of `servers.metrics.CALLS`.
        received_at: When the request came, by `perf_counter`; 0 if it is not to be counted.
        options: Options of the step beside the action.
        traceparent: W3C trace context of the client's span, if any.

    Raises:
        RefusalError: As `EnvironmentSession.submit`.
        Exception: Whatever the environment or `encode` raised.
    """
    call = _AnsweredCall(session, request, encode, kind, received_at, options, traceparent)
    return await session.perform(call)
