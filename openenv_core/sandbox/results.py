"""Interpreters and their results: the interface between an environment and the backend that runs its code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from openenv_core.sandbox.config import Limits

Status: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed", "sandbox_error"]
"""How an execution ended. `sandbox_error` is the infrastructure's fault, all others the code's."""

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
        ename: The class's name.
        evalue: The message.
        traceback: Lines as Python prints them, without those of the interpreter around the code.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Something shown: nbformat's bundle of one value in several mime types.

    Attributes:
        output_type: "execute_result" for the last expression, "display_data" for what was displayed or drawn.
        data: Text by mime type; images as base64.
        metadata: By mime type, as in nbformat.
    """

    output_type: Literal["display_data", "execute_result"]
    data: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file of the workspace.

    Attributes:
        path: Relative to the workspace, with slashes.
        size: In bytes.
        sha256: Of the content, in hexadecimal digits.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """What was cut because a limit was reached."""

    stdout: bool = False
    stderr: bool = False
    outputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one execution did.

    Attributes:
        status: How it ended.
        stdout: What was written to descriptor 1, invalid UTF-8 replaced.
        stderr: What was written to descriptor 2.
        exit_code: 0 for ok, 1 for an error, what `SystemExit` carried, 124 for a time-out, 130 for an interrupt, 137
            for a kill, -1 for a sandbox error.
        error: The exception that ended the code.
        result: `repr` of the last expression's value; None where it was None, or no expression.
        outputs: What was shown, in order.
        execution_count: Executions of this interpreter so far, this one included.
        session_id: Of the interpreter.
        state_lost: The interpreter ended with it: variables and files are gone, and the next execution begins anew.
        cut: What was left out.
        signal: The signal that ended the interpreter's process.
        execution_time_s: From the request to its end, measured outside the interpreter.
        max_rss_bytes: The greatest resident size so far, as the interpreter itself reports it.
        files: Files that are new or different since the execution before.
        isolation: What ran it: a rung of the ladder, "container", or "remote".
        reason: In words, why it did not end by itself, or what is wrong with the infrastructure.
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
    """A function of the code, called from outside.

    Attributes:
        execution: How the call ended; its `result` and `outputs` are empty.
        value: What the function returned, where the status is "ok".
    """

    execution: Execution
    value: Any = None


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
        """Run code; returns its result. A failure of the infrastructure is a result with `sandbox_error`.

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
        """Start again with an interpreter without variables and a workspace without files.

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


@runtime_checkable
class Branching(Interpreter, Protocol):
    """An interpreter that can be forked with its state."""

    async def fork(self, count: int) -> "Sequence[Branching]":
        """Return so many more, each with the variables and a copy of the files; they go their own ways.

        Raises:
            ConfigurationError: It was not opened for that.
            SandboxFailureError: They cannot be had.
        """


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
