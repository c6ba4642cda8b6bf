"""The command `docker`, which builds and pushes images."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError, OpenEnvError


class BuildError(OpenEnvError):
    """A step of a Dockerfile failed, or the engine refused the build."""


class PushError(OpenEnvError):
    """An image or a folder could not be pushed."""


def _engine_variables() -> dict[str, str]:
    """Return the environment variables that name the engine to the command `docker`."""
    from openenv_core.providers.docker.engine import find_engine

    address = find_engine()
    variables = {"DOCKER_HOST": address.url}
    if address.certificates is not None:
        variables["DOCKER_CERT_PATH"] = address.certificates
        variables["DOCKER_TLS_VERIFY"] = "1" if address.verify else ""
    return variables


CANCEL_TIMEOUT_S: Final = 15.0
"""Seconds that the command `docker` gets to cancel its work."""

_TAIL_LINES: Final = 200
"""Lines of the command's output that are kept for error messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """One image to build.

    Attributes:
        context: The folder of the build context.
        dockerfile: Path of the Dockerfile, relative to the context.
        tags: The image's tags; at least one.
        build_args: Values of its ARGs; None: the value of this process's environment variable.
        labels: Labels of the image.
        target: The stage to build; None: the last.
        timeout_s: Seconds after which the build is cancelled; None: no limit.
    """

    context: Path
    dockerfile: str
    tags: tuple[str, ...]
    build_args: Mapping[str, str | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    timeout_s: float | None = None


def build_image(request: BuildRequest) -> str:
    """Build an image with `docker build`, whose output goes to standard error, and return the image's id.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: The command `docker` is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-build-") as folder:
        identity = Path(folder) / "image"
        options = [("--iidfile", str(identity)), ("--file", str(request.context / request.dockerfile))]
        options += [("--tag", tag) for tag in request.tags]
        for name, value in request.build_args.items():
            options.append(("--build-arg", name if value is None else f"{name}={value}"))
        options += [("--label", f"{name}={value}") for name, value in request.labels.items()]
        options += [("--target", request.target)] if request.target else []
        words = ("build", "--force-rm", *chain.from_iterable(options), str(request.context))
        status, output = run_docker(*words, timeout_s=request.timeout_s)
        if status != 0:
            faults = [
                line.strip() for line in output if re.search("error|failed|returned", line, re.IGNORECASE)
            ]
            reason = faults[-1] if faults else f"exit status {status}"
            raise BuildError(
                f"docker could not build {request.context}: {reason}\ncorrect that step of the Dockerfile, or "
                "its input, and build again; docs/images.md says what base, builder and context it has"
            )
        return identity.read_text().strip()


def run_docker(*arguments: str, timeout_s: float | None = None) -> tuple[int, list[str]]:
    """Run the command `docker` with its output on standard error; return its exit status and last lines.

    Ctrl-C and the timeout interrupt it, so that it cancels its work in order.

    Raises:
        ConfigurationError: The command is not installed.
    """
    command = shutil.which("docker")
    if command is None:
        raise ConfigurationError(
            "there is no command `docker` on the path, which builds images; install docker-cli (docker.com/get-docker)"
        )
    process = subprocess.Popen(
        [command, *arguments],
        env={**os.environ, **_engine_variables(), "BUILDKIT_PROGRESS": "plain"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # only this process receives Ctrl-C, and passes it on once
    )
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    expired = threading.Timer(timeout_s or 0.0, process.send_signal, (signal.SIGINT,))
    if timeout_s is not None:
        expired.daemon = True
        expired.start()
    try:
        for line in process.stdout:
            sys.stderr.write(line)
            sys.stderr.flush()
            tail.append(line.rstrip())
        status = process.wait()
        if timeout_s is not None and not expired.is_alive() and status != 0:
            tail.append(f"an error: docker took longer than {timeout_s:g} s")
        return status, list(tail)
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
