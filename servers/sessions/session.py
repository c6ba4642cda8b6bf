"""One session: an environment, its owner, its slot, and a queue of calls, each with a deadline.

This is the one place where the methods of environments are called. `EnvironmentSession.submit` decides where: async
methods, and plain ones of a class with `BLOCKING = False`, on the event loop; all others in a thread of the pool. A
method in a thread cannot be stopped. When its caller disconnects or its deadline passes, the call is abandoned:
another thread replaces the one it occupies, the environment is closed once it returns, and `Executor.abandoned`
counts it until then.
"""

import asyncio
import inspect
import logging
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from functools import partial
from sys import float_info
from time import perf_counter
from types import CoroutineType, MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from openenv_core import Action, Environment, Observation, unscored_reason
from openenv_core.outcomes import SCORES, UNSCORED, is_plain
from openenv_core.pending import Pending
from openenv_core.protocol import frames
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import ReadState, Reset
from openenv_core.tools import is_tool_host
from openenv_core.tracing import served_span
from openenv_core.watchdog import Watchdog
from servers.execution import (
    CLOSE_TIMEOUT_S,
    FATAL,
    Executor,
    keep,
    outcome_of_awaitable,
    plan_of,
    wait_cancelled,
)
from servers.metrics import BUCKETS_S, RESET, STEP, CallCounts, ServerMetrics
from servers.sessions.queue import Slot
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.threads import Outcome, ThreadCall, ThreadPool, containable, outcome_of

logger = logging.getLogger("servers")

_AWAITED: Final = (Pending, CoroutineType)

MAX_WAITING: Final = 32
"""Calls that may wait for one session while another runs."""

Options: TypeAlias = Mapping[str, Any]

NO_OPTIONS: Final[Options] = MappingProxyType({})
_PLAIN_NUMBERS: Final = frozenset({float, int, bool})
_MAX: Final = float_info.max


class Phase(Enum):
    """Where a session is in its life.

    Attributes:
        OPEN: It takes calls.
        CLOSING: It takes calls, and ends when its WebSocket disconnects.
        ENDED: It takes no calls, and the table no longer finds it; its environment may be closing still.
    """

    OPEN = auto()
    CLOSING = auto()
    ENDED = auto()


ENDED: Final = Phase.ENDED
"""For speed: CPython 3.11 takes as long for a member of an enum as for two calls."""


class Attachment(Protocol):
    """A WebSocket, or what stands for it while it is broken, that uses a standing session."""

    async def detach(self) -> None:
        """Leave the session if the WebSocket is broken, since another client wants it."""


class EnvironmentCall(ThreadCall):
    """One call of an environment, from its submission to its outcome; subclasses take the outcome.

    Attributes:
        work: The function to call with `args`. If it returns a coroutine or a `Pending`, that is awaited on the event
            loop.
        on_loop: Whether to call it on the event loop, rather than in a thread.
        session: The session that it was submitted to.
        in_pool: Whether it waits for a thread or runs in one.
        is_timed: Whether the session's deadline runs for it.
        task: Awaits what `work` has returned; if that is a future, itself.
    """

    __slots__ = ("in_pool", "is_timed", "on_loop", "session", "task")

    session: "EnvironmentSession"

    def __init__(self, work: Callable[..., Any], on_loop: bool, args: tuple[Any, ...] = ()) -> None:
        self.work = work
        self.args = args
        self.on_loop = on_loop
        self.in_pool = self.is_timed = False
        self.task: asyncio.Future[Any] | None = None

    def settle(self, outcome: Outcome) -> None:
        """Take what a thread has returned."""
        self.session.settle(self, outcome)

    @abstractmethod
    def deliver(self, outcome: Outcome) -> None:
        """Take the outcome, on the event loop."""

    def discard(self, value: Any) -> None:
        """Take a result that came after the caller had gone."""


class ResultCall(EnvironmentCall):
    """A call whose caller awaits its `result`."""

    __slots__ = ()

    result: "asyncio.Future[Any]"

    def discard_result(self) -> bool:
        """Discard the result if the call had ended as its caller was cancelled; return whether it had."""
        if not self.result.done() or self.result.cancelled():
            return False
        if self.result.exception() is None:
            self.discard(self.result.result())
        return True


