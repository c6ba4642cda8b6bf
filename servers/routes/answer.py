"""Requests of every dialect: a decoded request becomes a call of a session, and its outcome a reply."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias

from openenv_core.protocol.requests import ReadState, Reset
from openenv_core.tracing import served_span
from servers.execution import FATAL, EnvironmentCall, EnvironmentRunner
from servers.metrics import BUCKETS_S, RESET, STEP, CallCounts, ServerMetrics
from servers.sessions import EnvironmentSession
from servers.threads import Outcome

Options: TypeAlias = Mapping[str, Any]

_NO_OPTIONS: Options = MappingProxyType({})


class RequestCall(EnvironmentCall):
    """A reset, a step or a read of the state; the dialects differ in `encode` and `target` only.

    Args:
        session: The session to call.
        request: What the dialect has decoded: a reset, a read of the state, or an action.
        metrics: Counts the call.
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
        metrics: ServerMetrics,
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
        if kind is Reset:
            self._counts = metrics.counts.calls[RESET]
            self.work, self.on_loop = partial(runner.invoke_reset, request.options), plan.reset_on_loop
        else:
            self._counts = metrics.counts.calls[STEP]
            self.work, self.on_loop = partial(runner.invoke_step, request, options), plan.step_on_loop
        if traceparent is not None:
            span = partial(
                served_span, traceparent, "reset" if kind is Reset else "step", metrics.environment
            )
            self.work, self.on_loop = partial(self._work_traced, span, runner, request, options), True

    async def _work_traced(
        self, span: Callable[..., Any], runner: EnvironmentRunner, request: Any, options: Options
    ) -> Any:
        with span(runner, self._received_at or perf_counter()):
            if isinstance(request, Reset):
                return await runner.reset(request.options)
            return await runner.step(request, options)

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
