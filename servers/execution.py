"""Where a method of an environment runs: on the event loop, or in a thread of a bounded pool.

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
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from openenv_core import Action, Environment, Observation, State
from openenv_core.tools import is_tool_host
from servers.methods import accepted, is_environment, plan_of
from servers.threads import Outcome, ThreadCall, ThreadPool, contained

logger = logging.getLogger("servers")

Factory: TypeAlias = Callable[[], Environment[Any, Any, Any]]

T = TypeVar("T")

MAX_THREADS = 64
"""Threads of the shared pool, unless the cap on sessions needs fewer."""

MIN_THREADS = 4
"""Even one session's server needs a second thread, for the calls of plain HTTP and of closing."""

MAX_ABANDONED = 64
"""Threads that abandoned calls may hold. Beyond them a server takes no further sessions."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds that an environment gets to close, or an async method to heed its cancellation."""

FATAL = (Exception, SystemExit)
"""What an environment may raise without ending its server."""


class Executor:
    """The threads that all sessions of one app share.

    Args:
        sessions: The cap on sessions, which bounds how many threads are of use.

    Attributes:
        abandoned: Calls that nobody waits for any more and which still hold a thread.
        limit: With this many abandoned calls no new session is taken.
    """

    def __init__(self, sessions: int) -> None:
        self.pool = ThreadPool(min(MAX_THREADS, max(MIN_THREADS, 2 * sessions)))
        self.abandoned = 0
        self.limit = MAX_ABANDONED

    @property
    def exhausted(self) -> bool:
        """Whether abandoned calls hold all the threads that may be given up."""
        return self.abandoned >= self.limit

    def close(self) -> None:
        """Let the threads end."""
        self.pool.close()

    async def construct(self, factory: Factory) -> "EnvironmentRunner":
        """Build an environment where its class asks for it.

        Raises:
            Exception: Whatever the factory raised.
        """
        if isinstance(factory, type) and not getattr(factory, "BLOCKING", True):
            return EnvironmentRunner(_on_loop(factory), self, self.pool)
        single = getattr(factory, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)
        pool = ThreadPool(1) if single else self.pool
        call = pool.submit(factory)
        try:
            succeeded, value = await call.waiter
        except asyncio.CancelledError:
            if call.outcome is not None:
                self._reject(call.outcome, pool)
            elif not self.abort(call, pool, lambda outcome: self._reject(outcome, pool)):
                self.end(pool)
            raise
        if succeeded and is_environment(value):
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
        if self.exhausted:
            logger.error(
                "%d calls that nobody waits for hold a thread each; no new session is taken", self.abandoned
            )
        call.on_late = late
        return True

    def _reject(self, outcome: Outcome, pool: ThreadPool) -> None:
        """Close what a constructor has brought, if it has, after its caller had left."""
        succeeded, value = outcome
        if succeeded and is_environment(value):
            EnvironmentRunner(value, self, pool).discard()
        else:
            self.end(pool)


