"""The start-up self-test: a level is what a few attacks have failed against, not what the kernel says it offers."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox.errors import SandboxUnavailable
from openenv_core.sandbox.levels import Isolation
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.probes import source
from openenv_core.sandbox.session import Session

CONTENT: Final = "a canary of the self-test\n"


async def prove(isolation: Isolation, open_session: Callable[[Limits], Awaitable[Session]]) -> None:
    """Attack from within an interpreter.

    Args:
        isolation: The rung that is to be proved.
        open_session: Starts an interpreter on it.

    Raises:
        SandboxUnavailable: An attack was not stopped, or the interpreter does not work.
    """
    session = await open_session(Limits(timeout_s=10.0))
    try:
        with _canary() as told:
            defined = await session.execute(source(isolation))
            if defined.status != "ok":
                raise SandboxUnavailable(
                    f"an interpreter that runs code did not: {defined.error or defined.reason}"
                )
            call = await session.call("attack", [told])
            if call.execution.status != "ok":
                said = call.execution.error or call.execution.reason
                raise SandboxUnavailable(f"the self-test did not end: {said}")
            passed = list(call.value)
            if await asyncio.to_thread(Path(told["canary"]).read_text) != CONTENT:
                passed.append("the canary has changed")
            if passed:
                raise SandboxUnavailable(
                    f"the self-test was not stopped where it had to be: {', '.join(passed)}"
                )
    finally:
        await session.close()


@contextmanager
def _canary() -> Iterator[dict[str, Any]]:
    # Open to everybody, so that nothing but the sandbox stands before it.
    with tempfile.TemporaryDirectory(prefix="ropewalk-canary-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        file = folder / "canary"
        file.write_text(CONTENT)
        file.chmod(0o666)
        yield {"supervisor": os.getpid(), "canary": str(file), "folder": str(folder)}
