"""Building by the Docker SDK: the engine's older builder, which every engine has."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.engine import hanging_up
from openenv_core.images.errors import BuildFailed
from openenv_core.images.events import Cached, Layer, Output, Step, Tell, printed
from openenv_core.images.remedies import remedy_for
from openenv_core.images.request import Request

if TYPE_CHECKING:
    import docker

_STEP: Final = re.compile(r"Step (?P<number>\d+)/(?P<total>\d+) : (?P<text>.*)", re.DOTALL)
_RUNNING: Final = re.compile(r" ---> Running in (?P<container>[0-9a-f]+)")
_BUILT: Final = re.compile(r"Successfully built (?P<image>[0-9a-f]+)")
_KEPT: Final = 200
"""Lines of a step's output that are kept for an error."""


def build(api: "docker.APIClient", request: Request, tell: Tell) -> str:
    """Build an image and return its identity.

    When this is interrupted, the engine stops the build, and the container of its running step is removed.

    Raises:
        BuildFailed: A step failed, or the engine refused the build.
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
        raise BuildFailed(
            f"expected an image of {request.context}, got an end of the engine's answer before it was built",
            step=progress.step,
            output=progress.output,
            remedy="is the engine still running? `docker info` says",
        )
    _name(api, progress.image, request)
    return progress.image


def _name(api: "docker.APIClient", image: str, request: Request) -> None:
    from docker.errors import APIError

    for tag in request.tags[1:]:
        repository, _, name = tag.rpartition(":")
        try:
            api.tag(image, repository, name)
        except APIError as error:
            raise BuildFailed(
                f"expected the engine to call the image {tag}, got: {error.explanation}"
            ) from error


def _stream(api: "docker.APIClient", request: Request) -> Iterator[dict[str, Any]]:
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
        raise BuildFailed(
            f"expected the engine to build {request.context}, got: {said}", remedy=remedy_for(said)
        ) from error
    except (RequestException, HTTPError) as error:
        raise BuildFailed(
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
            raise BuildFailed(
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
                self._tell(Output(line))
            del self.output[:-_KEPT]
