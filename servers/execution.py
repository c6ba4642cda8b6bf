"""How a class of environments is run: which of its methods block; its constructors; the threads of a server."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

from openenv_core import Environment
from servers.threads import Outcome, ThreadCall, ThreadPool, contain, max_threads, outcome_of

logger = logging.getLogger("servers")

Factory: TypeAlias = Callable[[], Environment[Any, Any, Any]]

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])

_MIN_THREADS: Final = 4
"""Even a server of one session needs a second thread, for calls over plain HTTP and for closing."""

_MAX_ABANDONED: Final = 64
"""Threads that abandoned calls may occupy before the server refuses new sessions."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that an environment has to close, or an async method to end once cancelled."""

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
        names = options.keys() - self.excluded if self.names is None else self.names
        return {name: value for name, value in options.items() if name in names}


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


async def outcome_of_awaitable(awaitable: Awaitable[Any]) -> Outcome:
    """Await what a method has returned, and return the outcome."""
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

    async def construct(
        self, factory: Factory, on_late: Callable[[Any, ThreadPool], None]
    ) -> tuple[Any, ThreadPool]:
        """Construct an environment, on the event loop or in a thread.

        Args:
            factory: Returns the environment.
            on_late: Takes one that is constructed after its caller was cancelled.

        Returns:
            The environment, and the threads that its blocking methods run in.

        Raises:
            Exception: Whatever the factory raised.
        """
        pool = self.pool

        def reject(outcome: Outcome) -> None:
            """Pass on the environment, if any, of a constructor whose caller was cancelled."""
            succeeded, value = outcome
            if succeeded and _is_environment(value):
                on_late(value, pool)
            else:
                self.close_pool(pool)

        def take(outcome: Outcome) -> None:
            if not built.cancelled():
                built.set_result(outcome)
            else:
                self.abandoned -= 1
                reject(outcome)

        if isinstance(factory, type) and not getattr(factory, "BLOCKING", True):
            succeeded, value = outcome_of(factory)
        else:
            if getattr(factory, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
                pool = ThreadPool(1)
            built: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            call = pool.submit(factory, take)
            try:
                succeeded, value = await built
            except asyncio.CancelledError:
                if not built.cancelled():
                    reject(built.result())
                elif not self.abort(call, pool):
                    self.close_pool(pool)
                raise
        if succeeded and _is_environment(value):
            return value, pool
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


_background_tasks: set[asyncio.Future[Any]] = set()
"""Background tasks. The event loop itself holds only weak references to tasks."""


def keep(task: FutureT) -> FutureT:
    """Hold a reference to a background task until it ends; return the task."""
    _background_tasks.add(task)
    task.add_done_callback(_background_tasks.discard)
    return task


async def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, as `wait_cancelled`."""
    task.cancel()
    await wait_cancelled([task])


async def wait_cancelled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait for the end of cancelled tasks; log those that ignore the cancellation, and let them run on."""
    _, deaf = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
    for task in deaf:
        logger.error(
            "%s ignored its cancellation for %g s; its session keeps its slot", task, CLOSE_TIMEOUT_S
        )
        keep(task)
