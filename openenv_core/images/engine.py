"""The engine that images are built and kept with: `docker build`, and the removal of images that a build supersedes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import ConfigurationError, EngineUnavailableError, installed_with
from openenv_core.images.errors import BuildError, remedy_for

if TYPE_CHECKING:
    import docker

RESPONSE_TIMEOUT_S: Final = 120
"""Seconds that the engine may take to answer."""


@contextmanager
def engine() -> Iterator["docker.APIClient"]:
    """Open a connection to the engine, and close it in the end.

    Raises:
        ConfigurationError: The Docker SDK is not installed, or the engine is named in a way that cannot be followed.
        EngineUnavailableError: Nobody answers, or not to this user.
    """
    with installed_with("docker", "the Docker SDK"):
        import docker
        from docker.errors import DockerException
        from docker.tls import TLSConfig
    from openenv_core.providers.docker.engine import DockerEngine

    docker_engine = DockerEngine.find()
    docker_engine.ping()
    address = docker_engine.address
    tls: TLSConfig | bool = False
    if address.certificates is not None:
        folder = Path(address.certificates)
        tls = TLSConfig(
            client_cert=(str(folder / "cert.pem"), str(folder / "key.pem")),
            ca_cert=str(folder / "ca.pem"),
            verify=address.verify,
        )
    try:
        client = docker.APIClient(base_url=address.url, tls=tls, timeout=RESPONSE_TIMEOUT_S, version="auto")
    except DockerException as error:
        raise EngineUnavailableError(
            f"expected the Docker engine at {address.url} to speak with the Docker SDK, got: {error}; "
            "pip install -U docker"
        ) from error
    try:
        yield client
    finally:
        client.close()


CANCEL_TIMEOUT_S: Final = 15.0
"""Seconds that the command `docker` gets to cancel what it does."""

_TAIL_LINES: Final = 200
"""Lines of the command's output that are kept for an error."""


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
        timeout_s: Seconds after which it is cancelled; None: its user's patience.
    """

    context: Path
    dockerfile: str
    tags: tuple[str, ...]
    build_args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    no_cache: bool = False
    pull: bool = False
    timeout_s: float | None = None


def build_image(request: BuildRequest) -> str:
    """Build an image by `docker build`, whose output goes to standard error, and return the image's identity.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: There is no command `docker`.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-build-") as folder:
        identity = Path(folder) / "image"
        arguments = [
            "--force-rm",
            "--iidfile",
            str(identity),
            "--file",
            str(request.context / request.dockerfile),
        ]
        for option, values in (
            ("--tag", request.tags),
            ("--build-arg", [f"{name}={value}" for name, value in request.build_args.items()]),
            ("--label", [f"{name}={value}" for name, value in request.labels.items()]),
            ("--target", [request.target] if request.target else []),
        ):
            arguments += [argument for value in values for argument in (option, value)]
        arguments += ["--no-cache"] * request.no_cache + ["--pull"] * request.pull
        status, output = run_docker("build", *arguments, str(request.context), timeout_s=request.timeout_s)
        if status != 0:
            reason = next(
                (
                    line
                    for line in reversed(output)
                    if re.search("error|failed|returned", line, re.IGNORECASE)
                ),
                f"exit status {status}",
            )
            raise BuildError(
                f"docker could not build {request.context}: {reason.strip()}", remedy_for("\n".join(output))
            )
        return identity.read_text().strip()


def run_docker(*arguments: str, timeout_s: float | None = None) -> tuple[int, list[str]]:
    """Run the command `docker`, pass its output on to standard error, and return its status and its last lines.

    Ctrl-C cancels it in order, as the time-out does.

    Raises:
        ConfigurationError: There is no such command.
    """
    from openenv_core.providers.docker.engine import find_engine

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
    last: deque[str] = deque(maxlen=_TAIL_LINES)
    expired = threading.Timer(timeout_s or 0.0, process.send_signal, (signal.SIGINT,))
    if timeout_s is not None:
        expired.daemon = True
        expired.start()
    try:
        for line in process.stdout:
            sys.stderr.write(line)
            sys.stderr.flush()
            last.append(line.rstrip())
        status = process.wait()
        if timeout_s is not None and not expired.is_alive() and status != 0:
            last.append(f"an error: it took longer than {timeout_s:g} s")
        return status, list(last)
    finally:
        expired.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(CANCEL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def find_image(api: "docker.APIClient", image: str) -> dict[str, Any] | None:
    """Return what the engine knows of an image; None where it has none of that name."""
    from docker.errors import ImageNotFound

    try:
        details: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]
    except ImageNotFound:
        return None
    return details


def labels_of(image: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of what `find_image` found."""
    return (image.get("Config") or {}).get("Labels") or {}


PARTS: Final = "ropewalk.parts"
"""The label of the base's first stage, which stays behind nameless as the engine's cache."""

RECENT_STAGE_AGE_S: Final = 600
"""Seconds in which a first stage may still be waited for by another build on this engine."""

_OURS: Final = "ropewalk."


@contextlib.contextmanager
def replace_tags(api: "docker.APIClient", tags: Sequence[str]) -> Iterator[None]:
    """Remove what had these names before the block, where it ended well and nothing needs that any more.

    Only images that `ropewalk build` made are removed. One that has another name, that a container was made of, or
    that another image stands on stays; it goes when the last of those is built anew.
    """
    before = {image_id for tag in tags if (image_id := _find_own_image(api, tag)) is not None}
    yield
    for image in before:
        _remove(api, image)
    _remove_old_parts(api)


def _find_own_image(api: "docker.APIClient", tag: str) -> str | None:
    image = find_image(api, tag)
    if image is None or not any(name.startswith(_OURS) for name in labels_of(image)):
        return None
    return str(image["Id"])


def _remove(api: "docker.APIClient", image: str) -> None:
    """Remove an image without names, and what was only its own of the steps below."""
    from docker.errors import APIError

    # What cannot be removed is left: the build itself has gone well.
    with contextlib.suppress(APIError, OSError):
        details = find_image(api, image)
        if details is not None and not details.get("RepoTags") and not details.get("RepoDigests"):
            api.remove_image(image)


def _remove_old_parts(api: "docker.APIClient") -> None:
    """Keep the newest of the first stages, which the next base is made from, and those that may be in use."""
    from docker.errors import APIError

    parts: list[dict[str, Any]] = []
    with contextlib.suppress(APIError, OSError):
        parts = api.images(filters={"dangling": True, "label": PARTS})
    parts.sort(key=lambda stage: stage["Created"], reverse=True)
    for stage in parts[1:]:
        if stage["Created"] < time.time() - RECENT_STAGE_AGE_S:
            _remove(api, stage["Id"])
