"""Where a method of an environment runs: on the event loop, or in a thread of a bounded pool.

- async methods run on the loop;
- plain methods of a class with `BLOCKING = False` run on the loop too, without a hop;
- everything else, constructors included, runs in a thread.

A method in a thread cannot be stopped. When its caller goes away the call is abandoned: the environment is
closed once the call returns, and `Executor.abandoned` counts it until then.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from openenv_core import Action, Environment, Observation, State
from servers.threads import Call, Outcome, ThreadPool

logger = logging.getLogger("servers")

Factory: TypeAlias = Callable[[], Environment[Any, Any, Any]]

MAX_THREADS = 64
"""Threads of the shared pool, unless the cap on sessions needs fewer."""

MIN_THREADS = 4
"""Even one session's server needs a second thread: an abandoned call may hold the first."""

CLOSE_S = 5.0
"""Seconds that an environment gets to close, or an async method to heed its cancellation."""

FATAL = (Exception, SystemExit)
"""What an environment may raise without ending its server."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to know of an environment class, worked out once.

    Attributes:
        inline: Every method runs on the loop and returns without waiting.
        on_loop: Plain methods run on the loop.
        reset: Name of the method that resets, which may be the released `reset_async`.
        step: Likewise.
        reset_async: `reset` is a coroutine function.
        step_async: Likewise.
        reset_options: Names that the method takes; None means any.
        step_options: Likewise.
    """

    inline: bool
    on_loop: bool
    reset: str
    step: str
    reset_async: bool
    step_async: bool
    reset_options: frozenset[str] | None
    step_options: frozenset[str] | None


@lru_cache(maxsize=256)
def plan_of(cls: type) -> Plan:
    """Work out how the methods of an environment class are run."""
    reset, step = (f"{name}_async" if hasattr(cls, f"{name}_async") else name for name in ("reset", "step"))
    reset_async, step_async = (inspect.iscoroutinefunction(getattr(cls, name)) for name in (reset, step))
    on_loop = not getattr(cls, "BLOCKING", True)
    return Plan(
        inline=on_loop and not reset_async and not step_async,
        on_loop=on_loop,
        reset=reset,
        step=step,
        reset_async=reset_async,
        step_async=step_async,
        reset_options=_options(getattr(cls, reset), skip=1),
        step_options=_options(getattr(cls, step), skip=2),
    )


