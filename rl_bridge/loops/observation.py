"""Observation of a run: the state of its processes, and how they spend their time."""

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rl_bridge.generator.vllm_api import EngineTotals
from rl_bridge.metrics.spans import PROCESS_SPANS, Spans, SpanTotals, SpanWindow, group_by_role
from rl_bridge.metrics.status import ReplicaRow, ServiceRow
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.environments.servers import EnvironmentServers
    from rl_bridge.services.fleet import Fleet

CONTROLLER: Final = "controller"
ANSWER_TIMEOUT_S: Final = 2.0
"""Deadline in seconds for a process's answer; a busy one is asked again the next time."""


class SpanCollector:
    """Collects how each process of a run spends its time; keeps the last answer of each."""

    def __init__(self, fleet: "Fleet", *, own_spans: Spans = PROCESS_SPANS) -> None:
        self._fleet = fleet
        self._own_spans = own_spans
        self._last_totals: dict[str, dict[int, SpanTotals]] = {}
        self._window = SpanWindow()

    @property
    def totals_by_process(self) -> dict[str, SpanTotals]:
        """Totals by process: `controller`, and `<service>-<replica>` for each replica that has answered."""
        return {CONTROLLER: self._own_spans.totals()} | {
            f"{name}-{replica}": totals
            for name, replies in self._last_totals.items()
            for replica, totals in replies.items()
        }

    async def collect(self) -> None:
        """Ask the first rank of every replica; keep the last totals of one that does not answer."""
        replies = await query_services(self._fleet, "spans")
        self._last_totals = {name: self._last_totals.get(name, {}) | spans for name, spans in replies.items()}

    async def metrics(self) -> dict[str, float]:
        """Collect, and return each role's shares of time since the last call, by their names in the log."""
        await self.collect()
        role_totals = group_by_role(self._window.advance(self.totals_by_process))
        return {
            name: share
            for role, totals in role_totals.items()
            for name, share in totals.metrics(role).items()
        }


async def query_services(fleet: "Fleet", endpoint: str) -> dict[str, dict[int, Any]]:
    """Return the replies of all replicas of services with this endpoint, without those that do not reply."""
    services = {name: service for name, service in fleet.services.items() if endpoint in service.endpoints}
    replies = (service.query_replicas(endpoint, timeout_s=ANSWER_TIMEOUT_S) for service in services.values())
    return dict(zip(services, await asyncio.gather(*replies), strict=True))


def service_rows(
    fleet: "Fleet", versions: Mapping[str, Mapping[int, PolicyVersion]]
) -> tuple[ServiceRow, ...]:
    """Return the services and their replicas, with the weights' versions that they serve, as far as known."""
    return tuple(
        ServiceRow(
            name=name,
            replicas=tuple(
                replica.model_copy(update={"version": versions.get(name, {}).get(replica.id)})
                for replica in service.replicas
            ),
        )
        for name, service in fleet.services.items()
    )


def server_row(servers: "EnvironmentServers", name: str = "environment") -> ServiceRow:
    """Return an environment's servers as a row; of one that this run did not start only the URL is known."""
    host = socket.gethostname()
    local = tuple(
        ReplicaRow(
            id=number,
            state=server.state,
            host=host,
            pids=() if server.pid is None else (server.pid,),
            restarts=server.restarts,
        )
        for number, server in enumerate(servers.started)
    )
    external = tuple(
        ReplicaRow(id=number, state="given", host=url) for number, url in enumerate(servers.urls)
    )
    return ServiceRow(name=name, replicas=local or external)


def generator_metrics(
    before: Mapping[int, EngineTotals], now: Mapping[int, EngineTotals]
) -> dict[str, float]:
    """Return the generators' work between two snapshots, by its names in the log; empty if none answers."""
    if not now:
        return {}
    delta = EngineTotals()
    for replica, totals in now.items():
        previous = before.get(replica)
        if previous is None or previous.generated_tokens > totals.generated_tokens:  # it was restarted
            previous = EngineTotals()
        delta.prompt_tokens += totals.prompt_tokens - previous.prompt_tokens
        delta.cached_tokens += totals.cached_tokens - previous.cached_tokens
        delta.generated_tokens += totals.generated_tokens - previous.generated_tokens
        delta.preemptions += totals.preemptions - previous.preemptions
    return {
        "generator/prefix_hit_rate": delta.cached_tokens / max(1, delta.prompt_tokens),
        "generator/tokens": float(delta.generated_tokens),
        "generator/preemptions": float(delta.preemptions),
        "generator/kv_cache_usage": max(totals.kv_cache_usage for totals in now.values()),
        "generator/waiting": float(sum(totals.waiting for totals in now.values())),
    }


class RunObserver:
    """Observes a run's processes, as of their last answers: their time, the weights that they serve, their leases."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self.spans = SpanCollector(fleet)
        """How each process has spent its time."""
        self.versions: dict[str, dict[int, PolicyVersion]] = {}
        """The weights' versions that replicas serve, by service and replica."""
        self.workers: dict[int, str] = {}
        """The worker of each lease, by the lease's id."""
        self._generators: dict[int, EngineTotals] = {}

    async def metrics(self) -> dict[str, float]:
        """Return metrics of processes and generators since the last call, by their names in the log."""
        span_metrics, replies = await asyncio.gather(
            self.spans.metrics(), query_services(self._fleet, "statistics")
        )
        statistics: dict[int, EngineTotals] = replies.get("policy", {})
        metrics = generator_metrics(self._generators, statistics)
        self._generators |= statistics
        return {**span_metrics, **metrics}

    async def refresh(self) -> None:
        """Ask all processes, within `ANSWER_TIMEOUT_S`."""
        _, self.versions, leases_by_worker = await asyncio.gather(
            self.spans.collect(),
            query_services(self._fleet, "version"),
            query_services(self._fleet, "playing"),
        )
        self.workers = {
            lease: f"{name}-{replica}"
            for name, workers in leases_by_worker.items()
            for replica, leases in workers.items()
            for lease in leases
        }
