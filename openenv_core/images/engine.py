"""`docker build` and `docker push`, what to do where a build fails, and the images that a build supersedes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError, OpenEnvError, ProviderError
from openenv_core.providers.docker.engine import DockerEngine, find_engine

CANCEL_TIMEOUT_S: Final = 15.0
"""Seconds that the command `docker` gets to cancel what it does."""

_KEPT_LINES: Final = 200
"""Lines of the command's output that are kept for an error."""


class ImageError(OpenEnvError):
    """The root of what goes wrong with images."""


class BuildError(ImageError):
    """A step of a Dockerfile failed, or the engine refused the build."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}\n{remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """One image to build.

    Attributes:
        context: The folder that the Dockerfile's COPY sees.
        dockerfile: Relative to the context.
        tags: What the image is called; at least one.
        build_args: Values of its ARGs.
        labels: Put on the image.
        target: The stage to build; None: the last.
        no_cache: Do every step anew.
        pull: Ask the registry for newer images to stand on.
    """

    context: Path
    dockerfile: str
    tags: tuple[str, ...]
    build_args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    no_cache: bool = False
    pull: bool = False


def build_image(request: BuildRequest) -> str:
    """Build an image by `docker build`, whose output goes to standard error, and return the image's identity.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: There is no command `docker`.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-build-") as folder:
        identity = Path(folder) / "image"
        words = ["--force-rm", f"--iidfile={identity}", f"--file={request.context / request.dockerfile}"]
        words += [f"--tag={tag}" for tag in request.tags]
        words += [f"--build-arg={name}={value}" for name, value in request.build_args.items()]
        words += [f"--label={name}={value}" for name, value in request.labels.items()]
        words += [f"--target={request.target}"] if request.target else []
        words += ["--no-cache"] * request.no_cache + ["--pull"] * request.pull
        status, output = run_docker("build", *words, str(request.context))
        if status != 0:
            telling = (
                line for line in reversed(output) if re.search("error|failed|returned", line, re.IGNORECASE)
            )
            raise BuildError(
                f"docker could not build {request.context}: {next(telling, f'exit status {status}').strip()}",
                remedy_for("\n".join(output)),
            )
        return identity.read_text().strip()


