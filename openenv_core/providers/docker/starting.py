"""The start of a container: made, run, compared with what was asked for, and waited for until it is healthy."""

import secrets
import threading
import time
from contextlib import suppress
from typing import Any, Final

from openenv_core.errors import (
    EngineRefused,
    EngineUnavailable,
    ImageNotFound,
    OptionUnavailable,
    ProviderError,
    ServerStartFailed,
)
from openenv_core.providers.docker import companion
from openenv_core.providers.docker.address import is_local
from openenv_core.providers.docker.container import KILLED, Container
from openenv_core.providers.docker.engine import Engine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.providers.docker.spec import dropped, spec
from openenv_core.providers.health import LOOPBACK, status_of

FIRST_PAUSE_S: Final = 0.003
LAST_PAUSE_S: Final = 0.05
"""Pauses between two looks at a server that starts; they grow, since what starts slowly needs the CPU itself."""

LOOK_S: Final = 0.25
"""How often it is asked whether a container that starts still runs."""

FIRST_ANSWER_S: Final = 0.25
LAST_ANSWER_S: Final = 5.0
"""How long a server that starts may take to answer; it doubles. The engine holds connections to one that ended."""

UNSURE_S: Final = 2.0
"""How long a container is looked for whose creation was interrupted."""

NOT_REACHED: Final = (FileNotFoundError, ConnectionRefusedError, PermissionError)
"""What a request ends with that never got to an engine."""


def start_container(
    image: str,
    options: ContainerOptions | None = None,
    *,
    engine: Engine | None = None,
    stopping: threading.Event | None = None,
) -> Container:
    """Start a container and wait until its server is healthy.

    Args:
        image: Name or id of the image. It is not pulled.
        options: What the container gets.
        engine: Where it runs; by default the engine that DOCKER_HOST or the context in use names.
        stopping: Ends the wait when it is set.

    Raises:
        EngineUnavailable: There is no engine, or it does not answer.
        ImageNotFound: The engine has no such image.
        OptionUnavailable: The engine cannot honour an option.
        ServerStartFailed: The container ended, or stayed silent, before its server was healthy.
    """
    options = options or ContainerOptions()
    engine = engine or Engine.find()
    deadline = time.monotonic() + options.start_timeout_s
    ours = companion.ensure(engine.address)
    name = f"ropewalk-{_stem(image)}-{secrets.token_hex(4)}"
    asked = spec(image, options, ours.labels, publish=_publishes(engine, options))
    with ours.making(name):
        container = Container(engine, _create(engine, name, asked, ours), name, image, options, ours)
    try:
        _run(engine, container, options)
        found = engine.inspect(container.id)
        _require_honoured(image, asked, found)
        port = _published(found, options.port)
        if port is None and options.reach == "port":
            raise OptionUnavailable(
                f'expected network {options.network!r} to publish a port, got none; leave reach at "auto" to go '
                "through the engine"
            )
        port = port or container.relayed()
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
    pause, answer_s, seen = FIRST_PAUSE_S, FIRST_ANSWER_S, "no answer"
    next_look = time.monotonic() + LOOK_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            status = status_of(port, min(left, answer_s), container.options.token)
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                answer_s = min(2 * answer_s, LAST_ANSWER_S)
            seen = f"{type(error).__name__}: {error}"
        else:
            if status == "healthy":
                return
            seen = f"status {status!r}"
        if stopping is not None and stopping.is_set():
            raise ServerStartFailed(f"expected {container.image} to start, but it was stopped meanwhile")
        if time.monotonic() >= next_look:
            _require_running(container)
            if (why := container.way_in_failure()) is not None:
                raise ServerStartFailed(
                    f"expected a way into {container.image}, which has no published port, got: {why}",
                    container.logs(),
                )
            next_look = time.monotonic() + LOOK_S
        time.sleep(pause)
        pause = min(pause * 1.2, LAST_PAUSE_S)
    _require_running(container)
    raise ServerStartFailed(
        f"expected {container.image} to be healthy on port {container.options.port} within "
        f"{container.options.start_timeout_s:g} s, got {seen}; raise start_timeout_s if it needs longer, "
        "or name the port where it listens",
        container.logs(),
    )


