"""Starts, monitors and removes a container; the provider of a server in one."""

import logging
import os
import re
import secrets
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from openenv_core.errors import (
    ConfigurationError,
    EngineRefusedError,
    ImageNotFoundError,
    OptionUnavailableError,
    ProviderError,
    ServerStartError,
)
from openenv_core.providers.base import (
    LOOPBACK,
    AnyProvider,
    CallableProvider,
    OwnedServerProvider,
    health_of,
    wait_healthy,
)
from openenv_core.providers.docker import companion
from openenv_core.providers.docker.engine import DockerEngine, is_local
from openenv_core.providers.docker.options import ContainerOptions, find_dropped, options_with, spec
from openenv_core.providers.docker.relay import Relay

logger = logging.getLogger("openenv_core")

OUTPUT_LINES: Final = 200
OUTPUT_BYTES: Final = 16_384
"""How much of a container's log an error includes."""

KILLED: Final = 137
"""Exit code of a container whose first process was killed: 128 + SIGKILL."""

OOM_EVENT_WAIT_S: Final = 1.0
"""How long to wait for the engine's OOM event, which may come after the container's end."""

OOM_POLL_INTERVAL_S: Final = 0.25
"""Poll interval of that wait."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container.

    Attributes:
        running: Whether it is running.
        exit_code: Its exit code; None while it is running.
        out_of_memory: Whether the kernel's OOM killer killed one of its processes. Known once it has ended.
        error: The engine's error message.
    """

    running: bool
    exit_code: int | None = None
    out_of_memory: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.running:
            return "running"
        reason = ", killed for its memory" if self.out_of_memory else ""
        return f"ended with exit code {self.exit_code}{reason}" + (f" ({self.error})" if self.error else "")


@dataclass(eq=False, repr=False)
class Container:
    """A container made by `start_container`, whose server was healthy. It ends with this process at the latest.

    Every method raises EngineUnavailableError if the engine does not respond; those that query the container raise
    EngineRefusedError if it is gone or not running.

    Attributes:
        engine: The engine that runs it.
        id: The engine's id.
        name: Its name.
        image: Its image.
        options: Its options.
        url: URL of its server.
        relay: The way into it if it has no published port.
    """

    engine: DockerEngine
    id: str
    name: str
    image: str
    options: ContainerOptions
    url: str = ""

    def __post_init__(self) -> None:
        self._created_at = time.time()
        self._process = os.getpid()
        self._removal = weakref.finalize(self, _remove_forgotten, self.engine, self.id, self._process)
        # At exit the companion removes all remaining containers at once.
        self._removal.atexit = False
        self.relay: Relay | None = None

    def __repr__(self) -> str:
        return f"Container({self.name!r}, image={self.image!r}, url={self.url!r})"

    def alive(self) -> bool:
        """Whether the container is running."""
        try:
            return bool(self.engine.inspect(self.id)["State"]["Running"])
        except EngineRefusedError as error:
            return error.status != 404

    def state(self) -> ContainerState:
        """Return the state of the container."""
        state = self.engine.inspect(self.id)["State"]
        if state["Running"]:
            return ContainerState(True)
        # OOMKilled is not set if a child of the first process was killed; the engine's events show that.
        out_of_memory = bool(state.get("OOMKilled")) or self.engine.ended_for_memory(
            self.id, self._created_at - 1, time.time()
        )
        return ContainerState(False, int(state["ExitCode"]), out_of_memory, str(state.get("Error") or ""))

    def end_state(self) -> ContainerState:
        """Return the state; if the container was killed, wait for the engine's OOM event, if any."""
        state = self.state()
        deadline = time.monotonic() + OOM_EVENT_WAIT_S
        while state.exit_code == KILLED and not state.out_of_memory and time.monotonic() < deadline:
            time.sleep(OOM_POLL_INTERVAL_S)
            state = self.state()
        return state

    def logs(self, tail: int = OUTPUT_LINES) -> str:
        """Return the last lines of the container's output, at most 16 KiB."""
        return self.engine.logs(self.id, tail)[-OUTPUT_BYTES:].decode(errors="replace")

    def remove(self, grace_s: float = 0.0) -> None:
        """Stop the container and remove it with its anonymous volumes. Idempotent; call it again if it fails.

        Args:
            grace_s: Seconds that the server has to shut down.
        """
        if not self._removal.alive or os.getpid() != self._process:
            return
        if self.relay is not None:
            self.relay.close()
        self.engine.remove(self.id, grace_s=grace_s)
        self._removal.detach()


