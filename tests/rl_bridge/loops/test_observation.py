"""What a snapshot says of a run's parts."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loop_stage import Stage

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.generator.vllm_api import EngineTotals
from rl_bridge.loops.observation import (
    ANSWER_TIMEOUT_S,
    RunObserver,
    SpanCollector,
    server_row,
    service_rows,
)
from rl_bridge.loops.run import Run, snapshot
from rl_bridge.metrics.spans import Spans, SpanTotals
from rl_bridge.metrics.status import ReplicaRow, StatusSnapshot


class Service:
    endpoints = frozenset({"spans"})

    def __init__(self, **totals: SpanTotals) -> None:
        self.totals = {int(replica.removeprefix("r")): spent for replica, spent in totals.items()}
        self.answers = True
        self.replicas = [
            ReplicaRow(id=0, state="serving", host="one", pids=(7, 8), in_flight=3, restarts=1),
            ReplicaRow(id=1, state="starting"),
        ]

    async def query_replicas(self, endpoint: str, *, timeout_s: float) -> dict[int, SpanTotals]:
        assert (endpoint, timeout_s) == ("spans", ANSWER_TIMEOUT_S)
        return dict(self.totals) if self.answers else {}


def spent(wall_s: float, train_s: float, began: float = 1.0) -> SpanTotals:
    return SpanTotals(began=began, wall_s=wall_s, cpu_s=0.0, seconds={("train", None): train_s})


def fleet(**services: Service) -> Any:
    return SimpleNamespace(services=services, events=deque())


async def test_shares_of_an_iteration_are_those_since_the_last() -> None:
    trainer = Service(r0=spent(10, 5))
    run = fleet(trainer=trainer)
    collector = SpanCollector(run, own_spans=Spans())
    assert (await collector.metrics())["span/trainer/work/train"] == 0.5
    trainer.totals = {0: spent(20, 14), 1: spent(10, 10)}
    metrics = await collector.metrics()
    assert metrics["span/trainer/work/train"] == 19 / 20
    assert metrics["span/controller/unaccounted"] == 1.0
    assert collector.totals_by_process.keys() == {"controller", "trainer-0", "trainer-1"}


async def test_what_generators_did_is_counted_since_the_last_iteration_and_anew_after_a_restart() -> None:
    policy: Any = Service()
    policy.endpoints = frozenset({"statistics"})
    answers: dict[int, EngineTotals | None] = {}

    async def query_replicas(endpoint: str, *, timeout_s: float) -> dict[int, Any]:
        return {"statistics": answers}[endpoint]

    policy.query_replicas = query_replicas
    observer = RunObserver(fleet(policy=policy))
    answers |= {0: EngineTotals(100, 40, 50, 1, 0.25), 1: EngineTotals(100, 20, 60, 0, 0.5), 2: None}
    told = await observer.metrics()
    assert told["generator/prefix_hit_rate"] == 60 / 200
    # 100 and 10 more prompt tokens; the second has been started again.
    answers |= {0: EngineTotals(200, 90, 80, 1, 0.75), 1: EngineTotals(10, 5, 5, 2, 0.125)}
    told = {
        name: value for name, value in (await observer.metrics()).items() if name.startswith("generator/")
    }
    assert told == {
        "generator/prefix_hit_rate": 55 / 110,
        "generator/tokens": 35.0,
        "generator/preemptions": 2.0,
        "generator/kv_cache_usage": 0.75,
    }
    answers.clear()
    assert not any(name.startswith("generator/") for name in await observer.metrics())


def test_mesh_and_versions() -> None:
    run = fleet(policy=Service())
    (row,) = service_rows(run, {"policy": {0: 12}})
    first, second = row.replicas
    assert (first.id, first.state, first.host, first.pids) == (0, "serving", "one", (7, 8))
    assert (first.in_flight, first.restarts, first.version) == (3, 1, 12)
    assert (second.host, second.version) == (None, None)


def test_environment_servers_are_a_service_too() -> None:
    started = SimpleNamespace(state="restarting", pid=None, restarts=2)
    row = server_row(SimpleNamespace(started=[started], urls=()))  # type: ignore[arg-type]
    assert row.name == "environment"
    (server,) = row.replicas
    assert (server.state, server.pids, server.restarts) == ("restarting", (), 2)
    given = server_row(SimpleNamespace(started=[], urls=("http://a:1", "http://b:2")))  # type: ignore[arg-type]
    assert [server.host for server in given.replicas] == ["http://a:1", "http://b:2"]
    assert {server.pids for server in given.replicas} == {()}  # they count for no host


async def test_who_serves_what_and_works_on_what_is_asked() -> None:
    class Answering:
        def __init__(self, **answers: dict[int, Any]) -> None:
            self.endpoints = frozenset(answers)
            self.answers = answers

        async def query_replicas(self, endpoint: str, *, timeout_s: float) -> dict[int, Any]:
            return self.answers[endpoint]

    observer = RunObserver(
        fleet(
            policy=Answering(version={0: 3, 1: 2}, spans={}),  # type: ignore[arg-type]
            rollout=Answering(playing={0: (7, 8), 1: ()}, version={}),  # type: ignore[arg-type]
        )
    )
    await observer.refresh()
    assert observer.versions == {"policy": {0: 3, 1: 2}, "rollout": {}}
    assert observer.workers == {7: "rollout-0", 8: "rollout-0"}
    assert observer.spans.totals_by_process.keys() == {"controller"}


async def test_groups_and_leases_of_a_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    ledger = Ledger(max_losses=1)
    leases = [ledger.lease(served=0, now=0.0, admit=True) for _ in range(6)]
    first, second, third, fourth, fifth, _ = (lease for lease in leases if lease is not None)
    ledger.complete(first.id)
    ledger.train(first.group, 0)
    ledger.complete(second.id)
    ledger.lose(third.id)
    ledger.drop(fourth.id, "straggler")
    ledger.lease(served=0, now=0.0, admit=False)  # the third again
    told: list[StatusSnapshot] = []

    async def look(run: Run) -> None:
        run.buffer.ledger = ledger
        run.observer.workers = {fifth.id: "rollout-1"}
        run.latest_metrics = {"reward/mean": 0.5, "loss/total": float("nan")}
        told.append(snapshot(run, fleet(policy=Service()), {}))

    await stage.train(work=look)
    (seen,) = told
    assert seen.groups == {"waiting": 0, "leased": 3, "finished": 1, "trained": 1, "dropped": 1}
    assert {row.group: (row.worker, row.attempt) for row in seen.leases} == {
        4: ("rollout-1", 1),
        5: ("-", 1),
        2: ("-", 2),
    }
    assert seen.metrics == {"reward/mean": 0.5}
