"""Code that runs on this machine: a sandbox for each set of packages, as many as may be. Real sandboxes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from envs.code_interpreter_env.server.backends.local import LocalBackend
from envs.code_interpreter_env.server.settings import InterpreterSettings
from openenv_core.sandbox import Isolation, Limits, SandboxUnavailableError

SETTINGS = InterpreterSettings(
    packages=("colorsys", "wave"),
    strongest_isolation=Isolation.PROCESS,  # the quickest to start
    max_sandboxes=2,
    tasks="none",
)
LOADED = "import sys; [name for name in ('colorsys', 'wave') if name in sys.modules]"


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    found = LocalBackend(SETTINGS, Isolation.PROCESS)
    await found.start()
    yield found
    await found.close()
    await found.close()


async def test_each_set_of_packages_has_a_sandbox_and_idle_ones_make_room(backend: LocalBackend) -> None:
    assert backend.isolation == "process"
    plain = await backend.open(Limits())
    assert (await plain.execute(LOADED)).result == "[]"
    one, two = await asyncio.gather(*(backend.open(Limits(), packages=("wave",)) for _ in range(2)))
    assert (await one.execute(LOADED)).result == "['wave']"
    assert (await two.execute(LOADED)).result == "['wave']"
    with pytest.raises(SandboxUnavailableError, match="at most 2 sets"):
        await backend.open(Limits(), packages=("colorsys",))
    await one.close()
    await two.close()
    other = await backend.open(Limits(), packages=("colorsys",))
    assert (await other.execute(LOADED)).result == "['colorsys']"
    assert (await plain.execute("1")).status == "ok"  # it was not idle
    with pytest.raises(SandboxUnavailableError, match="at most 2 sets"):
        await backend.open(Limits(), packages=("wave",))


async def test_a_set_that_does_not_start_is_tried_again(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openenv_core.sandbox.sandbox import Sandbox

    async def fails(_: Sandbox) -> None:
        raise SandboxUnavailableError("expected a good day, got another")

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "start", fails)
        for _ in range(2):
            with pytest.raises(SandboxUnavailableError, match="good day"):
                await backend.open(Limits(), packages=("wave",))
    assert (await (await backend.open(Limits(), packages=("wave",))).execute("1")).status == "ok"
