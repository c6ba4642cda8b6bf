"""Runs the methods of environments, on the event loop or in threads of a bounded pool.

- Async methods run on the event loop.
- Plain methods of a class with `BLOCKING = False` run on the event loop too, called directly.
- Everything else, constructors included, runs in a thread.

A method in a thread cannot be stopped. When its caller disconnects or its deadline passes, the call is abandoned:
another thread replaces the one it occupies, the environment is closed once it returns, and `Executor.abandoned`
counts it until then.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from sys import float_info
from time import perf_counter
from types import CoroutineType, MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from openenv_core import Action, Environment, Observation, unscored_reason
from openenv_core.outcomes import SCORES, UNSCORED
from openenv_core.pending import Pending
from openenv_core.tools import is_tool_host
from servers.threads import Outcome, ThreadCall, ThreadPool, contain, containable, max_threads, outcome_of

logger = logging.getLogger("servers")

Factory: TypeAlias = Callable[[], Environment[Any, Any, Any]]

T = TypeVar("T")

_MIN_THREADS: Final = 4
"""Even a server of one session needs a second thread, for calls over plain HTTP and for closing."""

_MAX_ABANDONED: Final = 64
"""Threads that abandoned calls may occupy before the server refuses new sessions."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that an environment has to close, or an async method to end once cancelled."""

_PLAIN_NUMBERS: Final = frozenset({float, int, bool})
_MAX: Final = float_info.max

_AWAITED: Final = (Pending, CoroutineType)