class AwaitedCall(ResultCall):
    """A call of a function whose caller awaits its `result`. `on_unclaimed` takes a result that nobody takes."""

    __slots__ = ("_on_unclaimed", "result")

    def __init__(
        self, work: Callable[[], Any], on_loop: bool, on_unclaimed: Callable[[Any], object] | None = None
    ) -> None:
        super().__init__(work, on_loop)
        self._on_unclaimed = on_unclaimed
        self.result = asyncio.get_running_loop().create_future()

    def deliver(self, outcome: Outcome) -> None:
        """Set `result`."""
        succeeded, value = outcome
        if self.result.done():  # the caller was cancelled
            if succeeded:
                self.discard(value)
        elif succeeded:
            self.result.set_result(value)
        else:
            self.result.set_exception(value)

    def discard(self, value: Any) -> None:
        """Pass the result to `on_unclaimed`."""
        if self._on_unclaimed is not None:
            self._on_unclaimed(value)


class RequestCall(EnvironmentCall):
    """A request of any dialect as a call of a session; the dialects differ in how they decode, encode and reply.

    Attributes:
        received_at: When the request came, by `perf_counter`; 0 if it is not to be counted.
        request_id: Its id, which its reply has too, in a dialect that has ids.
        counts: What it is counted in; None for a request other than a reset, step or call of a tool.
    """

    __slots__ = ("counts", "received_at", "request_id")

    encode: Callable[[Any, int | None], Any] = staticmethod(frames.encode_observation)
    """Returns the reply to a reset or step."""
    encode_state: Callable[[Any, int | None], Any] = staticmethod(frames.encode_state)
    """Returns the reply to any other request."""

    received_at: float
    request_id: int | None

    def bind(
        self,
        session: "EnvironmentSession",
        request: Any,
        options: Options = NO_OPTIONS,
        traceparent: str | None = None,
    ) -> None:
        """Make it the call of a session for what the dialect has decoded: an action, or a request of another kind.

        Args:
            session: The session.
            request: What the dialect has decoded.
            options: Options of a step beside the action.
            traceparent: W3C trace context of the client's span, if any.
        """
        self.in_pool = self.is_timed = False
        self.task = None
        self.args = ()
        self.counts: CallCounts | None = None
        kind = type(request)
        if kind is ReadState:
            self.work, self.on_loop = session.read_state, session.plan.on_loop
            return
        if kind is MethodRequest:
            self.work, self.args = session.invoke_method, request
            self.on_loop = session.is_on_loop(getattr(session.environment, request.name, None))
            return
        if kind is Reset:
            self.counts = session.metrics.counts.calls[RESET]
            self.work, self.args = session.invoke_reset, (request.options,)
            self.on_loop = session.plan.reset_on_loop
        else:
            self.counts = session.step_counts
            self.work, self.args = session.invoke_step, (request, options)
            self.on_loop = session.plan.step_on_loop
        if traceparent is not None:
            name = "reset" if kind is Reset else "step"
            span = partial(served_span, traceparent, name, session.metrics.environment)
            work = partial(self.work, *self.args)
            self.work, self.args = _work_traced, (session, span, self.received_at, work, self.on_loop)
            self.on_loop = True

    def deliver(self, outcome: Outcome) -> None:
        """Encode the outcome, count the call, and send the reply."""
        succeeded, value = outcome
        if not succeeded:
            self.refuse(value)
            return
        counts = self.counts
        try:
            encode = self.encode_state if counts is None else self.encode
            reply = encode(value, self.request_id)
        except FATAL as error:
            self.refuse(error)
            return
        if counts is not None and self.received_at:
            elapsed_s = perf_counter() - self.received_at
            counts.buckets[0 if elapsed_s < BUCKETS_S[0] else bisect_left(BUCKETS_S, elapsed_s)] += 1
            counts.seconds += elapsed_s
            counts.environment_s += self.session.spent_s
        self.reply(reply)

    @abstractmethod
    def reply(self, reply: Any, /) -> None:
        """Send the reply."""

    @abstractmethod
    def refuse(self, error: BaseException, /) -> None:
        """Answer with a refusal, or with what the environment raised."""


