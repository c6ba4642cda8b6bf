"""Requests of every dialect: a decoded request becomes a call of a session, and its outcome a reply."""

import asyncio
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias

from openenv_core.protocol.frames import ReadState, Reset
from openenv_core.tracing import served_span
from servers.execution import FATAL, EnvironmentCall, ResultCall
from servers.metrics import BUCKETS_S, RESET, STEP, CallCounts
from servers.sessions import EnvironmentSession
from servers.threads import Outcome

Options: TypeAlias = Mapping[str, Any]

_NO_OPTIONS: Options = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MethodRequest:
    """A request to call a method of the environment other than `reset`, `step` and `state`.

    Attributes:
        name: Name of the method.
        args: Its arguments.
        wait: Awaits what it returns, if not plainly.
    """

    name: str
    args: tuple[Any, ...] = ()
    wait: Callable[[Any], Awaitable[Any]] | None = None


class RequestCall(EnvironmentCall):
    """A request of any dialect as a call of a session; the dialects differ in `encode` and `target` only.

    Args:
        session: The session to call.
        request: What the dialect has decoded: a reset, a read of the state, a call of a method, or an action.
        received_at: When the request came, by `perf_counter`; 0 if it is not to be counted.
        target: Takes the outcome: by `reply` the encoded result, by `refuse` a refusal or what the environment raised.
        options: Options of the step beside the action.
        traceparent: W3C trace context of the client's span, if any.
    """

    __slots__ = ("_counts", "_received_at", "_runner", "target")

    def __init__(
        self,
        session: EnvironmentSession,
        request: Any,
        received_at: float,
        target: Any,
        options: Options = _NO_OPTIONS,
        traceparent: str | None = None,
    ) -> None:
        self._received_at = received_at
        self._runner = runner = session.runner
        self._counts: CallCounts | None = None
        self.target = target
        # Of `EnvironmentCall`, not by its `__init__` for speed:
        self.task = self.thread_call = None
        self.was_awaited = False
        plan = runner.plan
        kind = type(request)
        if kind is ReadState:
            self.work, self.on_loop = runner.read_state, plan.on_loop
            return
        if kind is MethodRequest:
            self.work = partial(runner.invoke_method, request.name, request.args, request.wait)
            self.on_loop = runner.is_on_loop(getattr(runner.environment, request.name, None))
            return
        if kind is Reset:
            self._counts = session.metrics.counts.calls[RESET]
            self.work, self.on_loop = partial(runner.invoke_reset, request.options), plan.reset_on_loop
        else:
            self._counts = session.metrics.counts.calls[STEP]
            self.work, self.on_loop = partial(runner.invoke_step, request, options), plan.step_on_loop
        if traceparent is not None:
            name = "reset" if kind is Reset else "step"
            span = partial(served_span, traceparent, name, session.metrics.environment)
            self.work, self.on_loop = partial(self._work_traced, span, self.work, self.on_loop), True

    async def _work_traced(self, span: Callable[..., Any], work: Callable[[], Any], on_loop: bool) -> Any:
        with span(self._runner, self._received_at or perf_counter()):
            return await self._runner.run(work, on_loop)

    def deliver(self, outcome: Outcome) -> None:
        """Encode the outcome, count the call, and send the reply."""
        succeeded, value = outcome
        if not succeeded:
            self.target.refuse(value)
            return
        counts = self._counts
        try:
            reply = self.encode_state(value) if counts is None else self.encode(value)
        except FATAL as error:
            self.target.refuse(error)
            return
        if counts is not None and self._received_at:  # `observe`, inlined for speed
            elapsed_s = perf_counter() - self._received_at
            counts.buckets[0 if elapsed_s < BUCKETS_S[0] else bisect_left(BUCKETS_S, elapsed_s)] += 1
            counts.seconds += elapsed_s
            counts.environment_s += self._runner.spent_s
        self.target.reply(reply)

    @abstractmethod
    def encode(self, observation: Any, /) -> Any:
        """Return the reply to a reset or step."""

    @abstractmethod
    def encode_state(self, state: Any, /) -> Any:
        """Return the reply to a read of the state."""


class _AnsweredCall(RequestCall, ResultCall):
    """A request whose caller awaits the reply, `result`."""

    __slots__ = ("_encode", "result")

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
        super().__init__(session, request, received_at, self, options, traceparent)
        if kind is not None:
            self._counts = session.metrics.counts.calls[kind]
        self._encode = encode
        self.result = asyncio.get_running_loop().create_future()

    def encode(self, observation: Any, /) -> Any:
        """Return the reply."""
        return self._encode(observation)

    encode_state = encode

    def reply(self, reply: Any) -> None:
        """Set the result."""
        self.target = None  # a reference to itself, which would be left to the garbage collector
        if not self.result.done():  # or else the caller has gone
            self.result.set_result(reply)

    def refuse(self, error: Exception) -> None:
        """Set the error."""
        self.target = None
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
