"""Harbor tasks played on one event loop that all tests of a module share."""

from collections.abc import Iterator

import pytest
from docker_engine import engine
from harbor_player import Player
from missing import missing

from envs.harbor_env.server.machines import Machines
from openenv_core.loop_thread import LoopThread
from openenv_core.sandbox import SandboxUnavailableError

__all__ = ["engine"]


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    thread, machines = LoopThread(), Machines()
    player = Player(thread, machines)
    try:
        thread.run(machines.sandbox)
    except SandboxUnavailableError as error:
        missing(f"needs a sandbox for tasks without an image: docs/harbor.md ({error})")
    yield player
    thread.run(player.env.close_async)
    thread.run(machines.close)
    thread.stop()
