"""Runs what it is given, and begins anew with each reset by making another executor."""

import uuid

from openenv.core.env_server.interfaces import Action, Environment, Observation

from ..models import CodeAction, CodeObservation, CodeState
from .python_executor import PyExecutor
from .transforms import careful


class CodingEnvironment(Environment):
    """Runs Python."""

    def __init__(self):
        self.transform = careful()
        self._executor = PyExecutor()
        self._state = CodeState()

    def reset(self) -> Observation:
        self._state = CodeState(episode_id=str(uuid.uuid4()), step_count=0)
        self._state.last_exit_code = 0
        self._executor = PyExecutor()
        self.transform = careful()
        return self._apply_transform(CodeObservation(stdout="", stderr="", exit_code=0))

    def step(self, action: Action) -> Observation:
        if not isinstance(action, CodeAction):
            raise ValueError(f"expected CodeAction, got {type(action)}")
        result = self._executor.run(action.code)
        self._state.step_count += 1
        self._state.last_exit_code = result.exit_code
        return self._apply_transform(
            CodeObservation(
                stdout=result.stdout,
                stderr=result.stderr,
                exit_code=result.exit_code,
                metadata={"last_code": action.code},
            )
        )

    @property
    def state(self) -> CodeState:
        return self._state
