"""Plays Harbor tasks in this process."""

from typing import Any

from harbor_tasks import TASKS

from envs.harbor_env import HarborAction, HarborObservation, Run, Submit
from envs.harbor_env.server.environment import HarborEnvironment
from envs.harbor_env.server.machines import Machines, pack_folder
from envs.harbor_env.tasks import HarborTask, HarborTasks
from openenv_core.loop_thread import LoopThread


class Player:
    """Plays one task after another."""

    def __init__(self, thread: LoopThread, machines: Machines) -> None:
        self.thread, self.machines = thread, machines
        self.tasks = HarborTasks(TASKS)
        self.env = self.environment(self.tasks)

    def environment(self, tasks: HarborTasks) -> HarborEnvironment:
        return HarborEnvironment(tasks, self.machines)

    def reset(self, task: str) -> HarborObservation:
        return self.thread.run(self.env.reset_async, task=task)

    def step(self, action: HarborAction) -> HarborObservation:
        observation = self.thread.run(self.env.step_async, action)
        assert isinstance(observation, HarborObservation)
        return observation

    def run(self, command: str) -> HarborObservation:
        return self.step(Run(command=command))

    def submit(self) -> HarborObservation:
        return self.step(Submit())

    def solve(self, task: HarborTask) -> None:
        """Run the task's own solution."""
        machine: Any = self.env._machine
        packed = pack_folder(task.folder / "solution", "/solution")
        self.thread.run(machine.unpack, "/solution", packed)
        done = self.run("bash /solution/solve.sh")
        assert done.exit_code == 0, done
