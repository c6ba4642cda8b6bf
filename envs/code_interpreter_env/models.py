"""Actions, observations and states of the code interpreter."""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from openenv_core import Action, Observation, State
from openenv_core.sandbox import CodeError, FileInfo, Output, Status, Truncated
from openenv_core.tools import CallToolAction, ListToolsAction

from .grading.verdict import Verdict

MAX_TIMEOUT_S: Final = 86_400.0
MAX_CODE_CHARS: Final = 1 << 20
MAX_STDIN_CHARS: Final = 8 << 20
MAX_PATH_CHARS: Final = 1024

EXECUTION: Final = "execution"
"""The key of `metadata` under which observations of the released shape carry the rest of an execution."""

Path: TypeAlias = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATH_CHARS,
        description="relative to the workspace: data/input.csv",
        examples=["a.txt"],
    ),
]
Code: TypeAlias = Annotated[str, Field(max_length=MAX_CODE_CHARS, description="Python source")]


def _check_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64, got: {error}") from None
    return text


Base64: TypeAlias = Annotated[
    str, AfterValidator(_check_base64), Field(json_schema_extra={"format": "base64"})
]


def _require_type_key(schema: dict[str, Any]) -> None:
    """Mark `type` as required in a JSON schema: only `Execute` may omit it."""
    schema["required"] = ["type", *schema.get("required", ())]


def _require_one_content(schema: dict[str, Any]) -> None:
    _require_type_key(schema)
    schema["oneOf"] = [
        {"required": [name], "properties": {name: {"type": "string"}, other: {"type": "null"}}}
        for name, other in (("content", "content_base64"), ("content_base64", "content"))
    ]


_TYPE_REQUIRED: Final = ConfigDict(json_schema_extra=_require_type_key)


class CodeInterpreterAction(Action):
    """What can be asked of an interpreter; one of the classes below. By itself it is none."""


class Execute(CodeInterpreterAction):
    """Runs code in the interpreter; what it leaves behind is there for the next.

    Attributes:
        code: Python source. The value of a last expression is the result.
        timeout_s: Seconds, where less than the session's limit.
        stdin: What the code reads from standard input.
    """

    type: Literal["execute"] = "execute"
    code: Code
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    stdin: Annotated[str, Field(max_length=MAX_STDIN_CHARS)] | None = None


class PutFile(CodeInterpreterAction):
    """Writes a file of the workspace, and the folders above it.

    Attributes:
        path: Relative to the workspace.
        content: What the file gets, as text; this or the next.
        content_base64: What the file gets, as base64.
    """

    model_config = ConfigDict(json_schema_extra=_require_one_content)

    type: Literal["put_file"] = "put_file"
    path: Path
    content: str | None = None
    content_base64: Base64 | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if (self.content is None) == (self.content_base64 is None):
            raise ValueError("expected either content or content_base64, got both or neither; give one")
        return self

    @property
    def data(self) -> bytes:
        """The content to write, as bytes."""
        if self.content_base64 is not None:
            return base64.b64decode(self.content_base64)
        return (self.content or "").encode()


class GetFile(CodeInterpreterAction):
    """Reads a file of the workspace.

    Attributes:
        path: Relative to the workspace.
    """

    model_config = _TYPE_REQUIRED

    type: Literal["get_file"] = "get_file"
    path: Path


class Restart(CodeInterpreterAction):
    """Begins anew: no variables, and of the files those alone that the reset brought."""

    model_config = _TYPE_REQUIRED

    type: Literal["restart"] = "restart"


class Submit(CodeInterpreterAction):
    """Hands in a solution of the episode's task. The episode ends once one passes, or no attempt is left.

    Attributes:
        code: The solution.
    """

    model_config = _TYPE_REQUIRED

    type: Literal["submit"] = "submit"
    code: Code


class ListTools(ListToolsAction):
    """Asks which tools there are: the actions above, as clients of tools take them."""

    model_config = _TYPE_REQUIRED


def _read_kind(value: Any) -> str | None:
    """Return the discriminator of an action: its `type`, or else "execute" for code and "call_tool" for a tool name."""
    if isinstance(value, Mapping):
        default_kind = "execute" if "code" in value else "call_tool" if "tool_name" in value else None
        kind = value.get("type", default_kind)
        return kind if isinstance(kind, str) else None
    return getattr(value, "type", None)


