"""Pushes an image to a registry."""

import contextlib
import re
from typing import TYPE_CHECKING, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.build import complete_tags
from openenv_core.images.engine import run_docker
from openenv_core.images.errors import NoSuchImageError, NotAllowedError, NotReachedError, PushError

if TYPE_CHECKING:
    from openenv_core.providers.docker.engine import DockerEngine

_REGISTRY = re.compile(
    r"(?P<host>localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:\d)|\[[0-9a-fA-F:]+\])(?::\d+)?"
    r"(?P<namespace>(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
)

_ABSENT: Final = r"does not exist locally|No such image|not found locally|tag does not exist"
_REFUSED: Final = (
    r"denied|unauthorized|authentication required|no basic auth credentials|403 Forbidden|401 Unauthorized"
)
_CONNECTION_ERRORS: Final = (
    r"connection refused|no such host|i/o timeout|dial tcp|deadline exceeded|EOF|connection reset|x509|"
    r"server gave HTTP response|no route to host|name resolution|server misbehaving|TLS handshake"
)


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
        host, slash, _ = name.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            raise ConfigurationError(
                f"expected --registry HOST[:PORT]/NAMESPACE for {image}, whose name has no registry, got none; "
                "for one, --registry registry.example.org/NAMESPACE"
            )
        return name
    if _REGISTRY.fullmatch(registry.rstrip("/")) is None:
        raise ConfigurationError(
            f"expected --registry HOST[:PORT]/NAMESPACE, as in registry.example.org/team, got {registry!r}; "
            "without a scheme, in lower case after the host"
        )
    return f"{registry.rstrip('/')}/{name.rpartition('/')[2]}"


def push(engine: "DockerEngine", image: str, remote: str) -> str:
    """Push an image with `docker push` under a registry's name, and return its digest.

    It uses the credentials stored by `docker login`. Afterwards the local image has the registry's name too.

    Raises:
        ConfigurationError: The command `docker` is not installed.
        NoSuchImageError: The engine does not have the image.
        NotReachedError: The registry does not answer.
        NotAllowedError: The registry refuses access.
        PushError: Any other failure of the push.
    """
    from docker.errors import APIError, ImageNotFound

    api = engine.client()
    repository, _, tag = remote.rpartition(":")
    added = image != remote and not engine.has_image(remote)
    try:
        if image != remote:
            api.tag(image, repository, tag)
    except ImageNotFound as error:
        raise _make_absent_error(image) from error
    except APIError as error:
        raise _failure(remote, str(error)) from error
    try:
        status, output = run_docker("push", remote)
        digest = re.search(r"\bdigest: (sha256:[0-9a-f]+)", "\n".join(output))
        if status != 0 or digest is None:
            raise _failure(remote, output[-1] if output else f"exit status {status}")
        return digest[1]
    except BaseException:
        if added:
            with contextlib.suppress(APIError, OSError):
                api.remove_image(remote, noprune=True)
        raise


def _make_absent_error(image: str) -> NoSuchImageError:
    return NoSuchImageError(
        f"there is no image {image} here; `ropewalk build` makes it, `docker images` lists"
    )


def _failure(remote: str, output: str) -> PushError:
    host = remote.partition("/")[0]
    text = f"expected {remote} to arrive, got: {output.strip()}"
    if re.search(_ABSENT, output):
        return _make_absent_error(remote)
    if re.search(_REFUSED, output):
        return NotAllowedError(f"{text}; `docker login {host}` with an account that may write there")
    if re.search(_CONNECTION_ERRORS, output):
        return NotReachedError(
            f"{text}; see that {host} is right and reachable from the engine, with a certificate that it trusts "
            "(or as one of its insecure-registries)"
        )
    return PushError(text)
