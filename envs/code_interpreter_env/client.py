"""The client of a code interpreter."""

import base64
from collections.abc import Mapping
from typing import Any

from openenv_core import EnvClient, StepResult
from openenv_core.errors import ExecutionError, ValidationFailedError

from .models import (
    CodeInterpreterAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    Execute,
    GetFile,
    PutFile,
    Restart,
    Submit,
)


class CodeInterpreterEnv(EnvClient[CodeInterpreterAction, CodeInterpreterObservation, CodeInterpreterState]):
    """A session on a code interpreter server.

    Besides `seed` and `episode_id`, `reset` takes the options `packages`, `limits`, `files`, `snapshot` and `task`;
    see :class:`.server.environment.CodeInterpreterEnvironment`. The methods below are shorthands for `step`; the
    client that `sync()` returns has them too.

    The client also works with released coding servers, whose actions have only a `code` field: when the server rejects
    an action because of its `type`, only the code is sent from then on. Fields that such a server does not send keep
    their defaults.
    """

    action_type = CodeInterpreterAction
    observation_type = CodeInterpreterObservation
    state_type = CodeInterpreterState
    # The package is named envs.code_interpreter_env here and code_interpreter_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
    _code_only = False

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> StepResult[CodeInterpreterObservation]:
        """Run code."""
        return await self.step(Execute(code=code, timeout_s=timeout_s, stdin=stdin))

    async def put_file(self, path: str, data: str | bytes) -> StepResult[CodeInterpreterObservation]:
        """Write a file to the workspace; text is encoded as UTF-8."""
        if isinstance(data, str):
            return await self.step(PutFile(path=path, content=data))
        return await self.step(PutFile(path=path, content_base64=base64.b64encode(data).decode()))

    async def get_file(self, path: str) -> bytes:
        """Return the content of a file in the workspace.

        Raises:
            FileNotFoundError: The file cannot be read; the message says why.
            ExecutionError: The infrastructure failed.
        """
        observation = (await self.step(GetFile(path=path))).observation
        if observation.file is not None:
            return observation.file.data
        if observation.error is not None:
            raise FileNotFoundError(observation.error.evalue)
        raise ExecutionError(observation.reason or f"the server gave no content of {path}")

    async def restart(self) -> StepResult[CodeInterpreterObservation]:
        """Restart the interpreter with only the files given at reset."""
        return await self.step(Restart())

    async def submit(self, code: str) -> StepResult[CodeInterpreterObservation]:
        """Submit a solution of the task."""
        return await self.step(Submit(code=code))

    async def step(self, action: CodeInterpreterAction) -> StepResult[CodeInterpreterObservation]:
        """Apply an action and return its result; see `EnvClient.step`."""
        try:
            return await super().step(action)
        except ValidationFailedError as refusal:
            if self._code_only or not _is_type_refusal(refusal):
                raise
            self._code_only = True
            return await super().step(action)

    def _step_payload(self, action: CodeInterpreterAction) -> Any:
        payload = super()._step_payload(action)
        if self._code_only and isinstance(payload, Execute):
            # A timeout or stdin stays in the payload, so that a server that lacks them rejects the action.
            return payload.model_dump(exclude={"type"}, exclude_defaults=True)
        # Without a type, the server would reply in the released shape.
        if (
            not self._code_only
            and isinstance(payload, Mapping)
            and "code" in payload
            and "type" not in payload
        ):
            return {"type": "execute", **payload}
        return payload


def _is_type_refusal(refusal: ValidationFailedError) -> bool:
    return any(
        error.get("type") == "extra_forbidden" and tuple(error.get("loc", ())) == ("type",)
        for error in refusal.errors
    )