async def _work_traced(
    session: "EnvironmentSession",
    span: Callable[..., Any],
    received_at: float,
    work: Callable[[], Any],
    on_loop: bool,
) -> Any:
    with span(session, received_at or perf_counter()):
        return await session.run(work, on_loop)


class MethodRequest(NamedTuple):
    """A request to call a method of the environment other than `reset`, `step` and `state`.

    Attributes:
        name: Name of the method.
        args: Its arguments.
        wait: Awaits what it returns, if not plainly.
    """

    name: str
    args: tuple[Any, ...] = ()
    wait: Callable[[Any], Awaitable[Any]] | None = None


class _Table(Protocol):
    """The part of `SessionTable` that a session uses."""

    step_timeout_s: float | None
    metrics: ServerMetrics
    executor: Executor

    def expire(self, session: "EnvironmentSession") -> RefusalError:
        """End a session whose call exceeded its deadline; return the error for the call's caller."""


class EnvironmentSession:
    """One environment with an id and an owner, independent of the connection that it is used over.

    Args:
        table: The table that it is of.
        environment: The environment.
        pool: The threads that blocking methods run in.
        slot: Its slot.
        owner: Its owner.
        session_id: Its id.

    Attributes:
        environment: The environment, for the call that runs.
        plan: How to run its methods.
        name: Name of its class.
        concurrent: Whether its class allows several instances in one process.
        is_tool_host: Whether it has tools to list and call.
        spent_s: Seconds that the last reset or step spent in the environment, without the wait for a thread.
        unscored: Why the current episode cannot be scored, since a step of it could not; None if it can.
        metrics: Counts its calls.
        step_counts: Counts its steps.
        slot: Its slot, which may be released before its environment is closed.
        owner: Fingerprint of the token that opened it; empty if the server has no tokens.
        standing: Whether it lives until it is closed or idle for too long, rather than until the `with` block that
            opened it ends.
        id: Its id in the table, by which other clients may call it; empty if it was opened without one, until
            `SessionTable.assign_id`.
        phase: Where it is in its life.
        attachment: The WebSocket attached to a standing session.
        last_used_at: When its last call or attachment began or ended, by the event loop's clock; None before.
        listeners: Open requests beside its calls, such as streams; they keep it in use.
        on_end: Called once when it has ended.
    """

    def __init__(
        self,
        table: _Table,
        environment: Environment[Any, Any, Any],
        pool: ThreadPool,
        slot: Slot,
        owner: str,
        session_id: str,
    ) -> None:
        self.environment = environment
        self.plan = plan = plan_of(type(environment))
        self.name = type(environment).__name__
        self.concurrent = bool(getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.is_tool_host = is_tool_host(environment)
        self.spent_s = 0.0
        self.unscored: str | None = None
        self.metrics = table.metrics
        self.step_counts = table.metrics.counts.calls[STEP]
        self.slot = slot
        self.owner = owner
        self.id = session_id
        self.standing = bool(session_id)
        self.phase = Phase.OPEN
        self.attachment: Attachment | None = None
        self.last_used_at: float | None = None
        self.listeners = 0
        self.on_end: Callable[[], None] | None = None
        self._table = table
        self._executor = table.executor
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._observation_type: type | None = None  # of the last step
        self._call: EnvironmentCall | None = None
        self._waiting: deque[EnvironmentCall] = deque()
        self._idle: asyncio.Future[None] | None = None  # done when no call runs
        self._watchdog = Watchdog(table.step_timeout_s, self._expire)
        self._abandoned: set[EnvironmentCall] = set()  # still running
        self._on_free: list[Callable[[], None]] = []
        self._closing: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether it takes no further calls."""
        return self.phase is Phase.ENDED

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._call is not None

    @property
    def waiting_calls(self) -> int:
        """Number of calls that wait for others."""
        return len(self._waiting)

    def mark_used(self) -> None:
        """Record that it is used now."""
        self.last_used_at = asyncio.get_running_loop().time()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no call runs, but not longer than this."""
        if self._call is not None and timeout_s > 0:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=timeout_s)

    # Calls

    def submit(self, call: EnvironmentCall, *, nested: bool = False) -> None:
        """Run a call after those before it, with a deadline; it is told its outcome, perhaps before this returns.

        If it cannot be run, its outcome is a RefusalError: `SessionBusyError`, `UnknownSessionError` (the session has
        ended), or `DeadlineExceededError`.

        Args:
            call: The call.
            nested: It is part of the call that runs, and of its time.
        """
        if not nested:
            if self._call is not None or self.phase is ENDED:
                self._defer(call)
                return
            self._call = call
            if self.id:
                self.mark_used()
        call.session = self
        if not call.on_loop:
            call.in_pool = True
            self._pool.enqueue(call)
        else:
            try:
                outcome = True, call.work(*call.args)
            except BaseException as error:
                outcome = False, containable(error)
            kind = type(outcome[1])
            if kind is not Pending and kind is not CoroutineType:
                self._end(call, outcome)
                return
            self.settle(call, outcome)
        if call is self._call:
            call.is_timed = True
            self._watchdog.start()

    def _defer(self, call: EnvironmentCall) -> None:
        """Have a call wait for those before it, or refuse it."""
        if self.phase is Phase.ENDED:
            call.deliver((False, UnknownSessionError(self.id)))
        elif len(self._waiting) >= MAX_WAITING:
            call.deliver((False, SessionBusyError(len(self._waiting))))
        else:
            self._waiting.append(call)

    def settle(self, call: EnvironmentCall, outcome: Outcome) -> None:
        """End a call whose function has returned or raised; if it returned an awaitable, go on with that in a task."""
        call.in_pool = False
        succeeded, value = outcome
        if call in self._abandoned:
            self._executor.abandoned -= 1
            self._end_abandoned(call, outcome)
        elif succeeded and isinstance(value, _AWAITED):
            if isinstance(value, Pending) and isinstance(future := value.awaited, asyncio.Future):
                call.task = future  # a task for it would take longer than many a step
                future.add_done_callback(partial(self._end_future, call, value))
                return
            task = keep(asyncio.create_task(outcome_of_awaitable(value)))
            task.add_done_callback(partial(self._end_task, call))
            call.task = task
        else:
            self._end(call, outcome)

    def _end_future(
        self, call: EnvironmentCall, pending: Pending[Any], future: "asyncio.Future[Any]"
    ) -> None:
        if future.cancelled():
            outcome: Outcome = False, RuntimeError("the environment cancelled its own call")
        elif (error := future.exception()) is not None:
            outcome = False, containable(error)
        else:
            outcome = outcome_of(pending.finish, future.result())
        self._end_awaited(call, outcome)

    def _end_task(self, call: EnvironmentCall, task: asyncio.Task[Outcome]) -> None:
        cancelled = RuntimeError("the environment cancelled its own call")
        self._end_awaited(call, (False, cancelled) if task.cancelled() else task.result())

    def _end_awaited(self, call: EnvironmentCall, outcome: Outcome) -> None:
        call.task = None
        if call in self._abandoned:
            self._end_abandoned(call, outcome)
        else:
            self.settle(call, outcome)

    def _end(self, call: EnvironmentCall, outcome: Outcome) -> None:
        """Deliver the outcome of a call, and begin the next one."""
        if call is not self._call:  # it was part of a longer one
            call.deliver(outcome)
            return
        self._call = None
        if call.is_timed:
            self._watchdog.stop()
        if self.id:
            self.mark_used()
        try:
            call.deliver(outcome)
        finally:
            if self._waiting or self._idle is not None:
                self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next call; if there is none, end the wait for an idle session."""
        while self._waiting and self._call is None:
            call = self._waiting.popleft()
            self.submit(call)
        if self._idle is not None and self._call is None and not self._idle.done():
            self._idle.set_result(None)

    async def perform(self, call: ResultCall) -> Any:
        """Submit a call and return its result.

        Where other clients may call the session, a call continues after its caller has disconnected.

        Raises:
            RefusalError: As the outcomes of `submit`.
            Exception: Whatever the environment raised.
        """
        self.submit(call)
        try:
            return await call.result
        except asyncio.CancelledError:
            if call.discard_result():
                raise
            self.leave(call)
            if call is self._call and not self.id:
                task = call.task
                self._abandon(call)
                if task is not None:
                    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
            raise

    async def run(self, work: Callable[[], Any], on_loop: bool) -> Any:
        """Run a function as part of a longer call; return its result, or that of an awaitable that it returned.

        Raises:
            Exception: Whatever the environment raised.
        """
        call = AwaitedCall(work, on_loop)
        self.submit(call, nested=True)
        try:
            return await call.result
        except asyncio.CancelledError:
            if not call.discard_result():
                self._abandon(call)
            raise

    def leave(self, call: EnvironmentCall) -> None:
        """Drop a call that waits for others, since its caller has gone; one that runs continues."""
        if call in self._waiting:
            self._waiting.remove(call)

    def withdraw(self, call: EnvironmentCall) -> bool:
        """Withdraw a call that has not started; return whether it had not."""
        if call is self._call:
            if not call.in_pool or self._pool.abort(call, replace=False):
                return False
            self._call = None
            self._watchdog.stop()
            self._begin_next()
            return True
        if call in self._waiting:
            self._waiting.remove(call)
            return True
        return False

    def _expire(self) -> None:
        """End the session, since its call has exceeded its deadline."""
        if self._call is not None:
            self.abandon_calls(self._table.expire(self))

    def abandon_calls(self, refusal: RefusalError) -> None:
        """End the running call, if any, with an error, and refuse those that wait; only when the session has ended."""
        assert self.ended
        self._watchdog.close()
        call, self._call = self._call, None
        if call is not None:
            self._abandon(call)
            call.deliver((False, refusal))
        self._begin_next()

    def _abandon(self, call: EnvironmentCall) -> None:
        """End a call that nobody waits for any more.

        One that waits for a thread is dropped. One that runs is cancelled, if it can be; the environment is closed once
        it has ended.
        """
        if call in self._abandoned:
            return
        if call.task is not None:
            call.task.cancel()
            self._abandoned.add(call)
        elif call.in_pool and self._executor.abort(call, self._pool):
            self._abandoned.add(call)

    def _end_abandoned(self, call: EnvironmentCall, outcome: Outcome) -> None:
        succeeded, value = outcome
        if succeeded and isinstance(value, _AWAITED):
            value.close()
        elif succeeded:
            call.discard(value)
        self._abandoned.discard(call)
        if self._abandoned:
            return
        if self._closing is None:
            self.discard()
        else:  # it was `close` itself
            self._executor.close_pool(self._pool)
        callbacks, self._on_free = self._on_free, []
        for callback in callbacks:
            self.on_free(callback)

    # The methods of the environment

    def invoke_reset(self, options: Options) -> Any:
        """Start an episode, with those options that the environment accepts.

        Called on the event loop or in a thread, as `submit` decides. Returns what `reset` returned: an observation, or
        a `Pending` to await.
        """
        result = self._call_timed(self._reset, **self.plan.reset_options.accept(options))
        return self._then(result, self._begin_episode)

    def invoke_step(self, action: Action, options: Options = NO_OPTIONS) -> Any:
        """Apply an action, with those options that the environment accepts; as `invoke_reset`."""
        started_at = perf_counter()  # `_call_timed`, inlined for speed
        try:
            result = (
                self._step(action, **self.plan.step_options.accept(options))
                if options
                else self._step(action)
            )
        finally:
            self.spent_s = perf_counter() - started_at
        if type(result) is not self._observation_type:  # for speed: `isinstance` of a model is slow
            if isinstance(result, asyncio.Future) or not isinstance(result, Observation):
                return self._then(result, self._check_and_mark)
            self._observation_type = type(result)
        reward = result.reward
        if (
            self.unscored is None
            and type(reward) in _PLAIN_NUMBERS
            and SCORES not in result.metadata
            and -_MAX <= reward <= _MAX
        ):
            return result  # `unscored_reason` would find nothing
        return self._mark_unscored(result)

    def _call_timed(self, method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        started_at = perf_counter()
        try:
            return method(*args, **options)
        finally:
            self.spent_s = perf_counter() - started_at

    def _then(
        self,
        result: Any,
        then: Callable[[object], Any],
        wait: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """Go on with what a method has returned that is no observation; an awaitable is awaited first."""
        if not isinstance(result, asyncio.Future) and not inspect.isawaitable(result):
            return then(result)
        spent_s, awaited_at = self.spent_s, perf_counter()

        def finish(observation: object) -> Any:
            self.spent_s = spent_s + perf_counter() - awaited_at
            return then(observation)

        return Pending(result, finish, wait=wait)

    def _begin_episode(self, observation: object) -> Any:
        """Return the observation of a reset, as `_mark_unscored` returns a step's."""
        self.unscored = None
        return self._check_and_mark(observation)

    def _check_and_mark(self, observation: object) -> Any:
        # Encoding anything else raises the error.
        is_observation = Observation in type(observation).__mro__
        return self._mark_unscored(observation) if is_observation else observation  # type: ignore[arg-type]

    def _mark_unscored(self, observation: Observation) -> Observation:
        """Return an observation as it is sent: without a reward and with the reason if its episode cannot be scored.

        From the first such observation on, this holds to the end of the episode: the rewards that are left would add up
        to a wrong number.
        """
        if self.unscored is None:
            if is_plain(observation):
                return observation
            self.unscored = unscored_reason(observation)
        if (reason := self.unscored) is None:
            return observation
        if observation.done:
            self.unscored = None  # some environments go on without a reset
        metadata = {**observation.metadata, UNSCORED: reason}
        return observation.model_copy(update={"reward": None, "metadata": metadata})

    def read_state(self) -> Any:
        """Read the environment's state; as `invoke_reset`."""
        return self.environment.state

    def invoke_method(
        self, name: str, args: tuple[Any, ...], wait: Callable[[Any], Awaitable[Any]] | None = None
    ) -> Any:
        """Call another method of the environment; as `invoke_reset`. `wait` awaits what it returns, if not plainly.

        Raises:
            AttributeError: The environment has no such method.
        """
        result = self._call_timed(getattr(self.environment, name), *args)
        return self._then(result, lambda value: value, wait)

    def is_on_loop(self, method: object) -> bool:
        """Whether a method runs on the event loop."""
        return self.plan.on_loop or inspect.iscoroutinefunction(method)

    def has_method(self, name: str) -> bool:
        """Whether the environment has a method of that name; True once it is closed, when every call is refused."""
        return self.environment is None or callable(getattr(self.environment, name, None))

    # Closing

    async def close_environment(self) -> None:
        """Close the environment; if an abandoned call runs on in it, that closes it at its end.

        Closing continues even if the caller is cancelled.
        """
        if tasks := [call.task for call in self._abandoned if call.task is not None]:
            await wait_cancelled(tasks)
        self.discard()
        if self._closing is not None:
            # Twice its own time limit: a `close` that ignores its cancellation, or still waits for a thread, continues
            # in the background.
            await asyncio.wait([self._closing], timeout=2 * CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        close = getattr(self.environment, self.plan.close, lambda: None)
        on_loop = self.is_on_loop(close)
        try:
            # The time limit starts once `close` runs: while it waits for a thread, it does not hang itself.
            async with asyncio.timeout(CLOSE_TIMEOUT_S if on_loop else None) as deadline:

                def start_deadline() -> None:
                    if self._closing is not None and not self._closing.done() and deadline.when() is None:
                        deadline.reschedule(loop.time() + CLOSE_TIMEOUT_S)

                def close_timed() -> Any:
                    if not on_loop:
                        loop.call_soon_threadsafe(start_deadline)
                    return pending_or_plain(close())

                await self.run(close_timed, on_loop)
        except FATAL:
            logger.exception("closing %s failed", self.name)
        if not self._abandoned:
            self._executor.close_pool(self._pool)
        # References to a session that is over, to its number for instance, must not keep its environment alive.
        self.environment = self._reset = self._step = None  # type: ignore[assignment]  # never called again

    def discard(self) -> None:
        """Close the environment once, in the background; if an abandoned call runs in it, that closes it at its end."""
        if self._closing is None and not self._abandoned:
            self._closing = keep(asyncio.create_task(self._close()))

    def on_free(self, callback: Callable[[], None]) -> None:
        """Call `callback` when no abandoned call runs and the environment is not closing; possibly at once."""
        if self._abandoned:
            self._on_free.append(callback)
        elif self._closing is not None and not self._closing.done():
            self._closing.add_done_callback(lambda _: self.on_free(callback))
        else:
            callback()


def pending_or_plain(result: Any) -> Any:
    """Return what an arbitrary method has returned, an awaitable as a `Pending`."""
    return Pending(result) if inspect.isawaitable(result) else result
