"""Interpreters and their results: the interface between an environment and the backend that runs code for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from openenv_core.sandbox.config import Limits

Status: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed", "sandbox_error"]
"""How an execution ended. `sandbox_error` is a failure of the infrastructure; the code caused all others."""

EXIT_OK: Final = 0
EXIT_ERROR: Final = 1
EXIT_TIMEOUT: Final = 124
EXIT_INTERRUPTED: Final = 130
EXIT_KILLED: Final = 137
EXIT_SANDBOX: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeError:
    """An exception that the code did not catch.

    Attributes:
        ename: The name of its class.
        evalue: Its message.
        traceback: Lines as Python prints them, without the interpreter's own frames.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A displayed value: nbformat's bundle of its representations.

    Attributes:
        output_type: "execute_result" for the last expression, "display_data" for displayed values and figures.
        data: Representations by mime type; images in base64.
        metadata: Metadata by mime type, as in nbformat.
    """

    output_type: Literal["display_data", "execute_result"]
    data: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file in the workspace.

    Attributes:
        path: Path relative to the workspace, with slashes.
        size: Size in bytes.
        sha256: SHA-256 of the content, in hexadecimal.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """Which parts of a result were truncated because a limit was reached."""

    stdout: bool = False
    stderr: bool = False
    outputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of one execution.

    Attributes:
        status: How it ended.
        stdout: Output to descriptor 1, with invalid UTF-8 replaced.
        stderr: Output to descriptor 2, with invalid UTF-8 replaced.
        exit_code: 0 for ok, 1 for an error, the code of a `SystemExit`, 124 for a timeout, 130 for an interrupt, 137
            for a kill, -1 for a sandbox error.
        error: The exception that ended the code, if any.
        result: `repr` of the last expression's value; None if that is None or the code does not end in an expression.
        outputs: The displayed values, in order.
        execution_count: Number of executions of this interpreter, this one included.
        session_id: The interpreter's id.
        state_lost: Whether the interpreter ended too: variables and files are gone, and the next execution starts with
            a new one.
        cut: Which parts were truncated.
        signal: The signal that ended the interpreter's process, if any.
        execution_time_s: Seconds from the request to its end, measured outside the interpreter.
        max_rss_bytes: Peak resident memory so far, as reported by the interpreter itself.
        files: Files that are new or changed since the previous execution.
        isolation: What isolated it: an isolation level, or "remote".
        reason: A description of why it was ended, or of what is wrong with the infrastructure.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int = EXIT_OK
    error: CodeError | None = None
    result: str | None = None
    outputs: tuple[Output, ...] = ()
    execution_count: int = 0
    session_id: str = ""
    state_lost: bool = False
    cut: Truncated = field(default_factory=Truncated)
    signal: int | None = None
    execution_time_s: float = 0.0
    max_rss_bytes: int | None = None
    files: tuple[FileInfo, ...] = ()
    isolation: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """The result of calling a function that the code defined.

    Attributes:
        execution: How the call ended; its `result` and `outputs` are empty.
        value: The function's return value, if the status is "ok".
    """

    execution: Execution
    value: Any = None


class Interpreter(Protocol):
    """A stateful interpreter."""

    @property
    def session_id(self) -> str:
        """Its id in results and logs."""

    @property
    def isolation(self) -> str:
        """What isolates its code."""

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code and return its result. A failure of the infrastructure gives a result with `sandbox_error`.

        Args:
            code: Python source; all code of an interpreter shares one namespace.
            timeout_s: Timeout in seconds, if shorter than the session's limit.
            stdin: Content of standard input; None: empty.

        Raises:
            SandboxClosedError: The interpreter was closed.
        """

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file in the workspace, creating missing folders.

        Raises:
            FileRefusedError: The path leaves the workspace, or a limit is reached.
            SandboxFailureError: The infrastructure failed.
        """

    async def get_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileRefusedError: The path is not a regular file, or the file is too large.
            SandboxFailureError: The infrastructure failed.
        """

    async def list_files(self) -> list[FileInfo]:
        """Return the files in the workspace, sorted by path.

        Raises:
            SandboxFailureError: The infrastructure failed.
        """

    async def restart(self) -> None:
        """Replace the interpreter by a new one, without variables or files.

        Raises:
            SandboxFailureError: No interpreter can be started.
        """

    async def close(self) -> None:
        """End the interpreter and release its resources. Idempotent."""


@runtime_checkable
class Interruptible(Protocol):
    """An interpreter whose running code can be stopped without losing state."""

    def interrupt(self) -> None:
        """Interrupt the running code, as its timeout would; do nothing if none runs."""


@runtime_checkable
class Branching(Interpreter, Protocol):
    """An interpreter that can be forked together with its state."""

    async def fork(self, count: int) -> "Sequence[Branching]":
        """Return forks of the interpreter, each with its variables and a copy of its files, independent from then on.

        Raises:
            ConfigurationError: The interpreter was not opened with `snapshot`.
            SandboxFailureError: They cannot be made.
        """


class Backend(Protocol):
    """Opens interpreters. A server process has one backend."""

    @property
    def isolation(self) -> str:
        """What isolates the code of its interpreters; known after `start`."""

    async def start(self) -> None:
        """Prepare the backend, and test its isolation.

        Raises:
            SandboxUnavailableError: The backend does not work on this machine.
        """

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> Interpreter:
        """Start an interpreter.

        Args:
            limits: The session's limits.
            packages: Packages imported in advance, so that importing them costs nothing.
            snapshot: Whether to go back to the state before an execution that had to be killed; also allows forks.

        Raises:
            SandboxUnavailableError: No interpreter can be started at this time.
            ConfigurationError: The backend lacks these packages, or does not support snapshots.
        """

    async def close(self) -> None:
        """End all interpreters and the backend. Idempotent."""
