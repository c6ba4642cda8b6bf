"""One running container with a server in it."""

import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from openenv_core.errors import EngineRefused, ProviderError
from openenv_core.providers.docker.companion import Companion
from openenv_core.providers.docker.engine import Engine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.providers.docker.relay import Relay

logger = logging.getLogger("openenv_core")

OUTPUT_LINES: Final = 200
OUTPUT_BYTES: Final = 16_384
"""How much of a container's log goes into an error."""

KILLED: Final = 137
"""What a container ends with whose first process somebody killed: 128 and SIGKILL."""

OOM_EVENT_S: Final = 1.0
"""How long it is waited for the engine's word that the kernel killed it for its memory: that may follow its end."""

OOM_LOOK_S: Final = 0.25
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
        why = ", killed for its memory" if self.out_of_memory else ""
        return f"ended with exit code {self.exit_code}{why}" + (f" ({self.error})" if self.error else "")


@dataclass(frozen=True, slots=True)
class ContainerStats:
    """What a container uses.

    Attributes:
        memory_bytes: Its memory, without the cache of files.
        cpu_s: The CPU time that it has used.
        pids: Its processes and threads.
    """

    memory_bytes: int
    cpu_s: float
    pids: int


class Container:
    """A container whose server was healthy. Made by `start_container`; ends with this process at the latest.

    Attributes:
        id: The engine's id.
        name: Its name.
        image: What it was made from.
        options: What it was made with.
        url: Where its server is.
    """

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        name: str,
        image: str,
        options: ContainerOptions,
        ours: Companion,
    ) -> None:
        self.id = container_id
        self.name = name
        self.image = image
        self.options = options
        self.url = ""
        self._engine = engine
        self._born = time.time()
        self._process = os.getpid()
        self._noted_gone = partial(ours.gone, name)
        self._removal = weakref.finalize(
            self, _remove_forgotten, engine, container_id, self._process, self._noted_gone
        )
        # The companion, told at exit, removes what is left; one call for all of them.
        self._removal.atexit = False
        self._relay: Relay | None = None

    def __repr__(self) -> str:
        return f"Container({self.name!r}, image={self.image!r}, url={self.url!r})"

    def alive(self) -> bool:
        """Whether the container runs.

        Raises:
            EngineUnavailable: The engine does not answer.
        """
        try:
            return bool(self._engine.inspect(self.id)["State"]["Running"])
        except EngineRefused as error:
            if error.status == 404:
                return False
            raise

    def state(self) -> ContainerState:
        """Return what became of the container.

        Raises:
            EngineUnavailable: The engine does not answer.
            EngineRefused: There is no such container any more.
        """
        state = self._engine.inspect(self.id)["State"]
        if state["Running"]:
            return ContainerState(True)
        # The flag stays off where a child of the first process was killed; the engine's events have it.
        out_of_memory = bool(state.get("OOMKilled")) or self._engine.ended_for_memory(
            self.id, self._born - 1, time.time()
        )
        return ContainerState(False, int(state["ExitCode"]), out_of_memory, str(state.get("Error") or ""))

    def end_state(self) -> ContainerState:
        """Return what became of the container; of one that was killed, once the engine has had time to tell for what.

        Raises:
            EngineUnavailable: The engine does not answer.
            EngineRefused: There is no such container any more.
        """
        state = self.state()
        told_by = time.monotonic() + OOM_EVENT_S
        while state.exit_code == KILLED and not state.out_of_memory and time.monotonic() < told_by:
            time.sleep(OOM_LOOK_S)
            state = self.state()
        return state

    def logs(self, tail: int = OUTPUT_LINES) -> str:
        """Return the last lines that the container printed, at most 16 KiB of them.

        Raises:
            EngineUnavailable: The engine does not answer.
            EngineRefused: There is no such container any more.
        """
        return self._engine.logs(self.id, tail)[-OUTPUT_BYTES:].decode(errors="replace")

    def pids(self) -> list[int]:
        """Return the processes inside, by their numbers on the engine's machine.

        Raises:
            EngineUnavailable: The engine does not answer.
            EngineRefused: The container does not run.
        """
        found = self._engine.call("GET", f"/containers/{self.id}/top")
        column = found["Titles"].index("PID")
        return [int(process[column]) for process in found["Processes"] or ()]

    def stats(self) -> ContainerStats:
        """Return what the container uses.

        Raises:
            EngineUnavailable: The engine does not answer.
            EngineRefused: There is no such container any more.
        """
        query = {"stream": False, "one-shot": True}
        found = self._engine.call("GET", f"/containers/{self.id}/stats", query=query)
        memory = found.get("memory_stats") or {}
        cache = memory.get("stats") or {}
        unused = int(cache.get("total_inactive_file", cache.get("inactive_file", 0)))
        cpu = found.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0)
        return ContainerStats(
            memory_bytes=max(0, int(memory.get("usage", 0)) - unused),
            cpu_s=int(cpu) / 1e9,
            pids=int((found.get("pids_stats") or {}).get("current", 0)),
        )

    def remove(self, grace_s: float = 0.0) -> None:
        """End the container and remove it, with its anonymous volumes. Idempotent.

        Args:
            grace_s: Seconds that the server gets to end in order.

        Raises:
            EngineUnavailable: The engine does not answer; call again.
        """
        if not self._removal.alive or os.getpid() != self._process:
            return
        if self._relay is not None:
            self._relay.close()
        if grace_s > 0:
            _stop(self._engine, self.id, grace_s)
        _remove(self._engine, self.id)
        self._removal.detach()
        self._noted_gone()

    def way_in_failure(self) -> str | None:
        """Return why connections do not come in, where they go through the engine; None while they may."""
        return None if self._relay is None else self._relay.failure()

    def relayed(self) -> int:
        """Have a way in that needs no network, and return the port where it begins."""
        self._relay = Relay(self._engine.address, self.id, self.options.port, self.options.host_port)
        weakref.finalize(self, _close, self._relay, self._process).atexit = False
        return self._relay.port


def _close(relay: Relay, process: int) -> None:
    if os.getpid() == process:
        relay.close()


def _stop(engine: Engine, container: str, grace_s: float) -> None:
    try:
        engine.call(
            "POST",
            f"/containers/{container}/stop",
            query={"t": math.ceil(grace_s)},
            timeout_s=grace_s + 60,
        )
    except EngineRefused as error:
        if error.status != 404:
            raise


def _remove_forgotten(engine: Engine, container: str, process: int, noted_gone: Callable[[], None]) -> None:
    """Remove a container that nobody closed; a fork of its owner leaves it alone."""
    if os.getpid() != process:
        return
    try:
        _remove(engine, container)
    except ProviderError as error:
        # Nobody could catch it here, and the companion goes on trying.
        logger.warning("a container that nobody closed is left to the companion process: %s", error)
    else:
        noted_gone()


def _remove(engine: Engine, container: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            engine.call("DELETE", f"/containers/{container}", query={"force": True, "v": True})
        except EngineRefused as error:
            if error.status == 404:
                return
            # Somebody else is at it: wait until it is done.
            if error.status != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
