"""Actions, observations and states of the Harbor environment."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from openenv_core import Action, Observation, State
from openenv_core.tools import CallToolAction, ListToolsAction

Path: TypeAlias = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[^\x00]+$",
        description="absolute, or relative to the working folder",
        examples=["answer.txt"],
    ),
]
Text: TypeAlias = Annotated[str, Field(max_length=4 << 20, pattern=r"^[^\x00]*$")]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=86_400)]

Status: TypeAlias = Literal["ok", "refused", "timeout", "output_limit", "killed", "sandbox_error"]
"""`refused`: a file could not be read or written; `killed`: a command brought down its sandbox or container;
`sandbox_error`: the infrastructure failed, through no fault of the policy."""


class HarborAction(Action):
    """What can be done in a task; one of the classes below. By itself it is none."""


class Run(HarborAction):
    """Runs a command in a shell, in the working folder. What it starts in the background runs on.

    Attributes:
        command: As one types it.
        timeout_s: Seconds, after which all that runs is ended; no more than the task has left.
    """

    type: Literal["run"] = "run"
    command: Annotated[str, Field(min_length=1, max_length=100_000, pattern=r"^[^\x00]+$")]
    timeout_s: Seconds | None = None


class ReadFile(HarborAction):
    """Reads a file of text, 64 KiB of it at most."""

    type: Literal["read_file"] = "read_file"
    path: Path


class WriteFile(HarborAction):
    """Writes a file, and the folders above it."""

    type: Literal["write_file"] = "write_file"
    path: Path
    content: Text


class EditFile(HarborAction):
    """Replaces a text that stands in a file exactly once."""

    type: Literal["edit_file"] = "edit_file"
    path: Path
    old: Annotated[Text, Field(min_length=1)]
    new: Text


class Submit(HarborAction):
    """Ends the episode: nothing that was started runs on, and the task's tests judge what was left."""

    type: Literal["submit"] = "submit"


AnyAction: TypeAlias = Annotated[
    Run | ReadFile | WriteFile | EditFile | Submit | ListToolsAction | CallToolAction,
    Field(discriminator="type"),
]
"""Every action that `step` accepts, discriminated by `type`."""


class HarborObservation(Observation):
    """The result of an action, or the task after a reset.

    Attributes:
        task: The task's prompt, after a reset.
        status: How the action ended.
        reason: The reason if the status is not "ok".
        output: A command's standard output and standard error, or the content of a file.
        cut: Whether the output was truncated.
        exit_code: The command's exit code.
        rewards: All rewards that the verifier wrote, by name, after the end.
        verifier_output: The end of the verifier's output, after the end.
    """

    task: str | None = None
    status: Status = "ok"
    reason: str | None = None
    output: str = ""
    cut: bool = False
    exit_code: int | None = None
    rewards: dict[str, float] | None = None
    verifier_output: str = ""


class HarborState(State):
    """The state of an episode."""

    task: str | None = Field(default=None, description="the id of the task; null before a reset")
    split: str | None = None
    index: int | None = None
    seed: int | None = Field(default=None, description="what chose the task, unless it was named")
    kind: Literal["process", "container"] | None = Field(default=None, description="what it runs in")
    done: bool = False
