"""Actors for the tests of services. The replicas' processes import them by these names."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

from monarch.actor import concurrent_endpoint, context, endpoint

from rl_bridge.errors import GeneratorError, ModelError, TrainingError, WeightsError
from rl_bridge.services.actor import ServiceActor

CALLS = itertools.count()


async def pause(wait: float | Path) -> None:
    """Take some seconds; or as long as a file is there, with a note beside it that the call has begun."""
    if isinstance(wait, Path):
        (wait.parent / f"held-{os.getpid()}-{next(CALLS)}").touch()
        while wait.exists():  # noqa: ASYNC110, ASYNC240 - a test removes it
            await asyncio.sleep(0.02)
    else:
        await asyncio.sleep(wait)


class Role(ServiceActor):
    @concurrent_endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Policy(Role):
    """Takes weights, answers with what it holds."""

    REPLAYED = ("load", "tune")
    REPEATABLE = frozenset({"generate"})

    def __init__(self, start: Path | None = None) -> None:
        self._start = start
        self._version: int | None = None
        self._heat = 0.0
        self._broken = False
        self._sick = False

    @concurrent_endpoint
    async def setup(self) -> None:
        """Wait as long as a file says, and leave a note that it came so far."""
        print(f"setting up {os.getpid()}", flush=True)  # noqa: T201 - it is looked for in the log
        if self._start is not None:
            (self._start / f"began-{os.getpid()}").touch()
            if (self._start / "refuse").exists():
                raise ModelError("expected a model, there is none")
            while (self._start / "wait").exists():  # noqa: ASYNC110 - another process makes it go
                await asyncio.sleep(0.02)

    @concurrent_endpoint
    async def load(
        self, version: int, wait: float | Path = 0.0, refused_by: int | None = None, gone: Path | None = None
    ) -> int:
        await pause(wait)
        if refused_by in (0, os.getpid()):
            raise GeneratorError(f"no weights {version} for me")
        if gone is not None and gone.exists():  # noqa: ASYNC240 - a test's
            raise WeightsError(f"the publisher of {version} has died")
        self._version = version
        return version

    @concurrent_endpoint
    async def tune(self, heat: float) -> None:
        self._heat = heat

    @concurrent_endpoint
    async def generate(self, wait: float | Path = 0.0) -> tuple[int, int | None, float]:
        await pause(wait)
        if self._broken:
            raise GeneratorError("the engine is dead")
        return os.getpid(), self._version, self._heat

    @concurrent_endpoint
    async def once(self, wait: float | Path = 0.0) -> int:
        await pause(wait)
        return os.getpid()

    @concurrent_endpoint
    async def block(self) -> None:
        """Block the event loop, as a task may that parses an answer."""
        time.sleep(600)  # noqa: ASYNC251

    @concurrent_endpoint
    async def fail(self, ours: bool) -> None:
        if ours:
            raise TrainingError("the loss is strange")
        raise ZeroDivisionError("not one of ours")

    @concurrent_endpoint
    async def break_down(self, pid: int, sick: bool) -> None:
        """From now on the replica with this process fails every call; health too, where it is sick."""
        if pid == os.getpid():
            self._broken, self._sick = True, sick

    @concurrent_endpoint
    async def health(self) -> None:
        if self._sick:
            raise GeneratorError("the engine is dead")

    @concurrent_endpoint
    async def close(self) -> None:
        if self._start is not None:
            (self._start / f"closed-{os.getpid()}").touch()


class Leaving(ServiceActor):
    """Is through with its end only when others have begun with theirs."""

    def __init__(self, folder: Path, others: int) -> None:
        self._folder = folder
        self._others = others

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def close(self) -> None:
        (self._folder / f"leaving-{os.getpid()}").touch()
        while len(list(self._folder.glob("leaving-*"))) < self._others:  # noqa: ASYNC110 - other processes'
            await asyncio.sleep(0.02)
        (self._folder / f"left-{os.getpid()}").touch()


class Ranks(Role):
    """Several processes that act as one."""

    @endpoint
    async def step(self, value: int) -> tuple[int, int, int]:
        return context().actor_instance.rank.rank, os.getpid(), value

    @endpoint
    async def wait_for_others(self) -> None:
        if context().actor_instance.rank.rank == 1:
            raise TrainingError("this rank cannot go on")
        await asyncio.sleep(600)


class Parent(ServiceActor):
    """Has a child of its own, which knows nothing of Monarch."""

    @concurrent_endpoint
    async def fork_interpreter(self) -> int:
        code = "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid  # noqa: ASYNC220


class Unmakable(ServiceActor):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise ValueError("never made")
