"""Sandboxes that are containers of the local engine."""

from typing import Any

from openenv_core.errors import ConfigurationError
from openenv_core.providers.remote.messages import SandboxSpec
from servers.sandboxes.backend import SandboxProvider
from servers.sandboxes.refusals import SandboxRefusal


def image_provider(spec: SandboxSpec, image: str) -> SandboxProvider:
    """Return what runs an image, hardened as ever; a limit that was not asked for is the provider's own.

    Raises:
        SandboxRefusal: The settings do not go together.
    """
    from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider

    asked: dict[str, Any] = {
        "memory": spec.memory_bytes,
        "cpus": spec.cpus,
        "pids": spec.pids,
        "network": spec.network,
        "command": None
        if spec.command is None
        else [word.replace("{port}", str(spec.port)) for word in spec.command],
    }
    try:
        options = ContainerOptions(
            port=spec.port,
            env_vars=spec.env_vars,
            start_timeout_s=spec.start_timeout_s,
            **{name: value for name, value in asked.items() if value is not None},
        )
        return LocalDockerProvider(image, options=options)
    except ConfigurationError as error:
        raise SandboxRefusal(422, "invalid", str(error)) from error
