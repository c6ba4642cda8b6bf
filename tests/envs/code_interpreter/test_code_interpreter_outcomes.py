"""Whose fault it was, by a trainer's own question: nothing that code does is the infrastructure's, and the reverse."""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
from serving import PATIENCE_S, serving

from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.server.app import app
from openenv_core import GenericEnvClient, infrastructure_failure, is_infrastructure_failure, unscored_reason

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
