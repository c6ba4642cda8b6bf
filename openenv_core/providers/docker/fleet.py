"""Fleets of environment servers in containers of one Docker engine on this machine."""

import json
import re
from contextlib import nullcontext
from typing import Any, Final, Self

from openenv_core.errors import EngineRefusedError, ProviderError
from openenv_core.providers.base import LOOPBACK, TOKENS, health_of, listen
from openenv_core.providers.docker import companion
from openenv_core.providers.docker.container import PinnedImage
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions, options_with, spec
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer, ServerFleet

FLEET: Final = "ropewalk.fleet"
"""Label of a fleet's containers: its name."""

OPTIONS: Final = "ropewalk.fleet.options"
"""Label with the containers' options and image, from which more are started."""

DRAIN_TIMEOUT_S: Final = 20
"""Seconds that a server has to end: its own drain, and a margin."""

HEALTH_TIMEOUT_S: Final = 2.0

PORT_TAKEN: Final = re.compile("port is already allocated|address already in use")
PORT_ATTEMPTS: Final = 5


class DockerFleet(ServerFleet):
    """A fleet in containers, each at a port of this machine's loopback interface. Needs the extra `docker`.

    The engine restarts containers that die. Unless `detached`, they end with this program, however it ends, like those
    of `LocalDockerProvider`.

    Args:
        image: Name or id of the image. It is not pulled.
        servers: Number of containers.
        name: Name of the fleet; by default a random one.
        token: Bearer token of the servers; by default a random one.
        detached: Whether the containers outlive this program; `find` finds them.
        options: Options of each container.
        option_fields: Fields of `ContainerOptions`, which override those of `options`.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        image: str,
        servers: int,
        *,
        name: str | None = None,
        token: str | None = None,
        detached: bool = False,
        options: ContainerOptions | None = None,
        **option_fields: Any,
    ) -> None:
        super().__init__(servers, name, token)
        given = options_with(options, option_fields)
        self._image, self._detached = image, detached
        self._options = options_with(given, {"env_vars": {**given.env_vars, TOKENS: self.token}})
        self._engine = DockerEngine.find()

    @classmethod
    def find(cls, name: str) -> Self:
        """Return a running fleet."""
        found = DockerEngine.find().list_labelled(f"{FLEET}={name}")
        if not found:
            raise ProviderError(f"expected a fleet {name!r} on the Docker engine, got none")
        image, fields = json.loads(found[0]["Labels"][OPTIONS])
        options = ContainerOptions(**fields)
        return cls(image, len(found), name=name, token=options.token, detached=True, options=options)._adopt()

    def servers(self) -> list[FleetServer]:
        """Return the servers; one whose container does not run, or is not healthy, is not ready."""
        found = []
        for container in self._engine.list_labelled(f"{FLEET}={self.name}"):
            ports = {each.get("PublicPort") for each in container["Ports"]} - {None}
            port = ports.pop() if ports else None
            ready = port is not None and health_of(port, HEALTH_TIMEOUT_S, self.token) is None
            url = None if port is None else f"http://{LOOPBACK}:{port}"
            found.append(FleetServer(container["Names"][0].lstrip("/"), url, ready))
        return sorted(found, key=lambda server: server.number)

    def _end(self) -> None:
        """Remove the containers."""
        self._remove(self.servers(), grace_s=0)

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Drain a server, and start a container of the current image at the same URL, if the container runs."""
        server = self._find(name)
        self._remove([server], grace_s=DRAIN_TIMEOUT_S)
        self._start_container(name, None if server.url is None else int(server.url.rpartition(":")[2]))
        self._wait(lambda: self._find(name).ready, timeout_s, f"{name} to be healthy; see docker logs {name}")

    def _resize(self, servers: int) -> None:
        known = self.servers()
        self._remove([server for server in known if server.number >= servers], grace_s=DRAIN_TIMEOUT_S)
        for number in {*range(servers)} - {server.number for server in known}:
            self._start_container(f"{self.name}-{number}")

    def _cordon(self, server: FleetServer) -> None:
        self._engine.call("POST", f"/containers/{server.name}/kill", query={"signal": "SIGUSR1"})

    def _start_container(self, name: str, port: int | None = None) -> None:
        """Start a container at a port, or at another if something has taken that."""
        engine = self._engine
        image = PinnedImage(self._image).id(engine)
        fields = {key: getattr(self._options, key) for key in self._options.model_fields_set}
        kept = json.dumps([self._image, fields], default=dict)  # some are read-only mappings
        owner = None if self._detached else companion.ensure(engine.address)
        labels = {FLEET: self.name, OPTIONS: kept, **(owner.labels if owner else {})}
        for attempt in range(PORT_ATTEMPTS):
            options = options_with(self._options, {"host_port": port or _free_port()})
            body = spec(image, options, labels, publish=True)
            body["HostConfig"]["RestartPolicy"] = {"Name": "unless-stopped"}
            with nullcontext() if owner is None else owner.guard_creation(name):
                engine.call("POST", "/containers/create", query={"name": name}, body=body)
            try:
                engine.call("POST", f"/containers/{name}/start")
                return
            except EngineRefusedError as error:
                port = None
                if attempt + 1 == PORT_ATTEMPTS or not PORT_TAKEN.search(error.reason):
                    raise
            engine.remove(name)

    def _remove(self, servers: list[FleetServer], grace_s: int) -> None:
        for server in servers:
            self._engine.remove(server.name, grace_s=grace_s)


def _free_port() -> int:
    """Return a port for a container to keep; the engine would draw another one at every restart."""
    with listen() as listener:
        return int(listener.getsockname()[1])
