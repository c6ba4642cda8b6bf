"""The sandbox for synchronous callers: the same objects, with each call run on a thread with an event loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from openenv_core.loop_thread import LoopThread
from openenv_core.sandbox.config import Isolation, Limits, SandboxConfig
from openenv_core.sandbox.results import Execution, FileInfo, FunctionCall
from openenv_core.sandbox.sandbox import Sandbox, SandboxSession


class SyncSession:
    """A session with synchronous methods. Made by `SyncSandbox.open`; see `SandboxSession`."""

    def __init__(self, session: SandboxSession, thread: LoopThread) -> None:
        self.session_id = session.session_id
        self._session = session
        self._thread = thread

    def execute(self, code: str, *, timeout_s: float | None = None, stdin: str | None = None) -> Execution:
        """Run code; see `SandboxSession.execute`."""
        return self._thread.run(self._session.execute, code, timeout_s=timeout_s, stdin=stdin)

    def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
    ) -> FunctionCall:
        """Call a function of the code; see `SandboxSession.call`."""
        return self._thread.run(self._session.call, function, args, kwargs, timeout_s=timeout_s, stdin=stdin)

    def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file; see `SandboxSession.put_file`."""
        return self._thread.run(self._session.put_file, path, data)

    def get_file(self, path: str) -> bytes:
        """Return a file's content; see `SandboxSession.get_file`."""
        return self._thread.run(self._session.get_file, path)

    def list_files(self) -> list[FileInfo]:
        """Return the files; see `SandboxSession.list_files`."""
        return self._thread.run(self._session.list_files)

    def restart(self) -> None:
        """Replace the interpreter by a new one; see `SandboxSession.restart`."""
        self._thread.run(self._session.restart)

    def close(self) -> None:
        """End the interpreter and remove its files. Idempotent."""
        self._thread.run(self._session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncSandbox:
    """A sandbox with synchronous methods, started at once.

    Example:
        with SyncSandbox() as sandbox, sandbox.open() as session:
            assert session.execute("1 + 1").result == "2"

    Args:
        config: The sandbox's settings.

    Raises:
        SandboxUnavailableError: No isolation level at or above the minimum works on this machine.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._sandbox = Sandbox(config)
        self._thread = LoopThread()
        try:
            self._thread.run(self._sandbox.start)
        except BaseException:
            self._thread.stop()
            raise

    @property
    def isolation(self) -> Isolation:
        """The isolation level that the self-test proved."""
        return self._sandbox.isolation

    def open(self, limits: Limits | None = None, *, snapshot: bool = False) -> SyncSession:
        """Start an interpreter; see `Sandbox.open`."""
        return SyncSession(self._thread.run(self._sandbox.open, limits, snapshot=snapshot), self._thread)

    def close(self) -> None:
        """End every session, the zygote and the thread. Idempotent."""
        if not self._thread.is_forked:
            try:
                self._thread.run(self._sandbox.close)
            finally:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
