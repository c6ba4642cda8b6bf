"""Interrupts, for the code that runs and for nobody else: those that come a moment too soon are made up for."""

import signal
from typing import Any, Final

AGAIN: Final = signal.SIGURG
"""Repeats an interrupt. Ends nobody by default, and means nothing where the first one was in time."""

# Kept here because code may replace them in their own module.
_install = signal.signal
_installed = signal.getsignal
_raise = signal.raise_signal


class Interrupts:
    """What SIGINT does, between requests and while one runs.

    A handler that code has installed is its own while it runs, and only then: between two requests, where nothing would
    catch what it raises, this one takes its place.
    """

    def __init__(self) -> None:
        self._ours = self._interrupted
        self._theirs: Any = None
        self._heeded = False
        self._runs = False
        self._missed = False

    def heed(self) -> None:
        """Install the handlers."""
        _install(signal.SIGINT, self._ours)
        _install(AGAIN, self._repeated)
        self._heeded = True

    def forget(self) -> None:
        """In a fork, which gets its own: what the head has missed is none of its business."""
        self._missed = False

    def begin(self) -> None:
        """From now on code runs. Its handler comes first: ours would raise, and the code's be lost with that."""
        if self._theirs is not None:
            _install(signal.SIGINT, self._theirs)
            self._theirs = None
        self._runs = True

    def end(self) -> None:
        """It does no more. Idempotent, as the code's handler may raise out of here."""
        self._runs = False
        if self._heeded and (handler := _installed(signal.SIGINT)) is not self._ours:
            self._theirs = handler
            _install(signal.SIGINT, self._ours)

    def _interrupted(self, *_: object) -> None:
        self._missed = not self._runs
        if self._runs:
            raise KeyboardInterrupt

    def _repeated(self, *_: object) -> None:
        if self._runs and self._missed:
            self._missed = False
            _raise(signal.SIGINT)
