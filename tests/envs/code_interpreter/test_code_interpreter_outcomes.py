"""Whose fault it was, by a trainer's own question: nothing that code does is the infrastructure's, and the reverse."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from serving import PATIENCE_S, serving

from envs.code_interpreter_env import CodeInterpreterEnv, CodeInterpreterObservation, Execute
from envs.code_interpreter_env.server.app import app
from openenv_core import (
    Action,
    Environment,
    GenericEnvClient,
    Observation,
    State,
    ValidationFailed,
    infrastructure_failure,
    is_infrastructure_failure,
    unscored_reason,
)
from servers import create_app

HOSTILE = (
    "1 / 0",
    "raise SystemExit(-1)",
    "import os; os._exit(255)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os; os.kill(os.getppid(), 9)",
    "import os; [os.close(fd) for fd in range(3, 64)]",
    "print('sandbox_error'); raise RuntimeError('sandbox_error')",
    "class SandboxUnavailable(Exception): pass\nraise SandboxUnavailable('sandbox_error')",
    "bytearray(1 << 40)",
    "while True: pass",
    "while True: print('x' * 65536)",
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(app) as address:
        yield f"http://{address}"


def zygotes() -> list[psutil.Process]:
    """Return the processes of this one that interpreters are forked from."""
    found = []
    for process in psutil.Process().children():
        try:
            if any(part.endswith("sandbox/inside/boot.py") for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
async def test_nothing_that_code_does_is_the_infrastructures(url: str) -> None:
    async with CodeInterpreterEnv(url) as env, GenericEnvClient(url) as released:
        for code in HOSTILE:
            await env.reset(limits={"timeout_s": 1.0, "grace_s": 0.1})
            result = await env.execute(code)
            assert result.observation.status != "sandbox_error", code
            assert not is_infrastructure_failure(result), code
            assert unscored_reason(result) is None
        for code in HOSTILE[:-2]:
            await released.reset()
            assert not is_infrastructure_failure(await released.step({"code": code})), code


async def test_a_killed_zygote_is_and_the_next_episode_is_sound(url: str) -> None:
    async with CodeInterpreterEnv(url) as env, GenericEnvClient(url) as released:
        for client in (env, released):
            await client.reset()
            await client.step({"code": "x = 'kept'"})
        before = zygotes()
        assert before
        for process in before:
            process.kill()
        for client in (env, released):
            async with asyncio.timeout(PATIENCE_S):
                while not (
                    failure := infrastructure_failure(told := await client.step({"code": "print(x)"}))
                ):
                    # The interpreters end a moment after what they were forked from.
                    assert "kept" in str(told.observation)
            assert infrastructure_failure(told.observation) == failure
            await client.reset()
            sound = await client.step({"code": "print(2)"})
            assert not is_infrastructure_failure(sound)


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
        for refused in (env.execute("three", timeout_s=1.0), env.execute("three", stdin="in"), env.restart()):
            with pytest.raises(ValidationFailed):
                await refused
        assert (await env.execute("four")).observation.stdout == "four"
