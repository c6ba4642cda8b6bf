"""The released package's executor of Python code, implemented with the sandbox.

A released environment creates a `PyExecutor` per session and calls `run` from a thread. Here each executor is an
interpreter in its own process; the executors of one server process share the sandbox that starts them.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final

from openenv_core.compat.types import CodeExecResult
from openenv_core.errors import ClientClosedError, ConfigurationError
from openenv_core.loop_thread import LoopThread, shared_loop
from openenv_core.outcomes import SANDBOX_ERROR
from openenv_core.sandbox import (
    Execution,
    Limits,
    Sandbox,
    SandboxClosedError,
    SandboxSession,
    SandboxUnavailableError,
)

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
        self._thread: LoopThread | None = None
        self._session: SandboxSession | None = None
        self._needs_setup = True

    def run(self, code: str) -> CodeExecResult:
        """Run code and wait for its end, at most for the sandbox's timeout.

        Raises:
            SandboxFailureError: The infrastructure failed, as opposed to the code.
        """
        with self._lock:
            self._thread = self._thread or shared_loop()
            try:
                return self._thread.run(self._execute, code)
            except ClientClosedError:
                raise SandboxClosedError(
                    "expected an executor of this process, got one that it has from before it forked; make a new one"
                ) from None

    async def _execute(self, code: str) -> CodeExecResult:
        if self._session is None:
            self._session = session = await (await _shared_sandbox()).open(LIMITS)
            # Released environments drop an executor to start afresh; it has no close().
            weakref.finalize(self, shared_loop().call_detached, session.close).atexit = False
        if self._needs_setup:
            _require_result(await self._session.execute(HELPERS))
            self._needs_setup = False
        execution = await self._session.execute(code)
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


_sandboxes: Final[dict[int, "asyncio.Future[Sandbox]"]] = {}
"""By process, since a fork needs its own: the sandbox of all executors, which ends with the process."""


async def _shared_sandbox() -> Sandbox:
    sandbox = _sandboxes.get(os.getpid())
    if sandbox is None or (sandbox.done() and sandbox.exception() is not None):
        sandbox = _sandboxes[os.getpid()] = asyncio.ensure_future(_start_sandbox())
    return await asyncio.shield(sandbox)


async def _start_sandbox() -> Sandbox:
    sandbox = Sandbox()
    await sandbox.start()
    return sandbox
