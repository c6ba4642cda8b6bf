"""What the reference service runs sandboxes with: this machine."""

from openenv_core.providers.remote.messages import SandboxSpec
from servers.sandboxes.backend import SandboxProvider
from servers.sandboxes.commands import command_provider
from servers.sandboxes.images import image_provider


def local_backend(spec: SandboxSpec) -> SandboxProvider:
    """Run images on this machine's engine, and commands as processes of this user."""
    return command_provider(spec) if spec.image is None else image_provider(spec, spec.image)
