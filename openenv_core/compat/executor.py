"""The released package's executor of Python code, implemented with the sandbox.

A released environment creates a `PyExecutor` per session and calls `run` from a thread. Here each executor is an
interpreter in its own process; the executors of one server process share the sandbox that starts them.
"""

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from openenv_core.compat.types import CodeExecResult
from openenv_core.errors import ClientClosedError, ConfigurationError
from openenv_core.loop_thread import LoopThread
from openenv_core.outcomes import SANDBOX_ERROR
from openenv_core.sandbox import (
    Execution,
    Limits,
    Sandbox,
    SandboxClosedError,
    SandboxSession,
    SandboxUnavailableError,
)

T = TypeVar("T")
P = ParamSpec("P")

LIMITS: Final = Limits()
"""Limits of every interpreter; the released package has no arguments for others."""

HELPERS: Final = """\
from traceback import format_exc

def safe_json_dumps(obj):
    import json
    return json.dumps(obj, default=repr)
"""
"""The names that released executors define for code."""


class PyExecutor:
    """Runs untrusted Python code and keeps its variables between runs.

    The first run starts the interpreter, which ends with this object. Code may import whatever is installed: the
    sandbox restricts what it can do (docs/sandbox.md), not a list of names.

    Args:
        additional_imports: Modules that the released package allows on request; here they need no permission.
    """

    def __init__(self, additional_imports: Sequence[str] | None = None) -> None:
        if isinstance(additional_imports, str):
            raise ConfigurationError(
                f"expected a list of modules as additional_imports, got {additional_imports!r}; write "
                f"[{additional_imports!r}]"
            )
        self._lock = threading.Lock()
        self._engine: _Engine | None = None
        self._session: SandboxSession | None = None
        self._needs_setup = True

    def run(self, code: str) -> CodeExecResult:
        """Run code and wait for its end, at most for the sandbox's timeout.

        Raises:
            SandboxFailureError: The infrastructure failed, as opposed to the code.
        """
        with self._lock:
            if self._engine is None:
                self._engine = _engine()
            engine = self._engine
            if self._session is None:
                self._session = session = engine.run(engine.sandbox.open, LIMITS)
                # Released environments drop an executor to start afresh; it has no close().
                weakref.finalize(self, engine.thread.call_detached, session.close).atexit = False
            if self._needs_setup:
                _require_result(engine.run(self._session.execute, HELPERS))
                self._needs_setup = False
            execution = engine.run(self._session.execute, code)
            self._needs_setup = execution.state_lost
        return _result(_require_result(execution))


def _require_result(execution: Execution) -> Execution:
    if execution.status == SANDBOX_ERROR:
        raise SandboxUnavailableError(
            f"expected the sandbox to run code, got no result: {execution.reason or 'it failed'}; run it again"
        )
    return execution


def _result(execution: Execution) -> CodeExecResult:
    error = execution.error
    errors = [execution.stderr]
    if error is not None:
        errors.append("".join(error.traceback).rstrip("\n") or f"{error.ename}: {error.evalue}")
    if execution.reason:
        errors.append(execution.reason)
    return CodeExecResult(
        stdout="\n".join(filter(None, (execution.stdout, execution.result))),
        stderr="\n".join(filter(None, errors)),
        exit_code=execution.exit_code,
    )


class _Engine:
    """The sandbox of this process and the thread of its event loop; its processes end with this one."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self.sandbox = Sandbox()
        try:
            self.thread.run(self.sandbox.start)
        except BaseException:
            self.thread.stop()
            raise

    def run(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
        """Run a coroutine function of the sandbox or of one of its sessions; return its result."""
        try:
            return self.thread.run(work, *args, **options)
        except ClientClosedError:
            raise SandboxClosedError(
                "expected an executor of this process, got one that it has from before it forked, or that has "
                "been closed with it; make a new one"
            ) from None


_lock = threading.Lock()
_shared: _Engine | None = None


def _engine() -> _Engine:
    global _shared
    with _lock:
        if _shared is None or _shared.thread.is_forked:
            _shared = _Engine()
        return _shared


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
