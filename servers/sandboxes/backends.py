"""What runs sandboxes: containers of the local engine, or commands of this machine."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from openenv_core.errors import ConfigurationError
from openenv_core.providers.base import Provider, WatchedProvider
from openenv_core.providers.process import LocalProcessProvider
from openenv_core.providers.remote import SandboxSpec
from servers.sandboxes.limits import SandboxRefusalError


class SandboxProvider(Provider, WatchedProvider, Protocol):
    """What runs one sandbox: a provider that also tells what became of it. All may block, and are called from threads.

    `stop()` makes a `start()` that is under way in another thread fail, or waits for it, and then removes
    whatever it made. It may be called again after it has failed.
    """


Backend: TypeAlias = Callable[[SandboxSpec], SandboxProvider]
"""Makes one for a sandbox that has been admitted. It does not block; it may raise SandboxRefusalError."""


_LAUNCHER: Final = str(Path(__file__).with_name("_launch.py"))


def command_provider(spec: SandboxSpec) -> SandboxProvider:
    """Return what runs a command, under the guard that ends it with this process.

    Raises:
        SandboxRefusalError: It asks for limits, which a plain process does not have.
    """
    limits = ("memory_bytes", "cpus", "pids", "network")
    if asked := [name for name in limits if getattr(spec, name) is not None]:
        raise SandboxRefusalError(
            422,
            "unsupported",
            f"expected a command without {', '.join(asked)}: this service runs it as a plain process; give an image",
        )
    words = spec.command or []
    if any("\0" in word for word in words):
        raise SandboxRefusalError(422, "invalid", "expected words without NUL in the command, got one")
    packed = base64.urlsafe_b64encode(json.dumps(words).encode()).decode()
    return LocalProcessProvider(
        f"the command {words[0]!r}",
        env_vars=spec.env_vars,
        start_timeout_s=spec.start_timeout_s,
        command=(sys.executable, "-I", "-S", _LAUNCHER, "{fd}", packed),
    )


def image_provider(spec: SandboxSpec, image: str) -> SandboxProvider:
    """Return what runs an image, hardened as ever; a limit that was not asked for is the provider's own.

    Raises:
        SandboxRefusalError: The settings do not go together.
    """
    from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider

    asked: dict[str, Any] = {
        "memory": spec.memory_bytes,
        "cpus": spec.cpus,
        "pids": spec.pids,
        "network": spec.network,
        "command": spec.command and [word.replace("{port}", str(spec.port)) for word in spec.command],
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
        raise SandboxRefusalError(422, "invalid", str(error)) from error


def local_backend(spec: SandboxSpec) -> SandboxProvider:
    """Run images on this machine's engine, and commands as processes of this user."""
    return command_provider(spec) if spec.image is None else image_provider(spec, spec.image)
