"""How the methods of an environment are called, and where: on the event loop, or in a thread of a bounded pool.

- async methods run on the loop;
- plain methods of a class with `BLOCKING = False` run on the loop too, without a hop;
- everything else, constructors included, runs in a thread.

A method in a thread cannot be stopped. When its caller goes away, or its time is over, the call is abandoned:
another thread takes the place of the one that it holds, the environment is closed once it returns, and
`Executor.abandoned` counts it until then.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from openenv_core import Action, Environment, Observation, State
from openenv_core.tools import is_tool_host
from servers.threads import Outcome, ThreadCall, ThreadPool, contain, max_threads, outcome_of

logger = logging.getLogger("servers")

Factory: TypeAlias = Callable[[], Environment[Any, Any, Any]]

T = TypeVar("T")

_MIN_THREADS: Final = 4
"""Even one session's server needs a second thread, for the calls of plain HTTP and of closing."""

_MAX_ABANDONED: Final = 64
"""Threads that abandoned calls may hold. Beyond them a server takes no further sessions."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that an environment gets to close, or an async method to heed its cancellation."""

FATAL: Final = (Exception, SystemExit)
"""What an environment may raise without ending its server."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Which options a method takes: their names, or None for any; and parameters that are none (itself, the action)."""

    names: frozenset[str] | None
    barred: frozenset[str]

    def accept(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options that the method takes."""
        if self.names is None:
            return {name: value for name, value in given.items() if name not in self.barred}
        return {name: value for name, value in given.items() if name in self.names}


@dataclass(frozen=True, slots=True)
class _EnvironmentMethods:
    """What there is to know of an environment class, worked out once.

    Attributes:
        inline: Every method runs on the loop and returns without waiting.
        on_loop: Plain methods run on the loop.
        reset: Name of the method that resets, which may be `reset_async`.
        step: Likewise.
        close: Likewise.
        reset_async: `reset` is a coroutine function.
        step_async: Likewise.
        reset_options: What the method takes.
        step_options: What the method takes beside the action.
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
    """Work out how the methods of an environment class are run."""
    reset, step, close = (
        f"{name}_async" if hasattr(cls, f"{name}_async") else name for name in ("reset", "step", "close")
    )
    reset_async, step_async = (inspect.iscoroutinefunction(getattr(cls, name)) for name in (reset, step))
    on_loop = not getattr(cls, "BLOCKING", True)
    # Environments of declared tools say whether one of these is asynchronous; of others a call may wait, and with it
    # all that share the session.
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
    barred = frozenset(p.name for p in parameters[:skip] if p.kind not in variadic)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _Options(None, barred)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Options(frozenset(p.name for p in parameters[skip:] if p.kind in by_name), barred)


def _is_environment(value: object) -> bool:
    """Whether a factory has returned what can be served; the class need not be ours, but has to have the methods."""
    return hasattr(type(value), "reset") and hasattr(type(value), "step")


def name_of(factory: Callable[..., Any]) -> str:
    """Return the name of an environment's class or factory."""
    return str(getattr(factory, "__name__", type(factory).__name__))


class Executor:
    """The threads that all sessions of one app share.

    Args:
        sessions: The cap on sessions, which bounds how many threads are of use.

    Attributes:
        abandoned: Calls that nobody waits for any more and which still hold a thread.
        limit: With this many abandoned calls no new session is taken.
    """

    def __init__(self, sessions: int) -> None:
        self.pool = ThreadPool(min(max_threads(), max(_MIN_THREADS, 2 * sessions)))
        self.abandoned = 0
        self.limit = _MAX_ABANDONED

    @property
    def exhausted(self) -> bool:
        """Whether abandoned calls hold all the threads that may be given up."""
        return self.abandoned >= self.limit

    def close(self) -> None:
        """Let the threads end."""
        self.pool.close()

    async def construct(self, factory: Factory) -> "EnvironmentRunner":
        """Build an environment where its class asks for it. Exception: Whatever the factory raised."""
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
                    self.end(pool)
                raise
        if succeeded and _is_environment(value):
            return EnvironmentRunner(value, self, pool)
        self.end(pool)
        if succeeded:
            raise TypeError(
                f"expected an environment with reset and step, got {type(value).__name__}; "
                "give create_app a class, or a function that returns an instance"
            )
        raise value

    def end(self, pool: ThreadPool) -> None:
        """Let the threads of a pool end, unless it is the one that all share."""
        if pool is not self.pool:
            pool.close()

    def abort(self, call: ThreadCall, pool: ThreadPool, then: Callable[[Outcome], None]) -> bool:
        """Stop waiting for a call without an outcome; return whether it holds a thread, until `then` is called.

        The one thread of an environment that asked for one is not replaced: closing has to follow in it.
        """
        if not pool.abort(call, replace=pool is self.pool):
            return False

        def late(outcome: Outcome) -> None:
            self.abandoned -= 1
            then(outcome)

        self.abandoned += 1
        if self.abandoned == self.limit:
            logger.error(
                "%d calls that nobody waits for hold a thread each; no new session is taken", self.abandoned
            )
        call.then = late
        return True

    def _reject(self, outcome: Outcome, pool: ThreadPool) -> None:
        """Close what a constructor has brought, if it has, after its caller had left."""
        succeeded, value = outcome
        if succeeded and _is_environment(value):
            EnvironmentRunner(value, self, pool).discard()
        else:
            self.end(pool)


class EnvironmentRunner:
    """One environment and the place where its methods run. One call at a time.

    What an environment raises comes out of every method here that awaits one of its own.

    Attributes:
        environment: The environment itself, for whoever has the session's turn.
        plan: How its methods are run.
        name: What its class is called.
        in_thread: Whether reset and step are plain methods that run in a thread.
        concurrent: Whether its class promises to share a process with other instances.
        spent_s: Seconds that the last one was in the environment, and in no queue for a thread.
    """

    def __init__(self, environment: Environment[Any, Any, Any], executor: Executor, pool: ThreadPool) -> None:
        self.plan = plan = plan_of(type(environment))
        self.name = type(environment).__name__
        self.in_thread = not (plan.on_loop or plan.step_async or plan.reset_async)
        self.concurrent = bool(getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self.environment = environment
        self._executor = executor
        self.spent_s = 0.0
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._late: ThreadCall | None = None
        self._closing: asyncio.Task[None] | None = None

    async def reset(
        self,
        options: Mapping[str, Any],
        *,
        here: bool = False,
        resume: Callable[[Outcome], None] | None = None,
    ) -> Observation:
        """Start an episode with the options that the environment takes; `here` and `resume`: as of `_run`."""
        return await self._run(  # type: ignore[no-any-return]
            self._reset, options=self.plan.reset_options.accept(options), here=here, resume=resume
        )

    def reset_here(self, options: Mapping[str, Any]) -> Observation | Coroutine[Any, Any, Observation]:
        """Start an episode where this is called; return what is to be awaited where the environment waits."""
        observation = self._call(self._reset, **self.plan.reset_options.accept(options))
        return observation if isinstance(observation, Observation) else self._settled(observation, here=True)

    def step_here(self, action: Action) -> Observation | Coroutine[Any, Any, Observation]:
        """Apply an action where this is called; return what is to be awaited where the environment waits."""
        observation = self._call(self._step, action)
        return observation if isinstance(observation, Observation) else self._settled(observation, here=True)

    async def step(
        self,
        action: Action,
        options: Mapping[str, Any] | None = None,
        *,
        here: bool = False,
        resume: Callable[[Outcome], None] | None = None,
    ) -> Observation:
        """Apply an action; `here`: where this is called. `resume`: as of `_run`."""
        plan = self.plan
        if here or (plan.inline and not options):
            observation = self.step_here(action)
            return observation if isinstance(observation, Observation) else await observation
        return await self._run(  # type: ignore[no-any-return]
            self._step,
            (action,),
            plan.step_options.accept(options) if options else {},
            on_loop=plan.on_loop or plan.step_async,
            resume=resume,
        )

    async def state(self, *, here: bool = False, resume: Callable[[Outcome], None] | None = None) -> State:
        """Read the environment's state; `here` and `resume`: as of `_run`."""
        return await self._run(  # type: ignore[no-any-return]
            lambda: self.environment.state, here=here, resume=resume
        )

    async def call(self, name: str, *args: Any, unclaimed: Callable[[Any], None] | None = None) -> Any:
        """Run another method of the environment's.

        Args:
            name: Of the method.
            *args: For it.
            unclaimed: Given, on the loop, what a thread returns after whoever asked has left.

        Raises:
            AttributeError: It has none of that name.
        """
        return await self._run(getattr(self.environment, name), args, unclaimed=unclaimed)

    async def begin(self, name: str, *args: Any) -> Any:
        """Run another method of the environment's up to its first wait.

        Returns:
            What the method returned. Where that is awaitable, it is for the caller to await on the loop, and to
            cancel: a method that has not returned cannot be.

        Raises:
            AttributeError: It has none of that name.
        """
        return await self._run(getattr(self.environment, name), args, whole=False)

    def submit(self, fn: Callable[[], Any], then: Callable[[Outcome], None]) -> ThreadCall:
        """Run a function where the environment's plain methods run; `then` is called on the loop, unless abandoned."""
        return self._pool.submit(fn, then=then, together=True)

    def drop(self, call: ThreadCall) -> bool:
        """Give up a call that no thread has taken up yet; return whether that is so."""
        return not self._pool.abort(call, started=False)

    def abandon(self, call: ThreadCall) -> None:
        """Give up a call that nobody waits for any more; the environment is closed, once that returns."""
        self._abandon(call, self.discard)

    @property
    def is_tool_host(self) -> bool:
        """Whether the environment has tools to list and to call."""
        return is_tool_host(self.environment)

    def has(self, name: str) -> bool:
        """Whether the environment has a method of that name."""
        return callable(getattr(self.environment, name, None))

    @property
    def forkable(self) -> bool:
        """Whether the environment promises that others can go on from its snapshots."""
        return getattr(self.environment, "FORKABLE", False) is True

    async def close(self) -> None:
        """Close the environment; where an abandoned call still runs in it, as soon as that returns.

        Whoever waits may be cancelled: the closing goes on.
        """
        if self._late is None:
            self.discard()
            assert self._closing is not None
            # Twice the time that it has: one that does not heed its end is left to itself, and so is one that
            # waits for a thread.
            await asyncio.wait([self._closing], timeout=2 * CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        end_own_pool = partial(self._executor.end, self._pool)
        try:
            # Its time does not pass while it waits for a thread: others hold them all then, and it hangs in nothing.
            async with asyncio.timeout(None) as deadline:
                await self._run(
                    getattr(self.environment, self.plan.close),
                    then=end_own_pool,
                    on_begin=lambda: deadline.reschedule(loop.time() + CLOSE_TIMEOUT_S),
                )
        except FATAL:
            logger.exception("closing %s failed", self.name)
        if self._late is None:
            end_own_pool()
        # Whoever keeps a session that is over, for its number for instance, keeps no environment.
        self.environment = self._reset = self._step = None  # type: ignore[assignment]  # nobody asks it any more

    def discard(self) -> None:
        """Close the environment, once, without waiting for it; where an abandoned call runs in it, that does it."""
        if self._closing is None and self._late is None:
            self._closing = keep(asyncio.create_task(self._close()))

    def on_free(self, then: Callable[[], None]) -> None:
        """Call `then` when no abandoned call runs any more and what followed it is over; maybe at once."""
        late, closing = self._late, self._closing
        if late is not None:
            follow = late.then

            def both(outcome: Outcome) -> None:
                if follow is not None:
                    follow(outcome)
                self.on_free(then)

            late.then = both
        elif closing is not None and not closing.done():
            closing.add_done_callback(lambda _: self.on_free(then))
        else:
            then()

    async def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        on_loop: bool | None = None,
        whole: bool = True,
        here: bool = False,
        resume: Callable[[Outcome], None] | None = None,
        then: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
        unclaimed: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run a method, and await what it returns where that is awaitable and the `whole` is wanted.

        `here`: where this is called, as far as `_settled` says. `resume` is given where this runs outside of a task: it
        is called on the loop once the call in a thread has ended, which is the first wait. `then` follows an abandoned
        call, which by default closes the environment. `on_begin` is called on the loop once the method begins, which is
        later where it has to wait for a thread.
        """
        if here:
            on_loop = True
        elif on_loop is None:
            on_loop = self.plan.on_loop or inspect.iscoroutinefunction(fn)
        if on_loop:
            if on_begin is not None:
                on_begin()
            result = self._call(fn, *args, **options)
        else:
            call = self._pool.submit(partial(fn, *args, **options), on_begin=on_begin, then=resume)
            try:
                succeeded, result = await (call.waiter if resume is None else call)
            except (asyncio.CancelledError, GeneratorExit):
                if call.outcome is None:
                    self._abandon(call, then or self.discard, unclaimed)
                else:
                    _drop(call.outcome, unclaimed)
                raise
            self.spent_s = call.spent_s
            if not succeeded:
                raise result
        here = here or self.plan.inline or resume is not None
        return (
            result if not whole or isinstance(result, Observation) else await self._settled(result, here=here)
        )

    def _call(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Call a method where this is called, and note its time."""
        began = perf_counter()
        try:
            return fn(*args, **options)
        except FATAL:
            raise
        except BaseException as error:
            raise contain(error) from error
        finally:
            self.spent_s = perf_counter() - began

    async def _settled(self, result: Any, *, here: bool) -> Any:
        """Await what a method has returned, where that is awaitable; that is a part of its time.

        `here`: the method was called where it was asked for, maybe in a thread; it goes on once it is resumed.
        """
        if not inspect.isawaitable(result):
            return result
        if here:
            try:
                await asyncio.sleep(0)
            except BaseException:
                _drop((True, result))  # nobody resumes it
                raise
        before_s, began = self.spent_s, perf_counter()
        try:
            return await result
        except (*FATAL, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise contain(error) from error
        finally:
            self.spent_s = before_s + perf_counter() - began

    def _abandon(
        self, call: ThreadCall, then: Callable[[], None], unclaimed: Callable[[Any], None] | None = None
    ) -> None:
        def late(outcome: Outcome) -> None:
            self._late = None
            _drop(outcome, unclaimed)
            then()

        if self._executor.abort(call, self._pool, late):
            self._late = call


def _drop(outcome: Outcome, unclaimed: Callable[[Any], None] | None = None) -> None:
    """Discard the result of an abandoned call; an awaitable of an async method is closed."""
    succeeded, value = outcome
    if inspect.iscoroutine(value):
        value.close()
    elif succeeded and unclaimed is not None:
        unclaimed(value)


def begin_here(coroutine: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
    """Run a coroutine that usually does not wait; return its result, or the coroutine to continue in a task.

    Args:
        coroutine: Where it waits, that is at first for another turn of the loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value  # type: ignore[no-any-return]
    return coroutine


_kept: set[asyncio.Task[Any]] = set()
"""Tasks that nobody waits for. The event loop itself holds tasks only weakly."""


def keep(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Keep a reference to a background task."""
    _kept.add(task)
    task.add_done_callback(_kept.discard)
    return task


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; one that does not heed it is logged and left to itself."""
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
    if not task.done():
        logger.error(
            "%s did not heed its cancellation within %g s; its session stays taken", task, CLOSE_TIMEOUT_S
        )
        keep(task)
