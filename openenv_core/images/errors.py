"""Errors with images, and remedies for common failures of builds."""

import re
from typing import Final

from openenv_core.errors import OpenEnvError


class BuildError(OpenEnvError):
    """A step of a Dockerfile failed, or the engine refused the build."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}\n{remedy}")


class PushError(OpenEnvError):
    """An image or a folder could not be pushed."""


class NotReachedError(PushError):
    """The registry or hub does not answer."""


class NotAllowedError(PushError):
    """The registry or hub refuses our credentials, or write access."""


class NoSuchImageError(PushError):
    """The engine has no image of the name to push."""


_REMEDIES: Final = (
    (
        r"requires BuildKit|unknown instruction|dockerfile parse error|Unknown flag",
        "the builder does not support the Dockerfile's syntax: install docker's component buildx (`apt-get install "
        "docker-buildx`, or docker-buildx-plugin), or begin the file with `# syntax=docker/dockerfile:1` if the "
        "engine reaches a registry",
    ),
    (
        r"pull access denied|manifest unknown|manifest for .* not found|repository does not exist|"
        r"failed to resolve source metadata|no such image|dial tcp|server misbehaving|lookup .* on ",
        "the base image is neither here nor in a registry: build ours with `ropewalk build base`, name another with "
        "--base, or `docker pull` it if the network allows",
    ),
    (
        r"certificate verify failed|SSLCertVerificationError|invalid peer certificate|UnknownIssuer",
        "the network's proxy has a certificate that the image does not know: use a base image that holds it "
        "(`ropewalk build base --build-arg PYTHON_IMAGE=...`)",
    ),
    (
        r"COPY failed|failed to compute cache key|failed to calculate checksum|no such file or directory",
        "a path to copy does not exist, or .dockerignore excludes it; COPY sees only the environment's folder",
    ),
    (
        r"Permission denied|EACCES|Read-only file system",
        "the base's user is `env`: put USER root before what writes, and USER env after it",
    ),
)
"""Patterns in a build's output, and what to do about failures that concern our base and context."""


def remedy_for(output: str) -> str:
    """Return the first remedy that fits the output of a build, or else a general one."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, output, re.IGNORECASE):
            return remedy
    return "correct that step of the Dockerfile, or its input, and build again: earlier steps are cached"
