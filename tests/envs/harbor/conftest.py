"""Harbor tasks played in this process, on one event loop that all tests of the folder share."""

from collections.abc import Iterator
from typing import Any

import pytest
from docker_engine import engine
from harbor_tasks import TASKS
from missing import missing

from envs.harbor_env import HarborAction, HarborObservation, Run, Submit
from envs.harbor_env.server.environment import HarborEnvironment
from envs.harbor_env.server.machines import Machines, pack_folder
from envs.harbor_env.tasks import HarborTask, HarborTasks
from openenv_core.loop_thread import LoopThread
from openenv_core.sandbox import SandboxUnavailableError

__all__ = ["engine"]


class Player:
    """Plays one task after the other."""

    def __init__(self, thread: LoopThread, machines: Machines) -> None:
        self.thread, self.machines = thread, machines
        self.tasks = HarborTasks(TASKS)
        self.env = self.environment(self.tasks)

    def environment(self, tasks: HarborTasks) -> HarborEnvironment:
        return HarborEnvironment(tasks, self.machines)

    def reset(self, task: str) -> HarborObservation:
        return self.thread.run(self.env.reset_async, task=task)

    def step(self, action: HarborAction) -> HarborObservation:
        seen = self.thread.run(self.env.step_async, action)
        assert isinstance(seen, HarborObservation)
        return seen

    def run(self, command: str) -> HarborObservation:
        return self.step(Run(command=command))

    def submit(self) -> HarborObservation:
        return self.step(Submit())

    def solve(self, task: HarborTask) -> None:
        """Do what the task's own solution does."""
        machine: Any = self.env._machine
        packed = pack_folder(str(task.folder / "solution"), "solution")
        self.thread.run(machine.unpack, "/solution", packed)
        done = self.run("bash /solution/solve.sh")
        assert done.exit_code == 0, done


@pytest.fixture(scope="session")
def player() -> Iterator[Player]:
    thread, machines = LoopThread(), Machines()
    player = Player(thread, machines)
    try:
        thread.run(machines._sandbox)
    except SandboxUnavailableError as error:
        missing(f"needs name spaces for tasks without an image: docs/sandbox.md ({error})")
    yield player
    thread.run(player.env.close_async)
    thread.run(machines.close)
    thread.stop()
