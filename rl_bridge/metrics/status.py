"""What a run says of itself while it is under way: one snapshot, which travels as one line of JSON."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from rl_bridge.metrics.totals import SpanTotals
from rl_bridge.types import PolicyVersion

SERVING = "serving"
"""The state of a replica that takes calls."""


def _as_totals(value: Any) -> SpanTotals:
    return value if isinstance(value, SpanTotals) else SpanTotals.from_json(value)


Totals = Annotated[SpanTotals, PlainValidator(_as_totals), PlainSerializer(SpanTotals.as_json)]


class Row(BaseModel):
    """A part of a snapshot. What a newer run says beside it is passed over."""

    model_config = ConfigDict(frozen=True)


class ReplicaRow(Row):
    """One replica of a service.

    Attributes:
        id: Its number within the service; a replica that is restarted keeps it.
        state: `serving`, or what keeps it from that.
        host: Where it runs; None while it does not.
        pids: Of its processes, one a rank.
        in_flight: Calls that it is at work on.
        restarts: How often it has been started again.
        version: Of the weights that it serves; None where it has none, or nobody has asked.
    """

    id: int
    state: str
    host: str | None = None
    pids: tuple[int, ...] = ()
    in_flight: int = 0
    restarts: int = 0
    version: PolicyVersion | None = None


class ServiceRow(Row):
    """A service and its replicas."""

    name: str
    replicas: tuple[ReplicaRow, ...]


class LeaseRow(Row):
    """A group that a rollout worker is at work on.

    Attributes:
        group: The group's id.
        worker: Who plays it.
        attempt: Which attempt at it this is; the first is 1.
        age_s: Since when.
    """

    group: int
    worker: str
    attempt: int
    age_s: float


class EventRow(Row):
    """Something that befell a service.

    Attributes:
        at: Seconds since the epoch.
        service: Which service.
        replica: Which of its replicas; None where it is about all of them.
        what: What happened.
    """

    at: float
    service: str
    replica: int | None
    what: str


class StatusSnapshot(Row):
    """A run at one moment.

    Attributes:
        name: What the run is called.
        folder: Where it writes, on the controller's host.
        host: The controller's.
        pid: The controller's.
        began: When the run was started, in seconds since the epoch.
        taken: When the snapshot was taken, likewise.
        iterations: How many there will be.
        version: How many have been trained.
        served: The weights that every serving generator holds.
        max_staleness: The bound of the run.
        services: The mesh.
        groups: How many groups are in which state, by the ledger.
        leases: Groups that are being played.
        events: The last ones, oldest first.
        spans: How each process has spent its time since it began.
        figures: Of the newest iteration, as far as they are finite.
    """

    name: str
    folder: str
    host: str
    pid: int
    began: float
    taken: float
    iterations: int
    version: PolicyVersion
    served: PolicyVersion
    max_staleness: int
    services: tuple[ServiceRow, ...] = ()
    groups: Mapping[str, int] = Field(default_factory=dict)
    leases: tuple[LeaseRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    spans: Mapping[str, Totals] = Field(default_factory=dict)
    figures: Mapping[str, float] = Field(default_factory=dict)

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that somebody is alive on, the controller's among them."""
        replicas = (replica for service in self.services for replica in service.replicas)
        return frozenset(
            {self.host, *(replica.host for replica in replicas if replica.host and replica.pids)}
        )
