"""A fleet whose servers are processes of this machine, for what all fleets share."""

from typing import Self

from openenv_core.errors import ProviderError
from openenv_core.providers import LocalProcessProvider, ServerFleet
from openenv_core.providers.base import TOKENS
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer


class ProcessFleet(ServerFleet):
    def __init__(self, app: str, servers: int, **env_vars: str) -> None:
        super().__init__(servers, "games", None)
        self._app, self._env_vars = app, {**env_vars, TOKENS: self.token}
        self.providers: dict[str, LocalProcessProvider] = {}

    @classmethod
    def find(cls, name: str) -> Self:
        raise ProviderError(f"expected a fleet {name!r}, got none")

    def servers(self) -> list[FleetServer]:
        return [FleetServer(name, each.url, each.alive) for name, each in sorted(self.providers.items())]

    def _end(self) -> None:
        self._resize(0)

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        port = int(str(self._find(name).url).rpartition(":")[2])
        self.providers[name].stop()
        self.providers[name] = self._start(port)

    def _resize(self, servers: int) -> None:
        for server in self.servers():
            if server.number >= servers:
                self.providers.pop(server.name).stop()
        for number in range(servers):
            if (name := f"{self.name}-{number}") not in self.providers:
                self.providers[name] = self._start(0)

    def _cordon(self, server: FleetServer) -> None:
        self.providers[server.name].cordon()

    def _start(self, port: int) -> LocalProcessProvider:
        provider = LocalProcessProvider(self._app, env_vars=self._env_vars, port=port)
        provider.start()
        return provider
