"""The bodies of the sandbox interface: what is asked for, and what is told of a sandbox."""

import re
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

ROOT: Final = "/v1/sandboxes"
"""The path of the collection. A service may stand below another path, which is part of its base URL."""

MAX_WAIT_S: Final = 30.0
"""The longest time that a service holds back an answer while a sandbox starts."""

MAX_LOG_BYTES: Final = 64 * 1024
"""The most that a service tells of what a sandbox has printed."""

SANDBOX_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""It becomes a part of a path, so it is neither of those that have a meaning there."""

Word = Annotated[str, StringConstraints(max_length=8192)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]


class SandboxState(StrEnum):
    """Where a sandbox stands. It goes from left to right only."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class SandboxSpec(BaseModel):
    """What a sandbox runs, and within which limits. A service refuses what it cannot honour.

    Attributes:
        image: The container image; None: the command runs without one, where the service allows that.
        command: Words of the command; for an image, instead of its own. `{port}` in them is replaced.
        port: Where the server inside listens. For a command without an image the service chooses the port,
            and tells it by `{port}` and by the environment variable PORT.
        env_vars: Environment variables of the server.
        memory_bytes: The limit on its memory.
        cpus: The limit on its CPU time, in cores.
        pids: The limit on its processes and threads.
        network: `none`: what runs inside reaches nothing; its port is exposed all the same.
        lease_s: Seconds that the sandbox lives without being asked to live on.
        start_timeout_s: Seconds until its server must be healthy.
    """

    model_config = ConfigDict(extra="forbid")

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    command: Annotated[list[Word], Field(min_length=1, max_length=256)] | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    env_vars: Annotated[dict[EnvName, EnvValue], Field(max_length=256, repr=False)] = {}
    memory_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    pids: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    network: Literal["bridge", "none"] | None = None
    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)] = 60.0

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if self.image is None and self.command is None:
            raise ValueError("expected an image or a command to run, got neither")
        return self


class Lease(BaseModel):
    """How much longer a sandbox is to live, from now on."""

    model_config = ConfigDict(extra="forbid")

    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Sandbox(BaseModel):
    """What a service tells of a sandbox. Further keys are a service's own, and are ignored.

    Attributes:
        id: Its name at this service.
        state: Where it stands.
        url: Where its port is reached, once it runs; relative to the request's own where it has no scheme.
        expires_in_s: Seconds until its lease runs out.
        reason: Why it ended, in words.
    """

    id: Annotated[str, StringConstraints(pattern=rf"^{SANDBOX_ID.pattern}$")]
    state: SandboxState
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    expires_in_s: float | None = None
    reason: str | None = None


class Refused(BaseModel):
    """An answer that is no success.

    Attributes:
        detail: What was expected, what came, what to do.
        code: One word for it, for programs.
    """

    detail: str = ""
    code: str = ""
