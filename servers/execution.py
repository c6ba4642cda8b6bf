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
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from sys import float_info
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from openenv_core import Action, Environment, Observation, State, unscored_reason
from openenv_core.outcomes import SCORES, UNSCORED
from openenv_core.tools import is_tool_host
from servers.threads import Outcome, ThreadCall, ThreadPool, contain, max_threads, outcome_of

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
_GREATEST_FLOAT: Final = float_info.max

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
        inline: Whether every method runs on the event loop and returns without waiting.
        on_loop: Whether plain methods run on the event loop.
        reset: Name of the method that resets: `reset` or `reset_async`.
        step: Likewise.
        close: Likewise.
        reset_async: Whether `reset` is a coroutine function.
        step_async: Likewise.
        reset_options: Options that `reset` accepts.
        step_options: Options that `step` accepts beside the action.
    """

    inline: bool
    on_loop: bool
    reset: str
    step: str
    close: str
    reset_async: bool
    step_async: bool
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
    # Environments with declared tools say whether any of these is asynchronous. For others, an async `call_tool` means
    # that a step may wait.
    may_wait = getattr(cls, "STEPS_MAY_WAIT", inspect.iscoroutinefunction(getattr(cls, "call_tool", None)))
    return _EnvironmentMethods(
        inline=on_loop and not reset_async and not step_async and not may_wait,
        on_loop=on_loop,
        reset=reset,
        step=step,
        close=close,
        reset_async=reset_async,
        step_async=step_async,
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
            call = pool.submit(factory)
            try:
                succeeded, value = await call.waiter
            except asyncio.CancelledError:
                if call.outcome is not None:
                    self._reject(call.outcome, pool)
                elif not self.abort(call, pool, lambda outcome: self._reject(outcome, pool)):
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

    def close_pool(self, pool: ThreadPool) -> None:
        """Let the threads of a pool end, unless it is the shared one."""
        if pool is not self.pool:
            pool.close()

    def abort(self, call: ThreadCall, pool: ThreadPool, on_end: Callable[[Outcome], None]) -> bool:
        """Abandon a call that has no outcome yet.

        An environment's own single thread is not replaced, since the environment has to be closed in it.

        Args:
            call: The call.
            pool: Its pool.
            on_end: Called with the outcome once the call ends, if it occupies a thread.

        Returns:
            Whether the call occupies a thread.
        """
        if not pool.abort(call, replace=pool is self.pool):
            return False

        def on_outcome(outcome: Outcome) -> None:
            self.abandoned -= 1
            on_end(outcome)

        self.abandoned += 1
        if self.abandoned == self.limit:
            logger.error("%d abandoned calls hold a thread each; new sessions are refused", self.abandoned)
        call.on_outcome = on_outcome
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

    Methods that call the environment raise whatever it raises.

    Attributes:
        environment: The environment itself, for the holder of the session's lock.
        plan: How to run its methods.
        name: Name of its class.
        in_thread: Whether reset and step are plain methods that run in a thread.
        concurrent: Whether its class allows several instances in one process.
        spent_s: Seconds that the last call spent in the environment, without the wait for a thread.
        unscored: Why the current episode cannot be scored, since a step of it could not; None if it can.
    """

    def __init__(self, environment: Environment[Any, Any, Any], executor: Executor, pool: ThreadPool) -> None:
        self.plan = plan = plan_of(type(environment))
        self.name = type(environment).__name__
        self.in_thread = not (plan.on_loop or plan.step_async or plan.reset_async)
        self.concurrent = bool(getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.environment = environment
        self._executor = executor
        self.spent_s = 0.0
        self.unscored: str | None = None
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._abandoned: ThreadCall | None = None
        self._closing: asyncio.Task[None] | None = None

    async def reset(
        self,
        options: Mapping[str, Any],
        *,
        inline: bool = False,
        resume: Callable[[Outcome], None] | None = None,
    ) -> Observation:
        """Start an episode, with those options that the environment accepts. `inline` and `resume`: see `_run`."""
        return self._begin_episode(
            await self._run(
                self._reset, options=self.plan.reset_options.accept(options), inline=inline, resume=resume
            )
        )

    def reset_inline(self, options: Mapping[str, Any]) -> Observation | Coroutine[Any, Any, Observation]:
        """Start an episode in the calling thread; return a coroutine to await if the environment's method is async."""
        result = self._call(self._reset, **self.plan.reset_options.accept(options))
        return self._mark_inline(self._begin_episode, result)

    def step_inline(self, action: Action) -> Observation | Coroutine[Any, Any, Observation]:
        """Apply an action in the calling thread; return a coroutine to await if the environment's method is async."""
        return self._mark_inline(self._mark_unscored, self._call(self._step, action))

    def _mark_inline(
        self, mark: Callable[[object], Observation], result: Any
    ) -> Observation | Coroutine[Any, Any, Observation]:
        return mark(result) if isinstance(result, Observation) else self._finish_and_mark(mark, result)

    async def _finish_and_mark(self, mark: Callable[[object], Observation], result: Any) -> Observation:
        return mark(await self._finish(result, inline=True))

    async def step(
        self,
        action: Action,
        options: Mapping[str, Any] | None = None,
        *,
        inline: bool = False,
        resume: Callable[[Outcome], None] | None = None,
    ) -> Observation:
        """Apply an action. With `inline`, in the calling thread and without options; `resume`: see `_run`."""
        plan = self.plan
        if inline or (plan.inline and not options):
            observation = self.step_inline(action)
            return observation if isinstance(observation, Observation) else await observation
        return self._mark_unscored(
            await self._run(
                self._step,
                (action,),
                plan.step_options.accept(options) if options else {},
                on_loop=plan.on_loop or plan.step_async,
                resume=resume,
            )
        )

    def _begin_episode(self, observation: object) -> Observation:
        """Return the observation of a reset, as `_mark_unscored` returns a step's."""
        self.unscored = None
        return self._mark_unscored(observation)

    def _mark_unscored(self, observation: object) -> Observation:
        """Return an observation as it is sent: without a reward and with the reason if its episode cannot be scored.

        From the first such observation on, this holds to the end of the episode: the rewards that are left would add up
        to a wrong number.
        """
        if not isinstance(observation, Observation):
            return observation  # type: ignore[return-value]  # encoding it raises the error
        if self.unscored is None and not _is_plain(observation):
            self.unscored = unscored_reason(observation)
        if (reason := self.unscored) is None:
            return observation
        if observation.done:
            self.unscored = None  # some environments go on without a reset
        metadata = {**observation.metadata, UNSCORED: reason}
        return observation.model_copy(update={"reward": None, "metadata": metadata})

    async def state(self, *, inline: bool = False, resume: Callable[[Outcome], None] | None = None) -> State:
        """Read the environment's state. `inline` and `resume`: see `_run`."""
        return await self._run(  # type: ignore[no-any-return]
            lambda: self.environment.state, inline=inline, resume=resume
        )

    async def call(self, name: str, *args: Any, on_unclaimed: Callable[[Any], None] | None = None) -> Any:
        """Run another method of the environment.

        Args:
            name: Name of the method.
            *args: Its arguments.
            on_unclaimed: Called on the event loop with the result of a method in a thread whose caller was cancelled.

        Raises:
            AttributeError: The environment has no such method.
        """
        return await self._run(getattr(self.environment, name), args, on_unclaimed=on_unclaimed)

    async def start_method(self, name: str, *args: Any) -> Any:
        """Call another method of the environment without awaiting its result.

        Returns:
            What the method returned. If that is awaitable, the caller awaits it on the event loop, and may cancel it;
            the method itself cannot be cancelled before it has returned.

        Raises:
            AttributeError: The environment has no such method.
        """
        return await self._run(getattr(self.environment, name), args, finish=False)

    def submit(self, fn: Callable[[], Any], on_outcome: Callable[[Outcome], None]) -> ThreadCall:
        """Run a function in the environment's threads; `on_outcome` is called on the event loop, unless abandoned."""
        return self._pool.submit(fn, on_outcome=on_outcome, batched=True)

    def cancel_unstarted(self, call: ThreadCall) -> bool:
        """Cancel a call if no thread has started it yet; return whether that was so."""
        return not self._pool.abort(call, started=False)

    def abandon(self, call: ThreadCall) -> None:
        """Abandon a call; the environment is closed once it returns."""
        self._abandon(call, self.discard)

    @property
    def is_tool_host(self) -> bool:
        """Whether the environment has tools to list and call."""
        return is_tool_host(self.environment)

    def has_method(self, name: str) -> bool:
        """Whether the environment has a method of that name."""
        return callable(getattr(self.environment, name, None))

    @property
    def forkable(self) -> bool:
        """Whether the environment declares that its snapshots can be restored in others."""
        return getattr(self.environment, "FORKABLE", False) is True

    async def close(self) -> None:
        """Close the environment; if an abandoned call still runs in it, return at once, and close when that ends.

        Closing continues even if the caller is cancelled.
        """
        if self._abandoned is None:
            self.discard()
            assert self._closing is not None
            # Twice its own time limit: a `close` that ignores its cancellation, or still waits for a thread, continues
            # in the background.
            await asyncio.wait([self._closing], timeout=2 * CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        end_own_pool = partial(self._executor.close_pool, self._pool)
        try:
            # The time limit starts once `close` runs: while it waits for a thread, it does not hang itself.
            async with asyncio.timeout(None) as deadline:
                await self._run(
                    getattr(self.environment, self.plan.close, lambda: None),
                    on_late_end=end_own_pool,
                    on_begin=lambda: deadline.reschedule(loop.time() + CLOSE_TIMEOUT_S),
                )
        except FATAL:
            logger.exception("closing %s failed", self.name)
        if self._abandoned is None:
            end_own_pool()
        # References to a session that is over, to its number for instance, must not keep its environment alive.
        self.environment = self._reset = self._step = None  # type: ignore[assignment]  # never called again

    def discard(self) -> None:
        """Close the environment once, in the background; if an abandoned call runs in it, that closes it at its end."""
        if self._closing is None and self._abandoned is None:
            self._closing = keep(asyncio.create_task(self._close()))

    def on_free(self, callback: Callable[[], None]) -> None:
        """Call `callback` when no abandoned call runs and the environment is not closing; possibly at once."""
        abandoned, closing = self._abandoned, self._closing
        if abandoned is not None:
            previous = abandoned.on_outcome

            def on_outcome(outcome: Outcome) -> None:
                if previous is not None:
                    previous(outcome)
                self.on_free(callback)

            abandoned.on_outcome = on_outcome
        elif closing is not None and not closing.done():
            closing.add_done_callback(lambda _: self.on_free(callback))
        else:
            callback()

    async def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        on_loop: bool | None = None,
        finish: bool = True,
        inline: bool = False,
        resume: Callable[[Outcome], None] | None = None,
        on_late_end: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
        on_unclaimed: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run a method, on the event loop or in a thread, and await its result if that is awaitable.

        Args:
            fn: The method.
            args: Its positional arguments.
            options: Its keyword arguments.
            on_loop: Whether to call it on the event loop; by default as its kind and class require.
            finish: Await an awaitable result; otherwise return it.
            inline: Call the method in the calling thread; see `_finish`.
            resume: Resumes this coroutine where it runs outside of a task: called on the event loop with the outcome
                of the call in a thread, which is the first wait.
            on_late_end: Called when an abandoned call has ended; by default `discard`.
            on_begin: Called on the event loop when the method starts, which may be after a wait for a thread.
            on_unclaimed: See `call`.
        """
        if inline:
            on_loop = True
        elif on_loop is None:
            on_loop = self.plan.on_loop or inspect.iscoroutinefunction(fn)
        if on_loop:
            if on_begin is not None:
                on_begin()
            result = self._call(fn, *args, **options)
        else:
            call = self._pool.submit(partial(fn, *args, **options), on_begin=on_begin, on_outcome=resume)
            try:
                succeeded, result = await (call.waiter if resume is None else call)
            except (asyncio.CancelledError, GeneratorExit):
                if call.outcome is None:
                    self._abandon(call, on_late_end or self.discard, on_unclaimed)
                else:
                    _discard_outcome(call.outcome, on_unclaimed)
                raise
            self.spent_s = call.spent_s
            if not succeeded:
                raise result
        inline = inline or self.plan.inline or resume is not None
        return (
            result
            if not finish or isinstance(result, Observation)
            else await self._finish(result, inline=inline)
        )

    def _call(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Call a method in the calling thread, and measure its time."""
        started_at = perf_counter()
        try:
            return fn(*args, **options)
        except FATAL:
            raise
        except BaseException as error:
            raise contain(error) from error
        finally:
            self.spent_s = perf_counter() - started_at

    async def _finish(self, result: Any, *, inline: bool) -> Any:
        """Await a method's result if it is awaitable, and add the time to the method's.

        With `inline`, which may be in a thread, this waits once first, so that the caller can resume it on the event
        loop (`start_eagerly`).
        """
        if not inspect.isawaitable(result):
            return result
        if inline:
            try:
                await asyncio.sleep(0)
            except BaseException:
                _discard_outcome((True, result))  # it will not be resumed
                raise
        spent_before_s, started_at = self.spent_s, perf_counter()
        try:
            return await result
        except (*FATAL, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise contain(error) from error
        finally:
            self.spent_s = spent_before_s + perf_counter() - started_at

    def _abandon(
        self,
        call: ThreadCall,
        on_late_end: Callable[[], None],
        on_unclaimed: Callable[[Any], None] | None = None,
    ) -> None:
        def on_outcome(outcome: Outcome) -> None:
            self._abandoned = None
            _discard_outcome(outcome, on_unclaimed)
            on_late_end()

        if self._executor.abort(call, self._pool, on_outcome):
            self._abandoned = call


def _is_plain(observation: Observation) -> bool:
    """Whether `unscored_reason` would find nothing, as far as that is quickly known."""
    reward, metadata = observation.reward, observation.metadata
    if metadata and (type(metadata) is not dict or SCORES in metadata or UNSCORED in metadata):
        return False
    if reward is None:
        return not (observation.done or observation.unscored)
    return type(reward) in _PLAIN_NUMBERS and -_GREATEST_FLOAT <= reward <= _GREATEST_FLOAT


def _discard_outcome(outcome: Outcome, on_unclaimed: Callable[[Any], None] | None = None) -> None:
    """Discard the outcome of an abandoned call: close a coroutine, and pass any other result to `on_unclaimed`."""
    succeeded, value = outcome
    if inspect.iscoroutine(value):
        value.close()
    elif succeeded and on_unclaimed is not None:
        on_unclaimed(value)


def start_eagerly(coroutine: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
    """Run a coroutine that usually does not wait; return its result, or the coroutine to continue in a task.

    Args:
        coroutine: Its first wait, if any, has to be `asyncio.sleep(0)`.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    return coroutine


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
