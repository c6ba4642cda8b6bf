"""One container: how it starts, how it is watched, how it ends; and the provider of a server in one."""

import logging
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from openenv_core.errors import (
    ConfigurationError,
    EngineRefusedError,
    EngineUnavailableError,
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
from openenv_core.providers.docker.companion import Companion, Relay
from openenv_core.providers.docker.engine import DockerEngine, is_local
from openenv_core.providers.docker.options import ContainerOptions, find_dropped, options_with, spec

logger = logging.getLogger("openenv_core")

OUTPUT_LINES: Final = 200
OUTPUT_BYTES: Final = 16_384
"""How much of a container's log goes into an error."""

KILLED: Final = 137
"""What a container ends with whose first process somebody killed: 128 and SIGKILL."""

OOM_EVENT_WAIT_S: Final = 1.0
"""How long it is waited for the engine's word that the kernel killed it for its memory: that may follow its end."""

OOM_POLL_INTERVAL_S: Final = 0.25
"""How often it is looked for meanwhile."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What became of a container.

    Attributes:
        running: Whether its command runs.
        exit_code: What it ended with; None while it runs.
        out_of_memory: Whether the kernel killed one of its processes for its memory. Known once it ended.
        error: What the engine says of it.
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


class Container:
    """A container whose server was healthy. Made by `start_container`; ends with this process at the latest.

    Every method raises EngineUnavailableError where the engine does not answer; those that ask about the container
    raise EngineRefusedError where it is gone, or does not run.

    Attributes:
        id: The engine's id.
        name: Its name.
        image: What it was made from.
        options: What it was made with.
        url: Where its server is.
    """

    def __init__(
        self,
        engine: DockerEngine,
        container_id: str,
        name: str,
        image: str,
        options: ContainerOptions,
        companion_process: Companion,
    ) -> None:
        self.id = container_id
        self.name = name
        self.image = image
        self.options = options
        self.url = ""
        self._engine = engine
        self._born = time.time()
        self._process = os.getpid()
        self._mark_removed = partial(companion_process.mark_removed, name)
        self._removal = weakref.finalize(
            self, _remove_forgotten, engine, container_id, self._process, self._mark_removed
        )
        # The companion, told at exit, removes what is left; one call for all of them.
        self._removal.atexit = False
        self._relay: Relay | None = None

    def __repr__(self) -> str:
        return f"Container({self.name!r}, image={self.image!r}, url={self.url!r})"

    def alive(self) -> bool:
        """Whether the container runs."""
        try:
            return bool(self._engine.inspect(self.id)["State"]["Running"])
        except EngineRefusedError as error:
            if error.status == 404:
                return False
            raise

    def state(self) -> ContainerState:
        """Return what became of the container."""
        state = self._engine.inspect(self.id)["State"]
        if state["Running"]:
            return ContainerState(True)
        # The flag stays off where a child of the first process was killed; the engine's events have it.
        out_of_memory = bool(state.get("OOMKilled")) or self._engine.ended_for_memory(
            self.id, self._born - 1, time.time()
        )
        return ContainerState(False, int(state["ExitCode"]), out_of_memory, str(state.get("Error") or ""))

    def end_state(self) -> ContainerState:
        """Return what became of the container; of one that was killed, once the engine can tell for what."""
        state = self.state()
        told_by = time.monotonic() + OOM_EVENT_WAIT_S
        while state.exit_code == KILLED and not state.out_of_memory and time.monotonic() < told_by:
            time.sleep(OOM_POLL_INTERVAL_S)
            state = self.state()
        return state

    def logs(self, tail: int = OUTPUT_LINES) -> str:
        """Return the last lines that the container printed, at most 16 KiB of them."""
        return self._engine.logs(self.id, tail)[-OUTPUT_BYTES:].decode(errors="replace")

    def pids(self) -> list[int]:
        """Return the processes inside, by their numbers on the engine's machine."""
        top = self._engine.call("GET", f"/containers/{self.id}/top")
        column = top["Titles"].index("PID")
        return [int(process[column]) for process in top["Processes"] or ()]

    def remove(self, grace_s: float = 0.0) -> None:
        """End the container and remove it, with its anonymous volumes. Idempotent; call it again after it has failed.

        Args:
            grace_s: Seconds that the server gets to end in order.
        """
        if not self._removal.alive or os.getpid() != self._process:
            return
        if self._relay is not None:
            self._relay.close()
        if grace_s > 0:
            try:
                query = {"t": math.ceil(grace_s)}
                self._engine.call("POST", f"/containers/{self.id}/stop", query=query, timeout_s=grace_s + 60)
            except EngineRefusedError as error:
                if error.status != 404:
                    raise
        _remove(self._engine, self.id)
        self._removal.detach()
        self._mark_removed()

    def relay_failure(self) -> str | None:
        """Return why connections do not come in, where they go through the engine; None while they may."""
        return None if self._relay is None else self._relay.failure()

    def start_relay(self) -> int:
        """Have a way in that needs no network, and return the port where it begins."""
        self._relay = Relay(self._engine.address, self.id, self.options.port, self.options.host_port)
        weakref.finalize(self, _close, self._relay, self._process).atexit = False
        return self._relay.port


def _close(relay: Relay, process: int) -> None:
    if os.getpid() == process:
        relay.close()


def _remove_forgotten(
    engine: DockerEngine, container: str, process: int, noted_gone: Callable[[], None]
) -> None:
    """Remove a container that was not closed; in a fork of its owner, do nothing."""
    if os.getpid() != process:
        return
    try:
        _remove(engine, container)
    except ProviderError as error:
        # Nobody could catch it here, and the companion goes on trying.
        logger.warning("a container that nobody closed is left to the companion process: %s", error)
    else:
        noted_gone()


def _remove(engine: DockerEngine, container: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            engine.call("DELETE", f"/containers/{container}", query={"force": True, "v": True})
        except EngineRefusedError as error:
            if error.status == 404:
                return
            # Somebody else is at it: wait until it is done.
            if error.status != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


POLL_INTERVAL_S: Final = 0.25
"""How often it is asked whether a container that starts still runs."""

FIRST_RESPONSE_TIMEOUT_S: Final = 0.25
LAST_RESPONSE_TIMEOUT_S: Final = 5.0
"""How long a server that starts may take to answer; it doubles. The engine holds connections to one that ended."""

ORPHAN_SEARCH_S: Final = 2.0
"""How long a container is looked for whose creation was interrupted."""

NOT_REACHED: Final = (FileNotFoundError, ConnectionRefusedError, PermissionError)
"""What a request ends with that never got to an engine."""


def start_container(
    image: str,
    options: ContainerOptions | None = None,
    *,
    engine: DockerEngine | None = None,
    stopping: threading.Event | None = None,
    serves: bool = True,
) -> Container:
    """Start a container and wait until its server is healthy.

    Args:
        image: Name or id of the image. It is not pulled.
        options: What the container gets.
        engine: Where it runs; by default the engine that DOCKER_HOST or the context in use names.
        stopping: Ends the wait when it is set.
        serves: Whether there is a server in it; without one it is there to run commands in, and has no URL.

    Raises:
        EngineUnavailableError: There is no engine, or it does not answer.
        ImageNotFoundError: The engine has no such image.
        OptionUnavailableError: The engine cannot honour an option.
        ServerStartError: The container ended, or stayed silent, before its server was healthy.
    """
    options = options or ContainerOptions()
    engine = engine or DockerEngine.find()
    deadline = time.monotonic() + options.start_timeout_s
    companion_process = companion.ensure(engine.address)
    short = re.sub("[^A-Za-z0-9]", "-", image.rpartition("/")[2].partition("@")[0].partition(":")[0])[:40]
    name = f"ropewalk-{short or 'image'}-{secrets.token_hex(4)}"
    publish = serves and options.reach == "port"
    if serves and options.reach == "auto":  # on the loopback interface of the engine's own machine
        publish = options.network != "none" and is_local(engine.address)
    requested = spec(image, options, companion_process.labels, publish=publish)
    with companion_process.guard_creation(name):
        container = Container(
            engine,
            _create(engine, name, requested, companion_process),
            name,
            image,
            options,
            companion_process,
        )
    try:
        _run(engine, container, options)
        actual = engine.inspect(container.id)
        _require_honoured(image, requested, actual)
        if not serves:
            return container
        bindings = (actual["NetworkSettings"].get("Ports") or {}).get(f"{options.port}/tcp") or ()
        port = next((int(each["HostPort"]) for each in bindings if each.get("HostIp") == LOOPBACK), None)
        if port is None and options.reach == "port":
            raise OptionUnavailableError(
                f'expected network {options.network!r} to publish a port, got none; leave reach at "auto" to go '
                "through the engine"
            )
        port = port or container.start_relay()
        _wait_until_healthy(container, port, deadline, stopping)
        container.url = f"http://{LOOPBACK}:{port}"
    except BaseException:
        with suppress(ProviderError):  # what it failed of is the news; the companion goes on
            container.remove()
        raise
    return container


def _wait_until_healthy(
    container: Container, port: int, deadline: float, stopping: threading.Event | None
) -> None:
    answer_s = FIRST_RESPONSE_TIMEOUT_S
    next_look = time.monotonic() + POLL_INTERVAL_S

    def probe(left_s: float) -> str | None:
        nonlocal answer_s
        trouble = health_of(port, min(left_s, answer_s), container.options.token)
        if trouble is not None and trouble.startswith("TimeoutError"):
            answer_s = min(2 * answer_s, LAST_RESPONSE_TIMEOUT_S)
        return trouble

    def pause(seconds: float) -> None:
        nonlocal next_look
        if stopping is not None and stopping.is_set():
            raise ServerStartError(f"expected {container.image} to start, but it was stopped meanwhile")
        if time.monotonic() >= next_look:
            _require_running(container)
            if (reason := container.relay_failure()) is not None:
                raise ServerStartError(
                    f"expected a way into {container.image}, which has no published port, got: {reason}",
                    container.logs(),
                )
            next_look = time.monotonic() + POLL_INTERVAL_S
        time.sleep(seconds)

    trouble = wait_healthy(probe, deadline - time.monotonic(), pause)
    if trouble is None:
        return
    _require_running(container)
    raise ServerStartError(
        f"expected {container.image} to be healthy on port {container.options.port} within "
        f"{container.options.start_timeout_s:g} s, got {trouble}; raise start_timeout_s if it needs longer, "
        "or name the port where it listens",
        container.logs(),
    )


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


def _create(
    engine: DockerEngine, name: str, requested: dict[str, Any], companion_process: companion.Companion
) -> str:
    try:
        created = engine.call("POST", "/containers/create", query={"name": name}, body=requested)
    except EngineRefusedError as error:
        companion_process.mark_removed(name)
        image = str(requested["Image"])
        if error.status == 404:
            raise ImageNotFoundError(
                f"expected an image {image!r} on the Docker engine, got none; build it with "
                f"`ropewalk build PATH`, or fetch it with `docker pull {image}`"
            ) from error
        if error.status == 400:
            raise OptionUnavailableError(
                f"expected the Docker engine to make a container of {image}, got: {error.reason}; "
                "change the option that it names"
            ) from error
        raise
    except EngineUnavailableError as error:
        if isinstance(error.__cause__, NOT_REACHED):
            companion_process.mark_removed(name)
        else:
            _forget(engine, name)
        raise
    except BaseException:
        _forget(engine, name)
        raise
    return str(created["Id"])


def _run(engine: DockerEngine, container: Container, options: ContainerOptions) -> None:
    try:
        engine.call("POST", f"/containers/{container.id}/start")
    except EngineRefusedError as error:
        if options.gpus is not None and "gpu" in error.reason:
            raise OptionUnavailableError(
                f"expected a Docker engine with GPUs for gpus={options.gpus!r}, got one without "
                f"({error.reason}); install the NVIDIA container toolkit there, or leave gpus out"
            ) from error
        if "network" in error.reason and options.network not in ("bridge", "none"):
            raise OptionUnavailableError(
                f"expected a network {options.network!r} on the Docker engine, got: {error.reason}; "
                f"make it with `docker network create {options.network}`"
            ) from error
        raise EngineRefusedError(
            f"expected the Docker engine to start {container.image}, got: {error.reason}; "
            "change the option that it names, or see the engine's log",
            error.status,
            error.reason,
        ) from error


def _require_honoured(image: str, requested: dict[str, Any], actual: dict[str, Any]) -> None:
    lost = find_dropped(requested, actual)
    if lost:
        hint = (
            "; swap=None does without a limit on swap" if any("MemorySwap" in line for line in lost) else ""
        )
        raise OptionUnavailableError(
            f"expected the Docker engine to honour every option of {image}, got {'; '.join(lost)}; "
            f"its kernel may lack the control group{hint}"
        )


def _forget(engine: DockerEngine, name: str) -> None:
    """Remove what an interrupted request may still create. The companion finds what this does not."""
    deadline = time.monotonic() + ORPHAN_SEARCH_S
    query = {"force": True, "v": True}
    with suppress(EngineUnavailableError):
        while time.monotonic() < deadline:
            try:
                engine.call("DELETE", f"/containers/{name}", query=query, timeout_s=ORPHAN_SEARCH_S)
            except EngineRefusedError:
                time.sleep(0.05)
            else:
                return


class LocalDockerProvider(OwnedServerProvider):
    """Runs an image, on a free port of the loopback interface.

    The container has no capabilities, a read-only root and a bounded number of processes, unless told
    otherwise by name. It ends with this process, whatever that dies of: a companion process removes it.

    Args:
        image: Name or id of the image. It is not pulled.
        options: What the container gets.
        fields: Fields of `ContainerOptions`, in place of those of `options`.

    Raises:
        ConfigurationError: There is no such option, or a value that no engine could honour. `start` raises
            EngineUnavailableError where no engine answers, ImageNotFoundError where it has no such image,
            OptionUnavailableError where it cannot honour an option; `stop` EngineUnavailableError: call it again.
    """

    death_s = 3.0
    """How long, in seconds, an engine that is busy may take to tell that a container has ended."""

    def __init__(self, image: str, *, options: ContainerOptions | None = None, **fields: Any) -> None:
        super().__init__()
        self.image = image
        self.options = options_with(options, fields)
        self._stopping = threading.Event()
        self._container: Container | None = None

    @property
    def container(self) -> Container | None:
        """The container; None while there is none."""
        return self._container

    @property
    def alive(self) -> bool:
        """Whether the container runs; False before the start, and once it has ended by itself."""
        container = self._container
        if container is None:
            return False
        try:
            return container.alive()
        except EngineUnavailableError:
            return True  # nobody knows; the container may outlive its engine

    def output(self) -> str:
        """Return the last of what the container printed, and how it ended; empty before the start."""
        container = self._container
        if container is None:
            return ""
        try:
            state, text = container.end_state(), container.logs()
        except ProviderError as error:
            return f"[{error}]"
        return text if state.running else f"{text.rstrip()}\n[the container {state}]".lstrip()

    def _launch(self) -> str:
        self._stopping.clear()
        self._container = start_container(self.image, self.options, stopping=self._stopping)
        return self._container.url

    def _interrupt(self) -> None:
        self._stopping.set()

    def _stop(self) -> None:
        if self._container is not None:
            self._container.remove(self.options.stop_timeout_s)
            self._container = None
        self._url = None


def provider_for(
    image: str, given: AnyProvider | None, options: Mapping[str, Any], client_options: Iterable[str]
) -> tuple[AnyProvider, dict[str, Any]]:
    """Return what starts the image, and the options that are the client's.

    Raises:
        ConfigurationError: There is no such option, or the given provider starts no images.
    """
    known = set(client_options)
    of_client = {name: value for name, value in options.items() if name in known}
    of_container = {name: value for name, value in options.items() if name not in known}
    if given is None:
        return LocalDockerProvider(image, **of_container), of_client
    for name in ("start_container", "wait_for_ready", "stop_container"):
        if not callable(getattr(given, name, None)):
            raise ConfigurationError(
                f"expected a provider with start_container(image), wait_for_ready(base_url) and stop_container(), "
                f"got {type(given).__name__} without {name}; a provider that knows its image goes to the client: "
                "EnvClient(provider=...)"
            )
    provider: Any = given
    start = partial(provider.start_container, image, **of_container)
    return CallableProvider(start, provider.wait_for_ready, provider.stop_container), of_client
