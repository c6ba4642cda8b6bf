"""How the replicas of a service stand."""

from dataclasses import dataclass

from rl_bridge.services.keeper import ReplicaState
from rl_bridge.services.place import Place


@dataclass(slots=True, frozen=True)
class ReplicaStatus:
    """How one replica stands.

    Attributes:
        id: Its number in the service.
        state: Where it is in its life.
        places: Host and process of each rank, as soon as they have told; none of a start that is over.
        in_flight: Calls it has begun and not ended.
        restarts: How often it was started again.
    """

    id: int
    state: ReplicaState
    places: tuple[Place, ...]
    in_flight: int
    restarts: int

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(place.pid for place in self.places)

    @property
    def host(self) -> str:
        """The host of the first rank; empty before it has told."""
        return self.places[0].host if self.places else ""
