"""What runs code, ours or another's: the seam between an environment and where its code runs."""

from typing import Protocol, runtime_checkable

from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.results import Execution, FileInfo


class Interpreter(Protocol):
    """One interpreter with state."""

    @property
    def session_id(self) -> str:
        """Its name, in results and logs."""

    @property
    def isolation(self) -> str:
        """What its code runs behind."""

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code. What it does is told by the result; a failure of the infrastructure by its `sandbox_error`.

        Args:
            code: Python source, run in the interpreter's one namespace.
            timeout_s: Seconds, where less than the limit of the session.
            stdin: What the code reads from standard input; None: nothing.

        Raises:
            SandboxClosedError: The interpreter was closed.
        """

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file of the workspace, and the folders above it.

        Raises:
            FileRefusedError: The path leaves the workspace, or a limit is reached.
            SandboxFailureError: The infrastructure failed.
        """

    async def get_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileRefusedError: There is no plain file there, or it is too large.
            SandboxFailureError: The infrastructure failed.
        """

    async def list_files(self) -> list[FileInfo]:
        """Return the files of the workspace, sorted by path.

        Raises:
            SandboxFailureError: The infrastructure failed.
        """

    async def restart(self) -> None:
        """Begin anew: an interpreter without variables, a workspace without files.

        Raises:
            SandboxFailureError: None can be had.
        """

    async def close(self) -> None:
        """End it and what belongs to it. Idempotent."""


@runtime_checkable
class Interruptible(Protocol):
    """An interpreter that can be made to stop what it runs and keep its state."""

    def interrupt(self) -> None:
        """Interrupt what runs, as its time-out would; nothing where nothing runs."""


class Backend(Protocol):
    """Opens interpreters; one a server process."""

    @property
    def isolation(self) -> str:
        """What the code of its interpreters runs behind; known once it has started."""

    async def start(self) -> None:
        """Make ready, and prove the isolation.

        Raises:
            SandboxUnavailableError: It cannot be had here.
        """

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> Interpreter:
        """Start an interpreter.

        Args:
            limits: Of the session.
            packages: Imported beforehand, so that importing them costs nothing.
            snapshot: Keeps the state of before an execution that had to be killed.

        Raises:
            SandboxUnavailableError: None can be had now.
            ConfigurationError: This backend has no such packages, or no snapshots.
        """

    async def close(self) -> None:
        """End everything. Idempotent."""