def _options(method: Callable[..., Any], skip: int) -> frozenset[str] | None:
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters[skip:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def accepted(options: Mapping[str, Any], names: frozenset[str] | None) -> Mapping[str, Any]:
    """Return the options that the method takes."""
    if names is None or not options:
        return options
    return {name: value for name, value in options.items() if name in names}


class Executor:
    """The threads that all sessions of one app share.

    Args:
        sessions: The cap on sessions, which bounds how many threads are of use.

    Attributes:
        abandoned: Calls whose callers went away and which still hold a thread.
        limit: With this many abandoned calls no new session is taken; half of the threads stay free.
    """

    def __init__(self, sessions: int) -> None:
        self.pool = ThreadPool(min(MAX_THREADS, max(MIN_THREADS, 2 * sessions)))
        self.abandoned = 0
        self.limit = self.pool.size // 2

    def close(self) -> None:
        """Let the threads end."""
        self.pool.close()

    async def construct(self, factory: Factory) -> "Runner":
        """Build an environment where its class asks for it.

        Raises:
            Exception: Whatever the factory raised.
        """
        if isinstance(factory, type) and not getattr(factory, "BLOCKING", True):
            return Runner(factory(), self, self.pool)
        single = getattr(factory, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)
        pool = ThreadPool(1) if single else self.pool
        call = pool.submit(factory)
        try:
            environment = await outcome_of(call)
        except asyncio.CancelledError:
            if call.waiter.cancelled():
                self._close_orphan(call, pool)
            raise
        return Runner(environment, self, pool)

    def _close_orphan(self, call: Call, pool: ThreadPool) -> None:
        """Close the environment that an abandoned constructor may still bring."""

        def late(outcome: Outcome) -> None:
            self.abandoned -= 1
            if outcome[0]:
                Runner(outcome[1], self, pool).discard()

        self.abandoned += 1
        call.on_late = late


class Runner:
    """One environment and the place where its methods run. One call at a time.

    Attributes:
        plan: How its methods are run.
        step_inline: The environment's own `step`, where it may be called straight away; else None.
    """

    __slots__ = ("_environment", "_executor", "_late", "_pool", "_reset", "_step", "plan", "step_inline")

    def __init__(self, environment: Environment[Any, Any, Any], executor: Executor, pool: ThreadPool) -> None:
        self.plan = plan = plan_of(type(environment))
        self._environment = environment
        self._executor = executor
        self._pool = pool
        self._reset: Callable[..., Any] = getattr(environment, plan.reset)
        self._step: Callable[..., Any] = getattr(environment, plan.step)
        self._late: Call | None = None
        self.step_inline = self._step if plan.inline else None

    async def reset(self, options: Mapping[str, Any]) -> Observation:
        """Start an episode with the options that the environment takes.

        Raises:
            Exception: Whatever the environment raised.
        """
        options = accepted(options, self.plan.reset_options)
        if self.plan.reset_async:
            return await self._reset(**options)  # type: ignore[no-any-return]
        return await self._run(self._reset, (), options)  # type: ignore[no-any-return]

    async def step(self, action: Action, options: Mapping[str, Any] | None = None) -> Observation:
        """Apply an action.

        Raises:
            Exception: Whatever the environment raised.
        """
        options = accepted(options, self.plan.step_options) if options else {}
        if self.plan.step_async:
            return await self._step(action, **options)  # type: ignore[no-any-return]
        return await self._run(self._step, (action,), options)  # type: ignore[no-any-return]

    async def state(self) -> State:
        """Read the environment's state.

        Raises:
            Exception: Whatever the environment raised.
        """
        return await self._run(lambda: self._environment.state, (), {})  # type: ignore[no-any-return]

    async def get_metadata(self) -> Any:
        """Ask the environment what it says of itself."""
        return await self._run(self._environment.get_metadata, (), {})

    @property
    def concurrent(self) -> bool:
        """Whether the environment's class promises to share a process with other instances."""
        return bool(getattr(self._environment, "SUPPORTS_CONCURRENT_SESSIONS", False))

    async def close(self) -> None:
        """Close the environment; where an abandoned call still runs in it, as soon as that returns."""
        if self._late is not None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._run(self._environment.close, (), {}, then=self._end_own_pool)
        except FATAL:
            logger.exception("closing %s failed", type(self._environment).__name__)
        if self._late is None:
            self._end_own_pool()

    def discard(self) -> None:
        """Close an environment that nobody asked for after all, without waiting."""
        close = self._environment.close
        if inspect.iscoroutinefunction(close):
            logger.warning("%s came too late to be closed in order", type(self._environment).__name__)
        else:
            self._pool.submit(close)
        self._end_own_pool()

    def on_free(self, then: Callable[[], None]) -> None:
        """Call `then` when the abandoned call has returned; at once where there is none."""
        late = self._late
        if late is None:
            then()
            return
        finish = late.on_late

        def both(outcome: Outcome) -> None:
            if finish is not None:
                finish(outcome)
            then()

        late.on_late = both

    async def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        then: Callable[[], None] | None = None,
    ) -> Any:
        """Run a method; `then` is what follows an abandoned call, and closes the environment by default."""
        if self.plan.on_loop or inspect.iscoroutinefunction(fn):
            result = fn(*args, **options)
        else:
            call = self._pool.submit(lambda: fn(*args, **options))
            try:
                result = await outcome_of(call)
            except asyncio.CancelledError:
                if call.waiter.cancelled():
                    self._abandon(call, then or self.discard)
                raise
        if inspect.isawaitable(result):
            return await result
        return result

    def _abandon(self, call: Call, then: Callable[[], None]) -> None:
        def late(_: Outcome) -> None:
            self._executor.abandoned -= 1
            self._late = None
            then()

        self._executor.abandoned += 1
        self._late = call
        call.on_late = late

    def _end_own_pool(self) -> None:
        if self._pool is not self._executor.pool:
            self._pool.close()


async def outcome_of(call: Call) -> Any:
    """Wait for a call; return what it returned or raise what it raised."""
    succeeded, value = await call.waiter
    if not succeeded:
        raise value
    return value


_stubborn: set[asyncio.Task[Any]] = set()


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; one that does not heed it is logged and left to itself."""
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        logger.error("%s did not heed its cancellation within %g s; its session stays taken", task, CLOSE_S)
        _stubborn.add(task)
        task.add_done_callback(_stubborn.discard)
