"""Building by the Docker SDK, or by the engine's command line with BuildKit."""

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
from typing import IO, TYPE_CHECKING, Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.engine import hanging_up
from openenv_core.images.errors import BuildError, remedy_for
from openenv_core.images.events import BuildRequest, Cached, Layer, Step, StepOutput, Tell, printed

if TYPE_CHECKING:
    import docker

_STEP: Final = re.compile(r"Step (?P<number>\d+)/(?P<total>\d+) : (?P<text>.*)", re.DOTALL)
_RUNNING: Final = re.compile(r" ---> Running in (?P<container>[0-9a-f]+)")
_BUILT: Final = re.compile(r"Successfully built (?P<image>[0-9a-f]+)")
_KEPT: Final = 200
"""Lines of a step's output that are kept for an error."""


def build_by_sdk(api: "docker.APIClient", request: BuildRequest, tell: Tell) -> str:
    """Build an image and return its identity.

    When this is interrupted, the engine stops the build, and the container of its running step is removed.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: The context cannot be read.
    """
    progress = _Progress(tell)
    try:
        with hanging_up(api):
            for said in _stream(api, request):
                progress.take(said)
    except BaseException:
        progress.clean(api)
        raise
    if progress.image is None:
        raise BuildError(
            f"expected an image of {request.context}, got an end of the engine's answer before it was built",
            step=progress.step,
            output=progress.output,
            remedy="is the engine still running? `docker info` says",
        )
    _name(api, progress.image, request)
    return progress.image


def _name(api: "docker.APIClient", image: str, request: BuildRequest) -> None:
    from docker.errors import APIError

    for tag in request.tags[1:]:
        repository, _, name = tag.rpartition(":")
        try:
            api.tag(image, repository, name)
        except APIError as error:
            raise BuildError(
                f"expected the engine to call the image {tag}, got: {error.explanation}"
            ) from error


def _stream(api: "docker.APIClient", request: BuildRequest) -> Iterator[dict[str, Any]]:
    from docker.errors import APIError
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    try:
        # Nothing bounds a step's silence but its author's patience: Ctrl-C ends it in order.
        yield from api.build(
            path=str(request.context),
            dockerfile=request.dockerfile,
            tag=request.tags[0],
            buildargs=dict(request.build_args),
            labels=dict(request.labels) or None,
            target=request.target,
            nocache=request.no_cache,
            pull=request.pull,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=None,
        )
    except APIError as error:
        said = str(error.explanation or error)
        raise BuildError(
            f"expected the engine to build {request.context}, got: {said}", remedy=remedy_for(said)
        ) from error
    except (RequestException, HTTPError) as error:
        raise BuildError(
            f"expected the engine to answer until {request.context} is built, got: {error}",
            remedy="is it still running? `docker info` says",
        ) from error
    except OSError as error:
        raise ConfigurationError(f"expected to read all of {request.context}, got: {error}") from error


class _Progress:
    """Follows the engine's answer."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._container: str | None = None
        self.step = ""
        self.output: list[str] = []
        self.image: str | None = None

    def take(self, said: dict[str, Any]) -> None:
        """Handle one message."""
        if "error" in said:
            text = str(said["error"]).strip()
            raise BuildError(
                f"expected {self.step or 'the build'} to succeed, got: {text}",
                step=self.step,
                output=self.output,
                remedy=remedy_for("\n".join([*self.output, text])),
            )
        if "stream" in said:
            self._take_text(str(said["stream"]))
        elif "status" in said and "id" in said:
            detail = said.get("progressDetail") or {}
            self._tell(
                Layer(said["id"], said["status"], detail.get("current") or 0, detail.get("total") or 0)
            )
        elif isinstance(said.get("aux"), dict) and "ID" in said["aux"]:
            self.image = str(said["aux"]["ID"])

    def clean(self, api: "docker.APIClient") -> None:
        """Remove the container of the step that ran; the engine may have done so already."""
        from docker.errors import DockerException

        if self._container is not None:
            with contextlib.suppress(DockerException, OSError):
                api.remove_container(self._container, force=True)

    def _take_text(self, text: str) -> None:
        if match := _STEP.match(text.strip()):
            self.step, self.output, self._container = match["text"], [], None
            self._tell(Step(int(match["number"]), int(match["total"]), match["text"]))
        elif match := _RUNNING.match(text):
            self._container = match["container"]
        elif text.strip() == "---> Using cache":
            self._tell(Cached())
        elif match := _BUILT.match(text.strip()):
            self.image = self.image or match["image"]
        elif not text.startswith((" ---> ", "Removing intermediate container", "Successfully tagged")):
            for line in printed(text):
                self.output.append(line)
                self._tell(StepOutput(line))
            del self.output[:-_KEPT]


CANCEL_TIMEOUT_S: Final = 15.0
"""Seconds that the command gets to cancel its build."""

_OWN_BUILDKIT: Final = 23
"""Commands older than this have BuildKit's client inside; newer ones need the component buildx."""

_VERTEX = re.compile(r"#(?P<vertex>\d+) (?P<text>.*)")
_COMMAND_STEP = re.compile(r"\[(?:(?P<stage>\S+) )?(?P<number>\d+)/(?P<total>\d+)\] (?P<text>.*)")
_OUTPUT = re.compile(r"(?P<seconds>\d+\.\d+) (?P<line>.*)")


def build_by_command(request: BuildRequest, tell: Tell) -> str:
    """Build an image and return its identity.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: No command on the path can do it.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-build-") as folder:
        identity = Path(folder) / "image"
        command = [find_command(), "build", *_words(request, identity)]
        progress = _CommandProgress(tell)
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


def _words(request: BuildRequest, identity: Path) -> Iterator[str]:
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
                process.wait(CANCEL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def _surroundings() -> dict[str, str]:
    """Return what makes the command ask for BuildKit, of the engine that everything else here asks."""
    from openenv_core.providers.docker.engine import find_engine

    address = find_engine()
    found = {"DOCKER_BUILDKIT": "1", "DOCKER_HOST": address.url}
    if address.certificates is not None:
        found |= {
            "DOCKER_CERT_PATH": address.certificates,
            "DOCKER_TLS_VERIFY": "1" if address.verify else "",
        }
    return found


class _CommandProgress:
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
        if (step := _COMMAND_STEP.match(text)) is not None:
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
                self._tell(StepOutput(one))
            del lines[:-_KEPT]

    def failure(self, request: BuildRequest, status: int) -> BuildError:
        """Return what went wrong."""
        step = self._steps[self._failed].text if self._failed in self._steps else ""
        output = self._output.get(self._failed or "", [])
        reason = next(
            (line for line in reversed(self._said) if re.search("error|failed|ERROR", line)),
            f"exit status {status}",
        )
        return BuildError(
            f"expected {step or f'the build of {request.context}'} to succeed, got: {reason.strip()}",
            step=step,
            output=output or self._said,
            remedy=remedy_for("\n".join([*output, *self._said])),
        )