def run_docker(*arguments: str) -> tuple[int, list[str]]:
    """Run the command `docker`, pass its output on to standard error, and return its status and its last lines.

    Nothing bounds it but its user's patience: Ctrl-C cancels it in order.

    Raises:
        ConfigurationError: There is no such command.
    """
    command = shutil.which("docker")
    if command is None:
        raise ConfigurationError(
            "there is no command `docker` on the path; install docker-cli (docker.com/get-docker), it builds images"
        )
    address = find_engine()
    environ = {**os.environ, "DOCKER_HOST": address.url, "BUILDKIT_PROGRESS": "plain"}
    if address.certificates is not None:
        environ["DOCKER_CERT_PATH"] = address.certificates
        environ["DOCKER_TLS_VERIFY"] = "1" if address.verify else ""
    process = subprocess.Popen(
        [command, *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        for line in process.stdout:
            sys.stderr.write(line)
            sys.stderr.flush()
            last.append(line.rstrip())
        return process.wait(), list(last)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(CANCEL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


PARTS: Final = "ropewalk.parts"
"""The label of the base's first stage, which stays behind nameless as the engine's cache."""

RECENT_STAGE_AGE_S: Final = 600
"""Seconds in which a first stage may still be waited for by another build on this engine."""


def labels_of(image: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the labels of what `DockerEngine.find_image` found."""
    return ((image or {}).get("Config") or {}).get("Labels") or {}


@contextmanager
def replacing(engine: DockerEngine, tags: Sequence[str]) -> Iterator[None]:
    """Remove what had these names before the block, where it ended well and nothing needs that any more.

    Only images that `ropewalk build` made are removed. One that has another name, that a container was made of, or
    that another image stands on stays; it goes when the last of those is built anew.
    """
    found = [engine.find_image(tag) for tag in tags]
    before = {
        image["Id"]: image
        for image in found
        if image is not None and any(name.startswith("ropewalk.") for name in labels_of(image))
    }
    yield
    for identity in before:
        _remove(engine, identity)
    # The newest of the first stages is what the next base is made from; others may be in use.
    parts: list[dict[str, Any]] = []
    with suppress(ProviderError):
        wanted = {"dangling": ["true"], "label": [PARTS]}
        parts = engine.call("GET", "/images/json", query={"filters": wanted})
    parts.sort(key=lambda part: part["Created"], reverse=True)
    for part in parts[1:]:
        if part["Created"] < time.time() - RECENT_STAGE_AGE_S:
            _remove(engine, part["Id"])


def _remove(engine: DockerEngine, image: str) -> None:
    """Remove an image without names, and what was only its own of the steps below."""
    # What cannot be removed is left: the build itself has gone well.
    with suppress(ProviderError):
        found = engine.find_image(image)
        if found is not None and not found.get("RepoTags") and not found.get("RepoDigests"):
            engine.call("DELETE", f"/images/{image}")


_REMEDIES: Final = (
    (
        r"requires BuildKit|unknown instruction|dockerfile parse error|Unknown flag",
        "the builder does not know what the Dockerfile says: install docker's component buildx (`apt-get install "
        "docker-buildx`, or docker-buildx-plugin), or begin the file with `# syntax=docker/dockerfile:1` where the "
        "engine reaches a registry",
    ),
    (
        r"pull access denied|manifest unknown|manifest for .* not found|repository does not exist|"
        r"failed to resolve source metadata|no such image|dial tcp|server misbehaving|lookup .* on ",
        "the image that it stands on is neither here nor to be had: make ours with `ropewalk build base`, name another "
        "with --base, or `docker pull` it where the network allows",
    ),
    (
        r"certificate verify failed|SSLCertVerificationError|invalid peer certificate|UnknownIssuer",
        "the network's proxy has a certificate that the image does not know: use a base image that holds it "
        "(`ropewalk build base --build-arg PYTHON_IMAGE=...`)",
    ),
    (
        r"No matching distribution found|Could not find a version that satisfies|No solution found when resolving",
        "a requirement of pyproject.toml cannot be had from the index: see its name and version",
    ),
    (
        r"does not appear to be a Python project|neither 'setup.py' nor 'pyproject.toml'",
        "the image got no pyproject.toml: see that the folder has one and that .dockerignore leaves it in",
    ),
    (
        r"(gcc|cc|g\+\+|cmake|cargo|rustc)['\"]?:? .*(not found|No such file)|command '[^']*gcc' failed|"
        r"Unable to find a compiler|error: linker",
        "the base has no compiler: use a dependency that comes as a wheel, or install one in a stage of its own",
    ),
    (
        r"COPY failed|failed to compute cache key|failed to calculate checksum|no such file or directory",
        "a path that is copied is not there, or .dockerignore leaves it out; COPY sees the environment's folder alone",
    ),
    (
        r"Permission denied|EACCES|Read-only file system",
        "the base's user is `env`: put USER root before what writes, and USER env after it",
    ),
    (
        r"No space left on device|disk quota",
        "the disk is full: `docker system df`, then `docker system prune`",
    ),
    (
        r"temporary failure in name resolution|Could not resolve|NewConnectionError|Network is unreachable|"
        r"dns error|Connection refused",
        "the build reached no network: see the engine's, or pass its proxy (--build-arg HTTPS_PROXY=...)",
    ),
    (
        r"returned a non-zero code: 137|exit code: 137|OOMKilled",
        "the step was killed, most often for memory: give the engine more",
    ),
)


def remedy_for(said: str) -> str:
    """Return what to do about what was said; the first thing that fits, and something general where none does."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, said, re.IGNORECASE):
            return remedy
    return "correct that step of the Dockerfile, or what it works on, and build again: earlier steps are kept"
