"""Running something that may never come back."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from openenv_core.errors import OpenEnvError

T = TypeVar("T")


class Overran(OpenEnvError):  # noqa: N818 - says what happened, as the tree of errors does
    """What was run had not ended in time. It may still run, in a thread that the end of the process ends."""


def within(seconds: float, function: Callable[[], T], name: str = "openenv-checker") -> T:
    """Run a function in a thread of its own and return what it returns, or raise what it raises.

    Args:
        seconds: After which it is left to itself.
        function: What to run. It may be anybody's code, so `SystemExit` is caught as well.
        name: Of the thread.

    Raises:
        Overran: It had not ended in time.
    """
    outcome: _Outcome[T] = _Outcome()
    thread = threading.Thread(target=outcome.take, args=(function,), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overran(f"expected an end within {seconds:g} s, got none")
    if outcome.error is not None:
        raise outcome.error
    return outcome.values[0]


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.values: list[T] = []
        self.error: BaseException | None = None

    def take(self, function: Callable[[], T]) -> None:
        try:
            self.values.append(function())
        except BaseException as error:
            self.error = error