AnyAction: TypeAlias = Annotated[
    Annotated[Execute, Tag("execute")]
    | Annotated[PutFile, Tag("put_file")]
    | Annotated[GetFile, Tag("get_file")]
    | Annotated[Restart, Tag("restart")]
    | Annotated[Submit, Tag("submit")]
    | Annotated[ListTools, Tag("list_tools")]
    | Annotated[CallToolAction, Tag("call_tool")],
    Discriminator(_read_kind),
]
"""Every action that the server accepts, discriminated by `type`. Without a type, `{"code": ...}` is an `Execute` and
`{"tool_name": ...}` is a tool call."""


class FileContent(BaseModel):
    """The content of a requested file.

    Attributes:
        path: The path relative to the workspace.
        size: The size in bytes.
        content_base64: The content, as base64.
    """

    model_config = ConfigDict(extra="forbid")

    path: str
    size: int
    content_base64: str

    @property
    def data(self) -> bytes:
        """The file's content as bytes."""
        return base64.b64decode(self.content_base64)


class CodeObservation(Observation):
    """The output of an execution, in the shape of released coding environments, whose clients reject any other key.

    Attributes:
        stdout: The code's standard output.
        stderr: The code's standard error; in the released shape also the traceback of an uncaught exception, and the
            reason why the code was stopped.
        exit_code: 0 if the code ran to its end.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeInterpreterObservation(CodeObservation):
    """The result of an action.

    A reset without options of ours, and an action with only code, are answered as `CodeObservation`, with all other
    fields in `metadata["execution"]`. Parsing such a reply as this model moves them into its fields.

    Attributes:
        status: How the action ended. "sandbox_error" is the infrastructure's fault; all others are the code's.
        error: The uncaught exception, or the error of a file action.
        result: `repr` of the last expression's value.
        outputs: The displayed outputs in order, each in several mime types; figures are PNG in base64.
        execution_count: The number of executions of this interpreter so far.
        session_id: The id of the interpreter.
        state_lost: Whether variables and files have been lost; reported once.
        cut: Which outputs were truncated.
        signal: The signal that ended the interpreter's process.
        execution_time_s: Seconds from the request to the end of the execution.
        max_rss_bytes: The maximum resident set size so far, as reported by the interpreter.
        files: The files that are new or changed since the previous execution.
        isolation: The isolation level: "namespaces", "lsm", "seccomp" or "process"; "remote" in a service.
        reason: Why the code was stopped, or what failed in the infrastructure.
        file: The file that `get_file` read.
        prompt: The task's prompt, after a reset that chose a task.
        task: The public part of the task, after a reset that chose a task.
        verdict: The verdict on a submission; its reward is the observation's.
    """

    status: Status = "ok"
    error: CodeError | None = None
    result: str | None = None
    outputs: tuple[Output, ...] = ()
    execution_count: int = 0
    session_id: str = ""
    state_lost: bool = False
    cut: Truncated = Truncated()
    signal: int | None = None
    execution_time_s: float = 0.0
    max_rss_bytes: int | None = None
    files: tuple[FileInfo, ...] = ()
    isolation: str = ""
    reason: str | None = None
    file: FileContent | None = None
    prompt: str | None = None
    task: dict[str, Any] | None = None
    verdict: Verdict | None = None

    @model_validator(mode="before")
    @classmethod
    def _lift_released(cls, value: Any) -> Any:
        """Accept the released shape too, by moving `metadata["execution"]` to the top level."""
        if not isinstance(value, dict):
            return value
        if isinstance(metadata := value.get("metadata"), dict):
            execution = metadata.get(EXECUTION)
            if isinstance(execution, dict):
                rest = {name: entry for name, entry in metadata.items() if name != EXECUTION}
                return {**value, **execution, "metadata": rest}
        if "status" not in value and value.get("exit_code"):
            return {**value, "status": "error"}  # released servers report only the exit code
        return value


class CodeInterpreterState(State):
    """The state of an episode.

    Attributes:
        last_exit_code: The exit code of the last execution.
        execution_count: The number of executions of the interpreter so far.
        isolation: The isolation level; empty before the interpreter starts.
        session_id: The id of the interpreter; empty before it starts.
        task: The id of the task; None without a task.
        seed: The seed given to reset, which only chooses the task.
        done: Whether the episode has ended.
    """

    last_exit_code: int = 0
    execution_count: int = 0
    isolation: str = ""
    session_id: str = ""
    task: str | None = None
    seed: int | None = None
    done: bool = False