def _remove_forgotten(engine: DockerEngine, container: str, process: int) -> None:
    """Remove a container that was not closed, whose relay then ends; in a fork of its owner, do nothing."""
    if os.getpid() != process:
        return
    try:
        engine.remove(container)
    except ProviderError as error:
        # An exception in a finalizer cannot be caught, and the companion keeps trying.
        logger.warning("a container that nobody closed is left to the companion process: %s", error)


POLL_INTERVAL_S: Final = 0.25
"""How often to check that a starting container is still running."""

RESPONSE_TIMEOUT_S: Final = 1.0
"""Timeout of a health check; the engine keeps connections to an ended server open."""

ORPHAN_SEARCH_S: Final = 2.0
"""How long to look for a container whose creation was interrupted."""


class PinnedImage:
    """An image by its name, resolved once: all containers are of one image, even if the name moves to another.

    Args:
        name: Name or id of the image.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._id: str | None = None

    def id(self, engine: DockerEngine) -> str:
        """Return the id of the image that had the name when this was first called.

        Raises:
            EngineUnavailableError: There is no engine, or it does not respond.
            ImageNotFoundError: The engine has no such image.
        """
        with self._lock:
            if self._id is None:
                if (found := engine.find_image(self.name)) is None:
                    raise _not_found(self.name)
                self._id = str(found["Id"])
            return self._id


def _not_found(image: str) -> ImageNotFoundError:
    return ImageNotFoundError(
        f"expected an image {image!r} on the Docker engine, got none; build it with "
        f"`ropewalk build PATH`, or fetch it with `docker pull {image}`"
    )


def start_container(
    image: str,
    options: ContainerOptions | None = None,
    *,
    engine: DockerEngine | None = None,
    image_id: str | None = None,
    stopping: threading.Event | None = None,
    serves: bool = True,
) -> Container:
    """Start a container and wait until its server is healthy.

    Args:
        image: Name or id of the image. It is not pulled.
        options: Options of the container.
        engine: The engine; by default the one named by DOCKER_HOST or the current context.
        image_id: The id of the image, if the name may have moved to another one since the id was found.
        stopping: Aborts the wait when set.
        serves: Whether the container runs a server; otherwise it is only for running commands and has no URL.

    Raises:
        EngineUnavailableError: There is no engine, or it does not respond.
        ImageNotFoundError: The engine has no such image.
        OptionUnavailableError: The engine does not support an option.
        ServerStartError: The container ended, or its server did not become healthy in time.
    """
    options = options or ContainerOptions()
    engine = engine or DockerEngine.find()
    engine.client()  # raises before there is a companion, if there is no engine or no SDK
    owner = companion.ensure(engine.address)
    short = re.sub("[^A-Za-z0-9]", "-", image.rpartition("/")[2].partition("@")[0].partition(":")[0])[:40]
    name = f"ropewalk-{short or 'image'}-{secrets.token_hex(4)}"
    # A port is published on the loopback interface of the engine's machine.
    publish = serves and options.network != "none" and is_local(engine.address)
    requested = spec(image_id or image, options, owner.labels, publish=publish)
    with owner.guard_creation(name):
        try:
            created = engine.call("POST", "/containers/create", query={"name": name}, body=requested)
        except EngineRefusedError as error:
            raise _explain(error, image, requested["Image"], options) from error
        except BaseException:
            _forget(engine, name)
            raise
        container = Container(engine, str(created["Id"]), name, image, options)
    try:
        try:
            engine.call("POST", f"/containers/{container.id}/start")
        except EngineRefusedError as error:
            raise _explain(error, image, requested["Image"], options) from error
        actual = engine.inspect(container.id)
        if lost := find_dropped(requested, actual):
            limited = any("MemorySwap" in line for line in lost)
            raise OptionUnavailableError(
                f"expected the Docker engine to honour every option of {image}, got {'; '.join(lost)}; its kernel may "
                "lack the control group" + ("; swap=None does without a limit on swap" if limited else "")
            )
        if not serves:
            return container
        bindings = (actual["NetworkSettings"].get("Ports") or {}).get(f"{options.port}/tcp") or ()
        port = next((int(each["HostPort"]) for each in bindings if each.get("HostIp") == LOOPBACK), None)
        if port is None:
            container.relay = Relay(engine, container.id, options.port, options.host_port)
            port = container.relay.port
        _wait_until_healthy(container, port, stopping)
        container.url = f"http://{LOOPBACK}:{port}"
    except BaseException:
        with suppress(ProviderError):  # report the original error; the companion keeps trying
            container.remove()
        raise
    return container


def _wait_until_healthy(container: Container, port: int, stopping: threading.Event | None) -> None:
    next_look = time.monotonic() + POLL_INTERVAL_S

    def probe(left_s: float) -> str | None:
        return health_of(port, min(left_s, RESPONSE_TIMEOUT_S), container.options.token)

    def pause(seconds: float) -> None:
        nonlocal next_look
        if stopping is not None and stopping.is_set():
            raise ServerStartError(f"expected {container.image} to start, but it was stopped meanwhile")
        if time.monotonic() >= next_look:
            _require_running(container)
            if container.relay is not None and (reason := container.relay.failure) is not None:
                raise ServerStartError(
                    f"expected a way into {container.image}, which has no published port, got: {reason}",
                    container.logs(),
                )
            next_look = time.monotonic() + POLL_INTERVAL_S
        time.sleep(seconds)

    server = f"{container.image} on port {container.options.port}"
    wait_healthy(server, probe, container.options.start_timeout_s, pause, output=container.logs)


def _require_running(container: Container) -> None:
    try:
        state = container.end_state()
    except EngineRefusedError as error:
        raise ServerStartError(f"expected {container.image} to start, but somebody removed it") from error
    if state.running:
        return
    hint = "raise memory" if state.out_of_memory else "the output tells why"
    if state.exit_code == KILLED and not state.out_of_memory:
        hint = "something killed it: raise memory if the kernel did so for that, which engines do not always notice"
    raise ServerStartError(
        f"expected {container.image} to start, but its container {state}; {hint}", container.logs()
    )


_NO_IMAGE: Final = re.compile("no such image|image not known", re.IGNORECASE)
"""In the refusals of Docker and of Podman."""


def _explain(error: EngineRefusedError, image: str, used: str, options: ContainerOptions) -> ProviderError:
    """Return what it means that the engine does not create or start a container.

    Args:
        error: Its refusal.
        image: The image's name.
        used: Name or id of the image that was requested.
        options: The container's options.
    """
    if _NO_IMAGE.search(error.reason):  # whatever is in its name
        if used == image:
            return _not_found(image)
        return ImageNotFoundError(
            f"the image {used} was removed from the Docker engine, which {image} named at first; start again "
            "what uses it, to use the image of that name now"
        )
    if options.gpus is not None and "gpu" in error.reason:
        return OptionUnavailableError(
            f"expected a Docker engine with GPUs for gpus={options.gpus!r}, got one without ({error.reason}); install "
            "the NVIDIA container toolkit there, or leave gpus out"
        )
    if "network" in error.reason and options.network not in ("bridge", "none"):
        return OptionUnavailableError(
            f"expected a network {options.network!r} on the Docker engine, got: {error.reason}; "
            f"make it with `docker network create {options.network}`"
        )
    text = (
        f"expected the Docker engine to make a container of {image}, got: {error.reason}; "
        "change the option that it names, or see the engine's log"
    )
    if error.status == 400:
        return OptionUnavailableError(text)
    return EngineRefusedError(text, error.status, error.reason)


def _forget(engine: DockerEngine, name: str) -> None:
    """Remove a container that an interrupted request may still create. The companion removes those that this misses."""
    deadline = time.monotonic() + ORPHAN_SEARCH_S
    with suppress(ProviderError):
        while time.monotonic() < deadline and not engine.remove(name, timeout_s=ORPHAN_SEARCH_S):
            time.sleep(0.05)


class ContainerProvider(OwnedServerProvider):
    """Base class of the providers of a server in a container, which a subclass takes.

    Attributes:
        container: The container; None while it is not running.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopping = threading.Event()
        self.container: Container | None = None

    @property
    def alive(self) -> bool:
        """Whether the container is running; False before the start, True while the engine does not respond."""
        try:
            return self.container is not None and self.container.alive()
        except ProviderError:
            return True  # unknown; the container may outlive its engine

    def output(self) -> str:
        """Return the end of the container's output, and how it ended; "" before the start."""
        if (container := self.container) is None:
            return ""
        try:
            state, text = container.end_state(), container.logs()
        except ProviderError as error:
            return f"[{error}]"
        return text if state.running else f"{text.rstrip()}\n[the container {state}]".lstrip()

    @abstractmethod
    def _take(self) -> tuple[Container, Callable[[], None]]:
        """Return a container whose server is healthy, and what releases it; raise if `_stopping` is set meanwhile."""

    def _launch(self) -> str:
        self._stopping.clear()
        self.container, self._release = self._take()
        return self.container.url

    def _interrupt(self) -> None:
        self._stopping.set()

    def _stop(self) -> None:
        if self.container is not None:
            self._release()
        self.container = self.url = None


