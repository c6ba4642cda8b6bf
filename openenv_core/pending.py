"""An awaitable that a method has returned, and what is done with its result."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def _return(value: Any) -> Any:
    return value


class Pending(Generic[T]):
    """A coroutine that awaits what a method has returned, and goes on with its result.

    Closed before it starts, it closes what it would have awaited, which Python would report as never awaited.

    Args:
        awaitable: What the method has returned.
        then: What is done with its result; may return another `Pending`, which is awaited too.
        on_failure: Called with the exception of the awaitable; with a GeneratorExit if it is closed.
        wait: Awaits it, if not plainly.
    """

    __slots__ = ("_awaitable", "_on_failure", "_running", "_then", "_wait")

    def __init__(
        self,
        awaitable: Awaitable[Any],
        then: "Callable[[Any], T | Pending[T]]" = _return,
        on_failure: Callable[[BaseException], object] | None = None,
        wait: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
    ) -> None:
        self._awaitable = awaitable
        self._then = then
        self._wait = wait
        self._on_failure = on_failure
        self._running: Coroutine[Any, Any, T] | None = None

    @property
    def awaited(self) -> Awaitable[Any] | None:
        """What it awaits in the end, if that is all: whoever knows how may wait for it otherwise, and call `finish`."""
        inner = self._awaitable
        if self._on_failure is not None or self._running is not None:
            return None
        return inner.awaited if isinstance(inner, Pending) else inner

    def finish(self, value: Any) -> "T | Pending[T]":
        """Return what becomes of the result of `awaited`."""
        if not isinstance(self._awaitable, Pending):
            return self._then(value)
        result = self._awaitable.finish(value)
        return Pending(result, self._then) if isinstance(result, Pending) else self._then(result)

    async def _finish(self) -> T:
        try:
            value = await (self._awaitable if self._wait is None else self._wait(self._awaitable))
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise
        result = self._then(value)
        return await result if isinstance(result, Pending) else result

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._running is None:
            self._running = self._finish()
        return self._running

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begin().__await__()

    def send(self, value: Any) -> Any:
        """Go on until it waits again, as a task does."""
        return self._begin().send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an exception until it waits again, as a task does that is cancelled."""
        return self._begin().throw(*error)

    def close(self) -> None:
        """End it, and what it awaits."""
        if self._running is not None:
            self._running.close()
            return
        if callable(close := getattr(self._awaitable, "close", None)):
            close()
        if self._on_failure is not None:
            self._on_failure(GeneratorExit())


Coroutine.register(Pending)  # as its base, an abstract class, it would make `isinstance` slow


def convert(value: Any, then: Callable[[Any], T]) -> T | Pending[T]:
    """Return what `then` makes of a method's value; of an awaitable's result once it is awaited."""
    return Pending(value, then) if inspect.isawaitable(value) else then(value)


def require_value(value: T, method: str, advice: str = "write it as `async def`") -> T:
    """Return what a plain method has returned.

    Raises:
        TypeError: It is an awaitable, which is closed.
    """
    if not inspect.isawaitable(value):
        return value
    if isinstance(value, Coroutine):
        value.close()
    raise TypeError(f"expected a value from {method}, got {type(value).__name__}; {advice}")