def _require_running(container: Container) -> None:
    try:
        state = container.end_state()
    except EngineRefused as error:
        raise ServerStartFailed(f"expected {container.image} to start, but somebody removed it") from error
    if state.running:
        return
    hint = "raise memory" if state.out_of_memory else "the output tells why"
    if state.exit_code == KILLED and not state.out_of_memory:
        hint = "something killed it: raise memory if the kernel did so for that, which engines do not always notice"
    raise ServerStartFailed(
        f"expected {container.image} to start, but its container {state}; {hint}", container.logs()
    )


def _publishes(engine: Engine, options: ContainerOptions) -> bool:
    """Whether the engine is asked to publish the port, on the loopback interface of its own machine."""
    if options.reach != "auto":
        return options.reach == "port"
    return options.network != "none" and is_local(engine.address)


def _create(engine: Engine, name: str, asked: dict[str, Any], ours: companion.Companion) -> str:
    try:
        created = engine.call("POST", "/containers/create", query={"name": name}, body=asked)
    except EngineRefused as error:
        ours.gone(name)
        if (known := _why_not_made(str(asked["Image"]), error)) is not None:
            raise known from error
        raise
    except EngineUnavailable as error:
        if isinstance(error.__cause__, NOT_REACHED):
            ours.gone(name)
        else:
            _forget(engine, name)
        raise
    except BaseException:
        _forget(engine, name)
        raise
    return str(created["Id"])


def _why_not_made(image: str, error: EngineRefused) -> ProviderError | None:
    if error.status == 404:
        return ImageNotFound(
            f"expected an image {image!r} on the Docker engine, got none; build it with "
            f"`ropewalk build PATH`, or fetch it with `docker pull {image}`"
        )
    if error.status == 400:
        return OptionUnavailable(
            f"expected the Docker engine to make a container of {image}, got: {error.reason}; "
            "change the option that it names"
        )
    return None


def _run(engine: Engine, container: Container, options: ContainerOptions) -> None:
    try:
        engine.call("POST", f"/containers/{container.id}/start")
    except EngineRefused as error:
        if options.gpus is not None and "gpu" in error.reason:
            raise OptionUnavailable(
                f"expected a Docker engine with GPUs for gpus={options.gpus!r}, got one without "
                f"({error.reason}); install the NVIDIA container toolkit there, or leave gpus out"
            ) from error
        if "network" in error.reason and options.network not in ("bridge", "none"):
            raise OptionUnavailable(
                f"expected a network {options.network!r} on the Docker engine, got: {error.reason}; "
                f"make it with `docker network create {options.network}`"
            ) from error
        raise EngineRefused(
            f"expected the Docker engine to start {container.image}, got: {error.reason}; "
            "change the option that it names, or see the engine's log",
            error.status,
            error.reason,
        ) from error


def _require_honoured(image: str, asked: dict[str, Any], found: dict[str, Any]) -> None:
    lost = dropped(asked, found)
    if lost:
        hint = (
            "; swap=None does without a limit on swap" if any("MemorySwap" in line for line in lost) else ""
        )
        raise OptionUnavailable(
            f"expected the Docker engine to honour every option of {image}, got {'; '.join(lost)}; "
            f"its kernel may lack the control group{hint}"
        )


def _published(found: dict[str, Any], port: int) -> int | None:
    bindings = (found["NetworkSettings"].get("Ports") or {}).get(f"{port}/tcp") or ()
    return next((int(each["HostPort"]) for each in bindings if each.get("HostIp") == LOOPBACK), None)


def _forget(engine: Engine, name: str) -> None:
    """Remove what an interrupted request may still create. The companion finds what this does not."""
    deadline = time.monotonic() + UNSURE_S
    while time.monotonic() < deadline:
        try:
            engine.call("DELETE", f"/containers/{name}", query={"force": True, "v": True}, timeout_s=UNSURE_S)
        except EngineRefused:
            time.sleep(0.05)
        except EngineUnavailable:
            return
        else:
            return


def _stem(image: str) -> str:
    last = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return "".join(each if each.isalnum() and each.isascii() else "-" for each in last)[:40] or "image"