class LocalDockerProvider(ContainerProvider):
    """Runs a server from an image, reachable on a free port of the loopback interface.

    By default the container has no capabilities, a read-only root and a limited number of processes. It ends with this
    process, however that dies: a companion process removes it.

    Args:
        image: Name or id of the image. It is not pulled.
        options: Options of the container.
        fields: Fields of `ContainerOptions`, which override those of `options`.

    Raises:
        ConfigurationError: An option is unknown, or a value invalid. `start` raises EngineUnavailableError if no engine
            responds, ImageNotFoundError if it has no such image, OptionUnavailableError if it does not support an
            option; `stop` raises EngineUnavailableError, and can be called again.
    """

    death_s = 3.0
    """How long, in seconds, a busy engine may take to report that a container has ended."""

    def __init__(self, image: str, *, options: ContainerOptions | None = None, **fields: Any) -> None:
        super().__init__()
        self.image = image
        self.options = options_with(options, fields)

    def _take(self) -> tuple[Container, Callable[[], None]]:
        container = start_container(self.image, self.options, stopping=self._stopping)
        return container, partial(container.remove, self.options.stop_timeout_s)


def provider_for(
    image: str, given: AnyProvider | None, options: Mapping[str, Any], client_options: Iterable[str]
) -> tuple[AnyProvider, dict[str, Any]]:
    """Return a provider for an image, and the options of the client.

    Raises:
        ConfigurationError: An option is unknown, or the given provider does not start images.
    """
    known = set(client_options)
    for_client = {name: value for name, value in options.items() if name in known}
    for_container = {name: value for name, value in options.items() if name not in known}
    if given is None:
        return LocalDockerProvider(image, **for_container), for_client
    for name in ("start_container", "wait_for_ready", "stop_container"):
        if not callable(getattr(given, name, None)):
            raise ConfigurationError(
                f"expected a provider with start_container(image), wait_for_ready(base_url) and stop_container(), "
                f"got {type(given).__name__} without {name}; a provider that knows its image goes to the client: "
                "EnvClient(provider=...)"
            )
    provider: Any = given
    start = partial(provider.start_container, image, **for_container)
    return CallableProvider(start, provider.wait_for_ready, provider.stop_container), for_client
