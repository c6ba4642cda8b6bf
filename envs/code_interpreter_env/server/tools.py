"""The actions of an interpreter as tools, for callers who know tools alone: MCP hosts, and chat templates."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from openenv_core.errors import EpisodeOverError
from openenv_core.sandbox import FileInfo
from openenv_core.tools import (
    DeclaredTools,
    ToolContext,
    ToolErrorType,
    ToolFailedError,
    ToolResult,
    ToolUnavailableError,
    tool,
)

from ..models import (
    MAX_TIMEOUT_S,
    Base64,
    Code,
    CodeInterpreterAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    Execute,
    GetFile,
    Path,
    PutFile,
)
from .observations import file_result, run_result

Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class InterpreterTools(DeclaredTools):
    """Tools that are actions: what one of them does is what the action does, and counts as a step likewise."""

    _state: CodeInterpreterState

    async def _act(
        self,
        action: CodeInterpreterAction,
        timeout_s: float | None = None,
        context: ToolContext | None = None,
    ) -> CodeInterpreterObservation:
        raise NotImplementedError

    async def _listed(self) -> list[FileInfo]:
        raise NotImplementedError

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Count a step."""
        self._count()

    def _count(self) -> None:
        if self._state.done:
            raise EpisodeOverError
        self._state.step_count += 1

    @tool(title="Run Python", annotations={"readOnlyHint": False, "openWorldHint": False})
    async def run_python(
        self, code: Code, context: ToolContext, timeout_s: Seconds | None = None
    ) -> ToolResult:
        """Run Python in an interpreter that keeps its variables and files from call to call.

        The value of a last expression is shown, and so is what was printed; figures come as images.

        Args:
            code: Python source.
            context: Told every second how long it has run.
            timeout_s: Seconds, where less than the session's limit.
        """
        action = Execute(type="execute", code=code, timeout_s=timeout_s)
        return run_result(await self._act(action, context=context))

    @tool(title="Read a file", annotations={"readOnlyHint": True, "openWorldHint": False})
    async def read_file(self, path: Path) -> ToolResult:
        """Read a file of the workspace: text as it is, pictures as images, anything else as a document.

        Args:
            path: Relative to the workspace: data/input.csv
        """
        seen = await self._act(GetFile(path=path))
        _refuse(seen)
        assert seen.file is not None
        return file_result(path, seen.file.data)

    @tool(
        title="Write a file",
        annotations={"readOnlyHint": False, "idempotentHint": True, "openWorldHint": False},
    )
    async def write_file(
        self, path: Path, content: str | None = None, content_base64: Base64 | None = None
    ) -> ToolResult:
        """Write a file of the workspace, and the folders above it; one that is there is replaced.

        Args:
            path: Relative to the workspace: data/input.csv
            content: What the file gets, as text; this or content_base64.
            content_base64: What the file gets, as base64.
        """
        if (content is None) == (content_base64 is None):
            message = "expected either content or content_base64, got both or neither; give one of them"
            return ToolResult.failed(ToolErrorType.INVALID_ARGS, message)
        seen = await self._act(PutFile(path=path, content=content, content_base64=content_base64))
        _refuse(seen)
        return ToolResult.of(asdict(seen.files[0]))

    @tool(title="List the files", annotations={"readOnlyHint": True, "openWorldHint": False})
    async def list_files(self) -> list[FileInfo]:
        """List the files of the workspace."""
        return await self._listed()


def _refuse(seen: CodeInterpreterObservation) -> None:
    """Raise what an action on a file has come to, where it has come to nothing."""
    if seen.status == "sandbox_error":
        raise ToolUnavailableError(seen.reason or "the sandbox failed")
    if seen.error is not None:
        raise ToolFailedError(seen.error.evalue)
