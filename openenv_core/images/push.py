"""Pushes an image to a registry."""

import contextlib
import re
from typing import TYPE_CHECKING

from openenv_core.errors import ConfigurationError
from openenv_core.images.build import complete_tags, is_remote
from openenv_core.images.engine import PushError, run_docker

if TYPE_CHECKING:
    from openenv_core.providers.docker.engine import DockerEngine


def remote_name(image: str, registry: str | None) -> str:
    """Return an image's name in a registry: `HOST/NAMESPACE/` and the last part of its name.

    Args:
        image: Its local name.
        registry: `HOST[:PORT][/NAMESPACE]`; None if the image's name already begins with the registry.

    Raises:
        ConfigurationError: Neither names a registry, or the registry's name is invalid.
    """
    (name,) = complete_tags([image], "")
    if registry is None:
        if not is_remote(name):
            raise ConfigurationError(
                f"expected --registry HOST[:PORT]/NAMESPACE for {image}, whose name has no registry, got none; "
                "for one, --registry registry.example.org/NAMESPACE"
            )
        return name
    remote = f"{registry.rstrip('/')}/{name.rpartition('/')[2]}"
    if not is_remote(remote):
        raise ConfigurationError(
            f"expected --registry HOST[:PORT]/NAMESPACE, as in registry.example.org/team, got {registry!r}; "
            "without a scheme, in lower case after the host"
        )
    return remote


def push(engine: "DockerEngine", image: str, remote: str) -> str:
    """Push an image with `docker push` under a registry's name, and return its digest.

    It uses the credentials stored by `docker login`. Afterwards the local image has the registry's name too.

    Raises:
        ConfigurationError: The command `docker` is not installed.
        PushError: The engine has no such image, or it did not arrive.
    """
    from docker.errors import APIError

    api = engine.client()
    repository, _, tag = remote.rpartition(":")
    added = image != remote and not engine.has_image(remote)
    if not engine.has_image(image):
        raise PushError(f"there is no image {image} here; `ropewalk build` makes it, `docker images` lists")
    if added:
        api.tag(image, repository, tag)
    try:
        status, output = run_docker("push", remote)
        digest = re.search(r"\bdigest: (sha256:[0-9a-f]+)", "\n".join(output))
        if status != 0 or digest is None:
            host = remote.partition("/")[0]
            raise PushError(
                f"expected {remote} to arrive, got: {output[-1] if output else f'exit status {status}'}; see that "
                f"{host} is right and reachable from the engine, and `docker login {host}` with an account that may "
                "write there"
            )
        return digest[1]
    except BaseException:
        if added:
            with contextlib.suppress(APIError, OSError):
                api.remove_image(remote, noprune=True)
        raise
