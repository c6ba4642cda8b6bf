"""Building by the engine's command line with BuildKit, for Dockerfiles that the older builder cannot read."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.errors import BuildFailed
from openenv_core.images.events import Cached, Output, Step, Tell, printed
from openenv_core.images.remedies import remedy_for
from openenv_core.images.request import Request

STOP_S: Final = 15.0
"""Seconds that the command gets to cancel its build."""

_OWN_BUILDKIT: Final = 23
"""Commands older than this have BuildKit's client inside; newer ones need the component buildx."""

_VERTEX = re.compile(r"#(?P<vertex>\d+) (?P<text>.*)")
_STEP = re.compile(r"\[(?:(?P<stage>\S+) )?(?P<number>\d+)/(?P<total>\d+)\] (?P<text>.*)")
_OUTPUT = re.compile(r"(?P<seconds>\d+\.\d+) (?P<line>.*)")
_KEPT: Final = 200


def build(request: Request, tell: Tell) -> str:
    """Build an image and return its identity.

    Raises:
        BuildFailed: A step failed, or the engine refused the build.
        ConfigurationError: No command on the path can do it.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-build-") as folder:
        identity = Path(folder) / "image"
        command = [find_command(), "build", *_words(request, identity)]
        progress = _Progress(tell)
        with _running(command) as (process, lines):
            for line in lines:
                progress.take(line.rstrip("\r\n"))
            status = process.wait()
        if status != 0:
            raise progress.failure(request, status)
        return identity.read_text().strip()


@cache
def find_command() -> str:
    """Return a command `docker` that can build with BuildKit.

    Raises:
        ConfigurationError: There is none.
    """
    found = _commands()
    for path in found:
        if _can(path):
            return path
    got = f"{', '.join(found)} without the component buildx" if found else "none"
    raise ConfigurationError(
        f"expected a command `docker` with BuildKit, which this Dockerfile needs, got {got}; install buildx "
        "(`apt-get install docker-buildx`, or docker-buildx-plugin from the maker's own packages)"
    )


def _commands() -> list[str]:
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = (shutil.which("docker", path=place) for place in places if place)
    return list(dict.fromkeys(str(Path(path).resolve()) for path in found if path))


def _can(path: str) -> bool:
    try:
        if subprocess.run([path, "buildx", "version"], capture_output=True, timeout=20).returncode == 0:
            return True
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    match = re.search(r"version (\d+)", said)
    return match is not None and int(match[1]) < _OWN_BUILDKIT


def _words(request: Request, identity: Path) -> Iterator[str]:
    yield from ("--progress=plain", "--iidfile", str(identity))
    yield from ("--file", str(request.context / request.dockerfile))
    for tag in request.tags:
        yield from ("--tag", tag)
    for name, value in request.build_args.items():
        yield from ("--build-arg", f"{name}={value}")
    for name, value in request.labels.items():
        yield from ("--label", f"{name}={value}")
    if request.target:
        yield from ("--target", request.target)
    if request.no_cache:
        yield "--no-cache"
    if request.pull:
        yield "--pull"
    yield str(request.context)


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run the command; when this is interrupted, have it cancel the build, and wait until it has."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **_surroundings()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def _surroundings() -> dict[str, str]:
    """Return what makes the command ask for BuildKit, of the engine that everything else here asks."""
    from openenv_core.providers.docker.address import find_engine

    address = find_engine()
    found = {"DOCKER_BUILDKIT": "1", "DOCKER_HOST": address.url}
    if address.certificates is not None:
        found |= {
            "DOCKER_CERT_PATH": address.certificates,
            "DOCKER_TLS_VERIFY": "1" if address.verify else "",
        }
    return found


class _Progress:
    """Follows BuildKit's plain output: lines that begin with the number of what they belong to."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._steps: dict[str, Step] = {}
        self._output: dict[str, list[str]] = {}
        self._failed: str | None = None
        self._said: list[str] = []

    def take(self, line: str) -> None:
        """Handle one line."""
        match = _VERTEX.match(line)
        if match is None:
            if line.strip():
                self._said = [*self._said[-_KEPT:], line]
            return
        vertex, text = match["vertex"], match["text"]
        if (step := _STEP.match(text)) is not None:
            if vertex not in self._steps:
                stage = f"{step['stage']}: " if step["stage"] else ""
                begun = Step(int(step["number"]), int(step["total"]), f"{stage}{step['text']}")
                self._steps[vertex] = begun
                self._tell(begun)
        elif text == "CACHED":
            self._tell(Cached())
        elif text.startswith(("ERROR", "CANCELED")):
            if text.startswith("ERROR") and self._failed is None:
                self._failed = vertex
                self._said.append(text)
        elif (said := _OUTPUT.match(text)) is not None:
            lines = self._output.setdefault(vertex, [])
            for one in printed(said["line"]):
                lines.append(one)
                self._tell(Output(one))
            del lines[:-_KEPT]

    def failure(self, request: Request, status: int) -> BuildFailed:
        """Return what went wrong."""
        step = self._steps[self._failed].text if self._failed in self._steps else ""
        output = self._output.get(self._failed or "", [])
        reason = next(
            (line for line in reversed(self._said) if re.search("error|failed|ERROR", line)),
            f"exit status {status}",
        )
        return BuildFailed(
            f"expected {step or f'the build of {request.context}'} to succeed, got: {reason.strip()}",
            step=step,
            output=output or self._said,
            remedy=remedy_for("\n".join([*output, *self._said])),
        )
