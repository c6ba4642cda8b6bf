"""A coding server with the wire of released ones: code in, its output out. Runs in containers."""

import contextlib
import io
import os
import traceback

from openenv_core import Action, Environment, Observation, State
from servers import create_app


class CodeAction(Action):
    code: str


class CodeObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class Coding(Environment[CodeAction, CodeObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._names: dict[str, object] = {}

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> CodeObservation:
        self._names = {}
        return CodeObservation()

    def step(self, action: CodeAction) -> CodeObservation:
        wrote, erred = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(wrote), contextlib.redirect_stderr(erred):
            try:
                exec(action.code, self._names)
            except BaseException:
                traceback.print_exc()
                return CodeObservation(stdout=wrote.getvalue(), stderr=erred.getvalue(), exit_code=1)
        return CodeObservation(stdout=wrote.getvalue(), stderr=erred.getvalue())

    @property
    def state(self) -> State:
        return State()


app = create_app(Coding, CodeAction, CodeObservation, env_name="coding", max_concurrent_envs=4)

if __name__ == "__main__":
    import uvicorn

    os.chdir("/tmp")
    uvicorn.run(app, host="0.0.0.0", port=8000, log_level="warning")
