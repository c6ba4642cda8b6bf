"""The released package's way of running code, over the sandbox.

An environment that was written for it makes a `PyExecutor` a session and calls `run` from a thread. Here each of them
is an interpreter in a process of its own; those of one server process share what starts them.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
"""Of every interpreter; the released package has no way to ask for others."""

CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of the process waits for the interpreters' ends."""

HELPERS: Final = """\
from traceback import format_exc

def safe_json_dumps(obj):
    import json
    return json.dumps(obj, default=repr)
"""
"""What released executors give to code, beside Python."""


class PyExecutor:
    """Runs untrusted Python code, and keeps its variables between runs.

    The interpreter is started by the first run, and ends with this object. Code may import whatever is installed:
    what it must not do is held back by the sandbox (docs/sandbox.md), not by a list of names.

    Args:
        additional_imports: Modules that the released package has to be asked for; here they need no permission.
    """

    def __init__(self, additional_imports: Sequence[str] | None = None) -> None:
        if isinstance(additional_imports, str):
            raise ConfigurationError(
                f"expected a list of modules as additional_imports, got {additional_imports!r}; write "
                f"[{additional_imports!r}]"
            )
        self._turn = threading.Lock()
        self._engine: _Engine | None = None
        self._session: SandboxSession | None = None
        self._bare = True

    def run(self, code: str) -> CodeExecResult:
        """Run code and wait for its end, never longer than the sandbox's limit of time.

        Raises:
            SandboxFailureError: The infrastructure failed, which is no result of the code's.
        """
        with self._turn:
            if self._engine is None:
                self._engine = _engine()
            engine = self._engine
            if self._session is None:
                self._session = session = engine.run(engine.sandbox.open, LIMITS)
                # Released environments drop an executor to begin anew; it has no close().
                weakref.finalize(self, engine.thread.call_detached, session.close).atexit = False
            if self._bare:
                _require_result(engine.run(self._session.execute, HELPERS))
                self._bare = False
            execution = engine.run(self._session.execute, code)
            self._bare = execution.state_lost
        return _result(_require_result(execution))


def _require_result(execution: Execution) -> Execution:
    if execution.status == SANDBOX_ERROR:
        raise SandboxUnavailableError(
            f"expected the sandbox to run code, got no result: {execution.reason or 'it failed'}; run it again"
        )
    return execution


def _result(execution: Execution) -> CodeExecResult:
    error = execution.error
    wrong = [execution.stderr]
    if error is not None:
        wrong.append("".join(error.traceback).rstrip("\n") or f"{error.ename}: {error.evalue}")
    if execution.reason:
        wrong.append(execution.reason)
    return CodeExecResult(
        stdout="\n".join(filter(None, (execution.stdout, execution.result))),
        stderr="\n".join(filter(None, wrong)),
        exit_code=execution.exit_code,
    )


class _Engine:
    """The sandbox of this process, and the thread that it lives in."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self.sandbox = Sandbox()
        try:
            self.thread.run(self.sandbox.start)
        except BaseException:
            self.thread.stop()
            raise

    def run(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
        """Run a coroutine function of the sandbox or of one of its sessions, and wait for it."""
        try:
            return self.thread.run(work, *args, **options)
        except ClientClosedError:
            raise SandboxClosedError(
                "expected an executor of this process, got one that it has from before it forked, or that has "
                "been closed with it; make a new one"
            ) from None

    def close(self) -> None:
        """End all of it, at the end of the process. Its thread is a daemon, and needs no end of its own."""

        async def end() -> None:
            asyncio.get_running_loop().set_default_executor(_Inline())
            with suppress(TimeoutError):
                await asyncio.wait_for(self.sandbox.close(), CLOSE_TIMEOUT_S)

        if not self.thread.is_forked:
            with suppress(ClientClosedError):
                self.thread.run(end)


class _Inline(ThreadPoolExecutor):
    """Runs in the calling thread: from Python 3.12 on, a process that is ending starts no other."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Return a finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# What is registered with atexit comes after the end of all thread pools, which closing needs; concurrent.futures
# itself registers here, and last comes first.
_at_exit: Final[Callable[..., Any]] = getattr(threading, "_register_atexit", atexit.register)
_lock = threading.Lock()
_shared: _Engine | None = None


def _engine() -> _Engine:
    global _shared
    with _lock:
        if _shared is None or _shared.thread.is_forked:
            _shared = _Engine()
            _at_exit(_shared.close)
        return _shared


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