class EnvironmentRunner:
    """One environment and the place where its methods run. One call at a time.

    Attributes:
        plan: How its methods are run.
        step_inline: The environment's own `step`, where it may be called straight away; else None.
    """

    __slots__ = (
        "_closing",
        "_environment",
        "_executor",
        "_late",
        "_pool",
        "_reset",
        "_step",
        "plan",
        "step_inline",
    )

    def __init__(self, environment: Environment[Any, Any, Any], executor: Executor, pool: ThreadPool) -> None:
        self.plan = plan = plan_of(type(environment))
        self._environment = environment
        self._executor = executor
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._late: ThreadCall | None = None
        self._closing: asyncio.Task[None] | None = None
        self.step_inline = self._step if plan.inline else None

    async def reset(self, options: Mapping[str, Any]) -> Observation:
        """Start an episode with the options that the environment takes.

        Raises:
            Exception: Whatever the environment raised.
        """
        options = accepted(options, self.plan.reset_options)
        if self.plan.reset_async:
            return await _awaited(self._reset(**options))  # type: ignore[no-any-return]
        return await self._run(self._reset, (), options)  # type: ignore[no-any-return]

    async def step(self, action: Action, options: Mapping[str, Any] | None = None) -> Observation:
        """Apply an action.

        Raises:
            Exception: Whatever the environment raised.
        """
        options = accepted(options, self.plan.step_options) if options else {}
        if self.plan.step_async:
            return await _awaited(self._step(action, **options))  # type: ignore[no-any-return]
        return await self._run(self._step, (action,), options)  # type: ignore[no-any-return]

    async def state(self) -> State:
        """Read the environment's state.

        Raises:
            Exception: Whatever the environment raised.
        """
        return await self._run(lambda: self._environment.state, (), {})  # type: ignore[no-any-return]

    async def call(self, name: str, *args: Any) -> Any:
        """Run another method of the environment's.

        Raises:
            AttributeError: It has none of that name.
            Exception: Whatever the environment raised.
        """
        return await self._run(getattr(self._environment, name), args, {})

    async def begin(self, name: str, *args: Any) -> Any:
        """Run another method of the environment's up to its first wait.

        Returns:
            What the method returned. Where that is awaitable, it is for the caller to await on the loop, and to
            cancel: a method that has not returned cannot be.

        Raises:
            AttributeError: It has none of that name.
            Exception: Whatever the environment raised.
        """
        return await self._start(getattr(self._environment, name), args, {}, None)

    @property
    def is_tool_host(self) -> bool:
        """Whether the environment has tools to list and to call."""
        return is_tool_host(self._environment)

    def has(self, name: str) -> bool:
        """Whether the environment has a method of that name."""
        return callable(getattr(self._environment, name, None))

    @property
    def name(self) -> str:
        """What the environment's class is called."""
        return type(self._environment).__name__

    @property
    def concurrent(self) -> bool:
        """Whether the environment's class promises to share a process with other instances."""
        return bool(getattr(self._environment, "SUPPORTS_CONCURRENT_SESSIONS", False))

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
        try:
            # Its time does not pass while it waits for a thread: others hold them all then, and it hangs in nothing.
            async with asyncio.timeout(None) as deadline:
                await self._run(
                    getattr(self._environment, self.plan.close),
                    (),
                    {},
                    then=self._end_own_pool,
                    on_begin=lambda: deadline.reschedule(loop.time() + CLOSE_TIMEOUT_S),
                )
        except FATAL:
            logger.exception("closing %s failed", type(self._environment).__name__)
        if self._late is None:
            self._end_own_pool()

    def discard(self) -> None:
        """Close the environment, once, without waiting for it."""
        if self._closing is None:
            self._closing = keep(asyncio.create_task(self._close()))

    def on_free(self, then: Callable[[], None]) -> None:
        """Call `then` when no abandoned call runs any more and what followed it is over; maybe at once."""
        late, closing = self._late, self._closing
        if late is not None:
            follow = late.on_late

            def both(outcome: Outcome) -> None:
                if follow is not None:
                    follow(outcome)
                self.on_free(then)

            late.on_late = both
        elif closing is not None and not closing.done():
            closing.add_done_callback(lambda _: self.on_free(then))
        else:
            then()

    async def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        then: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
    ) -> Any:
        """Run a method.

        Args:
            fn: The method.
            args: Its arguments.
            options: Its options.
            then: What follows an abandoned call; by default it closes the environment.
            on_begin: Called on the loop once it begins, which is later where it has to wait for a thread.
        """
        result = await self._start(fn, args, options, then, on_begin)
        return await _awaited(result) if inspect.isawaitable(result) else result

    async def _start(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        then: Callable[[], None] | None,
        on_begin: Callable[[], None] | None = None,
    ) -> Any:
        if self.plan.on_loop or inspect.iscoroutinefunction(fn):
            if on_begin is not None:
                on_begin()
            return _on_loop(fn, *args, **options)
        call = self._pool.submit(lambda: fn(*args, **options), on_begin=on_begin)
        try:
            return await outcome_of(call)
        except asyncio.CancelledError:
            if call.outcome is None:
                self._abandon(call, then or self.discard)
            else:
                _drop(call.outcome)
            raise

    def _abandon(self, call: ThreadCall, then: Callable[[], None]) -> None:
        def late(outcome: Outcome) -> None:
            self._late = None
            _drop(outcome)
            then()

        if self._executor.abort(call, self._pool, late):
            self._late = call

    def _end_own_pool(self) -> None:
        self._executor.end(self._pool)


def _drop(outcome: Outcome) -> None:
    """Let go of what nobody waits for any more; of an async method it is what was to be awaited."""
    _, value = outcome
    if inspect.iscoroutine(value):
        value.close()


def _on_loop(fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    try:
        return fn(*args, **options)
    except FATAL:
        raise
    except BaseException as error:
        raise contained(error) from error


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except (*FATAL, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise contained(error) from error


async def outcome_of(call: ThreadCall) -> Any:
    """Wait for a call; return what it returned or raise what it raised."""
    succeeded, value = await call.waiter
    if not succeeded:
        raise value
    return value


_kept: set[asyncio.Task[Any]] = set()
"""Tasks that nobody waits for. The event loop itself holds tasks only weakly."""


def keep(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Hold on to a task that nobody waits for."""
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
