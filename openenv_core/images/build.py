"""Building the image of an environment, after what it stands on."""

from typing import TYPE_CHECKING

from openenv_core.images import base, commandline, sdk
from openenv_core.images.events import Note, Tell
from openenv_core.images.plan import Plan
from openenv_core.images.superseded import replacing

if TYPE_CHECKING:
    import docker


def build(api: "docker.APIClient", planned: Plan, tell: Tell) -> str:
    """Build one environment's image and return its identity.

    Raises:
        BuildFailed: A step failed, or the engine refused the build.
        ConfigurationError: The Dockerfile needs BuildKit, and no command here has it.
    """
    for note in planned.notes:
        tell(Note(note))
    if planned.for_buildkit:
        commandline.find_command()  # before minutes of work on a base
    if planned.variant is not None:
        base.ensure(api, planned.variant, tell)
    with replacing(api, planned.request.tags):
        if planned.for_buildkit:
            tell(Note(f"by the engine's command line with BuildKit, for {planned.for_buildkit[0]}"))
            return commandline.build(planned.request, tell)
        return sdk.build(api, planned.request, tell)