FATAL: Final = (Exception, SystemExit)
"""What an environment may raise without stopping the server."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that a method accepts.

    Attributes:
        names: Their names; None for any.
        excluded: Parameters that are not options (self, the action).
    """

    names: frozenset[str] | None
    excluded: frozenset[str]

    def accept(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those of `options` that the method accepts."""
        if self.names is None:
            return {name: value for name, value in options.items() if name not in self.excluded}
        return {name: value for name, value in options.items() if name in self.names}


@dataclass(frozen=True, slots=True)
class _EnvironmentMethods:
    """The methods of an environment class and how to run them, determined once per class.

    Attributes:
        on_loop: Whether plain methods run on the event loop.
        reset: Name of the method that resets: `reset` or `reset_async`.
        step: Likewise.
        close: Likewise.
        reset_on_loop: Whether `reset` is called on the event loop: it is a coroutine function, or the class says so.
        step_on_loop: Likewise.
        never_waits: Whether reset and step are plain methods on the event loop.
        reset_options: Options that `reset` accepts.
        step_options: Options that `step` accepts beside the action.
    """

    on_loop: bool
    reset: str
    step: str
    close: str
    reset_on_loop: bool
    step_on_loop: bool
    never_waits: bool
    reset_options: _Options
    step_options: _Options


@lru_cache(maxsize=256)
def plan_of(cls: type) -> _EnvironmentMethods:
    """Determine how to run the methods of an environment class."""
    reset, step, close = (
        f"{name}_async" if hasattr(cls, f"{name}_async") else name for name in ("reset", "step", "close")
    )
    reset_async, step_async = (inspect.iscoroutinefunction(getattr(cls, name)) for name in (reset, step))
    on_loop = not getattr(cls, "BLOCKING", True)
    return _EnvironmentMethods(
        on_loop=on_loop,
        reset=reset,
        step=step,
        close=close,
        reset_on_loop=on_loop or reset_async,
        step_on_loop=on_loop or step_async,
        never_waits=on_loop and not reset_async and not step_async,
        reset_options=_options_of(getattr(cls, reset), skip=1),
        step_options=_options_of(getattr(cls, step), skip=2),
    )


def _options_of(method: Callable[..., Any], skip: int) -> _Options:
    parameters = list(inspect.signature(method).parameters.values())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    excluded = frozenset(p.name for p in parameters[:skip] if p.kind not in variadic)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _Options(None, excluded)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Options(frozenset(p.name for p in parameters[skip:] if p.kind in by_name), excluded)


def _is_environment(value: object) -> bool:
    """Whether a value can be served: it needs `reset` and `step`, but not our base class."""
    return hasattr(type(value), "reset") and hasattr(type(value), "step")


def name_of(factory: Callable[..., Any]) -> str:
    """Return the name of an environment's class or factory."""
    return str(getattr(factory, "__name__", type(factory).__name__))


class EnvironmentCall:
    """One call of an environment, from its submission to its outcome; subclasses take the outcome.

    Args:
        work: The function to call. If it returns a coroutine or a `Pending`, that is awaited on the event loop.
        on_loop: Whether to call it on the event loop, rather than in a thread.

    Attributes:
        on_end: Called with the call and its outcome when it has ended: by whom it was started.
        thread_call: The call in a thread, while it waits for one or runs in it.
        task: Awaits what `work` has returned; if that is a future, itself.
        was_awaited: Whether there has been such a task.
    """

    __slots__ = ("on_end", "on_loop", "task", "thread_call", "was_awaited", "work")

    def __init__(self, work: Callable[[], Any], on_loop: bool) -> None:
        self.work = work
        self.on_loop = on_loop
        self.on_end: Callable[[EnvironmentCall, Outcome], None] = _deliver
        self.thread_call: ThreadCall | None = None
        self.task: asyncio.Future[Any] | None = None
        self.was_awaited = False

    def deliver(self, outcome: Outcome) -> None:
        """Take the outcome, on the event loop."""
        raise NotImplementedError

    def discard(self, value: Any) -> None:
        """Take a result that came after the caller had gone."""


def _deliver(call: EnvironmentCall, outcome: Outcome) -> None:
    call.deliver(outcome)


class ResultCall(EnvironmentCall):
    """A call whose caller awaits its `result`."""

    __slots__ = ()

    result: asyncio.Future[Any]

    def discard_result(self) -> bool:
        """Discard the result if the call had ended as its caller was cancelled; return whether it had."""
        if not self.result.done() or self.result.cancelled():
            return False
        if self.result.exception() is None:
            self.discard(self.result.result())
        return True


class AwaitedCall(ResultCall):
    """A call whose caller awaits its `result`. `on_unclaimed` is called with a result that nobody takes."""

    __slots__ = ("_on_unclaimed", "result")

    def __init__(
        self, work: Callable[[], Any], on_loop: bool, on_unclaimed: Callable[[Any], None] | None = None
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


def pending_or_plain(result: Any) -> Any:
    """Return what an arbitrary method has returned, an awaitable as a `Pending`."""
    return Pending(result) if inspect.isawaitable(result) else result


async def _outcome_of_awaitable(awaitable: Awaitable[Any]) -> Outcome:
    try:
        return True, await awaitable
    except FATAL as error:  # a SystemExit raised in a task would stop the event loop
        return False, error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return False, contain(error)  # the environment raised it
    except BaseException as error:
        return False, contain(error)


class Executor:
    """The threads that all sessions of an app share.

    Args:
        sessions: The cap on sessions, which bounds how many threads are useful.

    Attributes:
        pool: The threads.
        abandoned: Abandoned calls that still occupy a thread.
        limit: Number of abandoned calls at which new sessions are refused.
    """

    def __init__(self, sessions: int) -> None:
        self.pool = ThreadPool(min(max_threads(), max(_MIN_THREADS, 2 * sessions)))
        self.abandoned = 0
        self.limit = _MAX_ABANDONED

    @property
    def is_exhausted(self) -> bool:
        """Whether abandoned calls have reached their limit."""
        return self.abandoned >= self.limit

    def close(self) -> None:
        """Let the threads end after the calls already queued."""
        self.pool.close()

    async def construct(self, factory: Factory) -> "EnvironmentRunner":
        """Construct an environment, on the event loop or in a thread. Exception: Whatever the factory raised."""
        pool = self.pool
        if isinstance(factory, type) and not getattr(factory, "BLOCKING", True):
            succeeded, value = outcome_of(factory)
        else:
            if getattr(factory, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
                pool = ThreadPool(1)
            built: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            call = pool.submit(factory, lambda outcome: self._take_built(built, outcome, pool))
            try:
                succeeded, value = await built
            except asyncio.CancelledError:
                if not built.cancelled():
                    self._reject(built.result(), pool)
                elif not self.abort(call, pool):
                    self.close_pool(pool)
                raise
        if succeeded and _is_environment(value):
            return EnvironmentRunner(value, self, pool)
        self.close_pool(pool)
        if succeeded:
            raise TypeError(
                f"expected an environment with reset and step, got {type(value).__name__}; "
                "give create_app a class, or a function that returns an instance"
            )
        raise value

    def _take_built(self, built: "asyncio.Future[Outcome]", outcome: Outcome, pool: ThreadPool) -> None:
        if not built.cancelled():
            built.set_result(outcome)
            return
        self.abandoned -= 1
        self._reject(outcome, pool)

    def close_pool(self, pool: ThreadPool) -> None:
        """Let the threads of a pool end, unless it is the shared one."""
        if pool is not self.pool:
            pool.close()

    def abort(self, call: ThreadCall, pool: ThreadPool) -> bool:
        """Abandon a call in a thread, which another one replaces; return whether it occupies one, and is counted.

        An environment's own single thread is not replaced, since the environment has to be closed in it.
        """
        if not pool.abort(call, replace=pool is self.pool):
            return False
        self.abandoned += 1
        if self.abandoned == self.limit:
            logger.error("%d abandoned calls hold a thread each; new sessions are refused", self.abandoned)
        return True

    def _reject(self, outcome: Outcome, pool: ThreadPool) -> None:
        """Close the environment, if any, of a constructor whose caller was cancelled."""
        succeeded, value = outcome
        if succeeded and _is_environment(value):
            EnvironmentRunner(value, self, pool).discard()
        else:
            self.close_pool(pool)


class EnvironmentRunner:
    """Runs the methods of one environment, one call at a time.

    `start` takes every call and decides, at this one place, whether it runs on the event loop or in a thread.
    `invoke_reset`, `invoke_step`, `read_state` and `invoke_method` are the one place where an environment is called.

    Attributes:
        environment: The environment itself, for the call that runs.
        plan: How to run its methods.
        name: Name of its class.
        concurrent: Whether its class allows several instances in one process.
        is_tool_host: Whether it has tools to list and call.
        spent_s: Seconds that the last reset or step spent in the environment, without the wait for a thread.
        unscored: Why the current episode cannot be scored, since a step of it could not; None if it can.
    """

    def __init__(self, environment: Environment[Any, Any, Any], executor: Executor, pool: ThreadPool) -> None:
        self.plan = plan = plan_of(type(environment))
        self.name = type(environment).__name__
        self.concurrent = bool(getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.is_tool_host = is_tool_host(environment)
        self.environment = environment
        self.spent_s = 0.0
        self.unscored: str | None = None
        self._executor = executor
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._abandoned: set[EnvironmentCall] = set()  # still running
        self._on_free: list[Callable[[], None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._observation_type: type | None = None  # of the last step

    # Running calls

    def start(self, call: EnvironmentCall, on_end: Callable[[EnvironmentCall, Outcome], None]) -> None:
        """Run a call, on the event loop or in a thread; `on_end` is called when it ends, which may be before this."""
        call.on_end = on_end
        if not call.on_loop:
            call.thread_call = self._pool.submit(call.work, partial(self._settle, call))
            return
        try:
            outcome = True, call.work()
        except BaseException as error:
            outcome = False, containable(error)
        kind = type(outcome[1])
        if kind is Pending or kind is CoroutineType:
            self._settle(call, outcome)
        else:
            on_end(call, outcome)

    def _settle(self, call: EnvironmentCall, outcome: Outcome) -> None:
        """End a call whose function has returned or raised; if it returned an awaitable, go on with that in a task."""
        call.thread_call = None
        succeeded, value = outcome
        if self._abandoned and call in self._abandoned:
            self._executor.abandoned -= 1
            self._end_abandoned(call, outcome)
        elif succeeded and isinstance(value, _AWAITED):
            call.was_awaited = True
            if isinstance(value, Pending) and isinstance(future := value.awaited, asyncio.Future):
                call.task = future  # a task for it would take longer than many a step
                future.add_done_callback(partial(self._end_future, call, value))
                return
            task = keep(asyncio.create_task(_outcome_of_awaitable(value)))
            task.add_done_callback(partial(self._end_task, call))
            call.task = task
        else:
            call.on_end(call, outcome)

    def _end_future(
        self, call: EnvironmentCall, pending: Pending[Any], future: "asyncio.Future[Any]"
    ) -> None:
        if future.cancelled():
            outcome: Outcome = False, RuntimeError("the environment cancelled its own call")
        elif (error := future.exception()) is not None:
            outcome = False, containable(error)
        else:
            outcome = outcome_of(partial(pending.finish, future.result()))
        self._end_awaited(call, outcome)

    def _end_task(self, call: EnvironmentCall, task: asyncio.Task[Outcome]) -> None:
        cancelled = RuntimeError("the environment cancelled its own call")
        self._end_awaited(call, (False, cancelled) if task.cancelled() else task.result())

    def _end_awaited(self, call: EnvironmentCall, outcome: Outcome) -> None:
        call.task = None
        if call in self._abandoned:
            self._end_abandoned(call, outcome)
        else:
            self._settle(call, outcome)

    def abandon(self, call: EnvironmentCall) -> None:
        """End a call that nobody waits for any more.

        One that waits for a thread is dropped. One that runs is cancelled, if it can be; the environment is closed once
        it has ended.
        """
        if call in self._abandoned:
            return
        if call.task is not None:
            call.task.cancel()
            self._abandoned.add(call)
        elif call.thread_call is not None and self._executor.abort(call.thread_call, self._pool):
            self._abandoned.add(call)

    def drop_unstarted(self, call: EnvironmentCall) -> bool:
        """Drop a call if it still waits for a thread; return whether it did."""
        return call.thread_call is not None and not self._pool.abort(call.thread_call, replace=False)

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

    async def run(self, work: Callable[[], Any], on_loop: bool) -> Any:
        """Run a function as part of a longer call; return its result, or that of an awaitable that it returned.

        Raises:
            Exception: Whatever the environment raised.
        """
        call = AwaitedCall(work, on_loop)
        self.start(call, _deliver)
        try:
            return await call.result
        except asyncio.CancelledError:
            if not call.discard_result():
                self.abandon(call)
            raise

    # The methods of the environment

    def invoke_reset(self, options: Mapping[str, Any]) -> Any:
        """Start an episode, with those options that the environment accepts.

        Called on the event loop or in a thread, as `start` decides. Returns what `reset` returned: an observation, or a
        `Pending` to await.
        """
        options = self.plan.reset_options.accept(options)
        started_at = perf_counter()
        try:
            result = self._reset(**options)
        finally:
            self.spent_s = perf_counter() - started_at
        return self._then(result, self._begin_episode)

    def invoke_step(self, action: Action, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Apply an action, with those options that the environment accepts; as `invoke_reset`."""
        started_at = perf_counter()
        try:
            result = (
                self._step(action, **self.plan.step_options.accept(options))
                if options
                else self._step(action)
            )
        finally:
            self.spent_s = perf_counter() - started_at
        if type(result) is self._observation_type or isinstance(result, Observation):
            self._observation_type = type(result)  # `isinstance` of a model takes as long as a short step
            observation: Any = result
            return self._mark_unscored(observation)
        return self._then(result, self._check_and_mark)

    def _then(
        self,
        result: Any,
        then: Callable[[object], Any],
        wait: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """Go on with what a method has returned that is no observation; an awaitable is awaited first."""
        if not inspect.isawaitable(result):
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
        return self._mark_unscored(observation) if isinstance(observation, Observation) else observation

    def _mark_unscored(self, observation: Observation) -> Observation:
        """Return an observation as it is sent: without a reward and with the reason if its episode cannot be scored.

        From the first such observation on, this holds to the end of the episode: the rewards that are left would add up
        to a wrong number.
        """
        reward: Any = observation.reward
        if self.unscored is None:
            if (
                type(reward) in _PLAIN_NUMBERS
                and SCORES not in observation.metadata
                and -_MAX <= reward <= _MAX
            ):
                return observation  # `unscored_reason` would find nothing
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
        started_at = perf_counter()
        try:
            result = getattr(self.environment, name)(*args)
        finally:
            self.spent_s = perf_counter() - started_at
        return self._then(result, lambda value: value, wait)

    def is_on_loop(self, method: object) -> bool:
        """Whether a method runs on the event loop."""
        return self.plan.on_loop or inspect.iscoroutinefunction(method)

    def has_method(self, name: str) -> bool:
        """Whether the environment has a method of that name; True once it is closed, when every call is refused."""
        return self.environment is None or callable(getattr(self.environment, name, None))

    @property
    def forkable(self) -> bool:
        """Whether the environment declares that its snapshots can be restored in others."""
        return getattr(self.environment, "FORKABLE", False) is True

    # Closing

    async def close(self) -> None:
        """Close the environment; if an abandoned call runs on in it, that closes it at its end.

        Closing continues even if the caller is cancelled.
        """
        if tasks := [call.task for call in self._abandoned if call.task is not None]:
            _, deaf = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in deaf:
                logger.error(
                    "%s ignored its cancellation for %g s; its session keeps its slot", task, CLOSE_TIMEOUT_S
                )
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


_background_tasks: set[asyncio.Task[Any]] = set()
"""Background tasks. The event loop itself holds only weak references to tasks."""


def keep(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Hold a reference to a background task until it ends; return the task."""
    _background_tasks.add(task)
    task.add_done_callback(_background_tasks.discard)
    return task


async def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; log one that ignores the cancellation, and let it run on."""
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
    if not task.done():
        logger.error(
            "%s ignored its cancellation for %g s; its session keeps its slot", task, CLOSE_TIMEOUT_S
        )
        keep(task)
