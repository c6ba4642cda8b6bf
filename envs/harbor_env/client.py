"""The client of the Harbor environment."""

from openenv_core import EnvClient, StepResult

from .models import (
    EditFile,
    HarborAction,
    HarborObservation,
    HarborState,
    ReadFile,
    Run,
    Submit,
    WriteFile,
)


class HarborEnv(EnvClient[HarborAction, HarborObservation, HarborState]):
    """A session on a server of Harbor tasks.

    Besides `seed` and `episode_id`, `reset` takes the options `split` and `index`, or `task`, which is an id. The
    methods below are shorthands for `step`; the client that `sync()` returns has them too.
    """

    action_type = HarborAction
    observation_type = HarborObservation
    state_type = HarborState
    # The package is named envs.harbor_env in this repository and harbor_env once installed by itself.
    default_app = f"{__package__}.server.app:app"

    async def run(self, command: str, *, timeout_s: float | None = None) -> StepResult[HarborObservation]:
        """Run a shell command."""
        return await self.step(Run(command=command, timeout_s=timeout_s))

    async def read_file(self, path: str) -> StepResult[HarborObservation]:
        """Read a text file."""
        return await self.step(ReadFile(path=path))

    async def write_file(self, path: str, content: str) -> StepResult[HarborObservation]:
        """Write a file."""
        return await self.step(WriteFile(path=path, content=content))

    async def edit_file(self, path: str, old: str, new: str) -> StepResult[HarborObservation]:
        """Replace a text that occurs exactly once in a file."""
        return await self.step(EditFile(path=path, old=old, new=new))

    async def submit(self) -> StepResult[HarborObservation]:
        """End the episode and run the task's tests."""
        return await self.step(Submit())
