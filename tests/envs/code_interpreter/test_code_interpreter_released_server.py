"""Our typed client against a server that knows code alone; released ones are played in tests/interop."""

from typing import Any

import pytest
from serving import serving

from envs.code_interpreter_env import CodeInterpreterEnv, CodeInterpreterObservation, Execute
from openenv_core import Action, Environment, Observation, State, ValidationFailed, is_infrastructure_failure
from servers import create_app


class CodeAlone(Action):
    code: str


class Printed(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class Repeats(Environment[CodeAlone, Printed, State]):
    """Runs nothing: it repeats the code, and fails where it is told to."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Printed:
        return Printed()

    def step(self, action: CodeAlone) -> Printed:
        failed = action.code == "fail"
        return Printed(
            stdout=action.code,
            exit_code=int(failed),
            stderr="it failed" if failed else "",
            reward=0.5,
            metadata={"last_code": action.code},
        )

    @property
    def state(self) -> State:
        return State(last_exit_code=0)


async def test_code_alone_is_sent_once_a_type_was_refused() -> None:
    app = create_app(Repeats, CodeAlone, Printed)
    async with serving(app) as address, CodeInterpreterEnv(f"http://{address}") as env:
        sent: list[Any] = []
        payload = env._step_payload
        env._step_payload = lambda action: sent.append(made := payload(action)) or made  # type: ignore[method-assign]
        begun = (await env.reset()).observation
        assert begun == CodeInterpreterObservation()
        result = await env.execute("one")
        assert (result.observation.stdout, result.observation.status, result.reward) == ("one", "ok", 0.5)
        assert result.observation.metadata == {"last_code": "one"}
        failed = (await env.execute("fail")).observation
        # Such a server has no status; what it says is the code's fault, and nobody else's.
        assert (failed.status, failed.error, failed.state_lost) == ("error", None, False)
        assert not is_infrastructure_failure(failed)
        assert (await env.step({"code": "two"})).observation.stdout == "two"  # type: ignore[arg-type]
        assert sent == [Execute(code="one"), {"code": "one"}, {"code": "fail"}, {"code": "two"}]
        # What it cannot do is refused by it, and not left out.
        for refused in (
            env.execute("three", timeout_s=1.0),
            env.execute("three", stdin="in"),
            env.put_file("a", "b"),
            env.get_file("a"),
            env.restart(),
        ):
            with pytest.raises(ValidationFailed):
                await refused
        assert (await env.execute("four")).observation.stdout == "four"
