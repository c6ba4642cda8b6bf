"""Where the processes of a run can be: this machine, or several."""

from dataclasses import dataclass, field
from typing import Any, Self

from rl_bridge.errors import MissingStack
from rl_bridge.services.options import ServiceOptions

try:
    from monarch.actor import this_host
except ModuleNotFoundError as missing:
    raise MissingStack("torchmonarch") from missing


@dataclass(slots=True, frozen=True)
class HostPlace:
    """Where one start of a replica goes: a mesh of hosts, and variables that the place asks for."""

    mesh: Any
    environment: dict[str, str] = field(default_factory=dict)


class Hosts:
    """The hosts of a run."""

    local = True

    @classmethod
    def this_machine(cls) -> Self:
        """This machine alone."""
        return cls()

    def place(self, name: str, options: ServiceOptions) -> HostPlace:
        """Choose where a start of a replica goes."""
        del name, options
        return HostPlace(this_host())

    async def close(self) -> None:
        """Give the hosts back."""
