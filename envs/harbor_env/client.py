"""The client of an environment of Harbor tasks."""

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
    """Plays Harbor tasks behind a server.

    `reset` takes, besides `seed` and `episode_id`, the options `split` and `index`, or `task`, an id. The methods below
    are steps, spelled shorter; the client that `sync()` returns has them too.
    """

    action_type = HarborAction
    observation_type = HarborObservation
    state_type = HarborState
    # The folder goes by two names, envs.harbor_env here and harbor_env once installed by itself.
    default_app = f"{__package__}.server.app:app"

    async def run(self, command: str, *, timeout_s: float | None = None) -> StepResult[HarborObservation]:
        """Run a command."""
        return await self.step(Run(command=command, timeout_s=timeout_s))

    async def read_file(self, path: str) -> StepResult[HarborObservation]:
        """Read a file of text."""
        return await self.step(ReadFile(path=path))

    async def write_file(self, path: str, content: str) -> StepResult[HarborObservation]:
        """Write a file."""
        return await self.step(WriteFile(path=path, content=content))

    async def edit_file(self, path: str, old: str, new: str) -> StepResult[HarborObservation]:
        """Replace a text that stands in a file exactly once."""
        return await self.step(EditFile(path=path, old=old, new=new))

    async def submit(self) -> StepResult[HarborObservation]:
        """End the episode, and have the tests judge it."""
        return await self.step(Submit())
