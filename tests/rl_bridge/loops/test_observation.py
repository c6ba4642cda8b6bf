"""The parts of a run's status snapshot."""

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loop_stage import Stage

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.errors import RolloutError
from rl_bridge.generator.vllm_api import EngineTotals
from rl_bridge.loops.observation import (
    ANSWER_TIMEOUT_S,
    RunObserver,
    SpanCollector,
    server_row,
)
from rl_bridge.loops.run import Run, snapshot
from rl_bridge.metrics.spans import Spans, SpanTotals
from rl_bridge.metrics.status import ReplicaRow, StatusSnapshot
from rl_bridge.rollout.task import to_floats


class Service:
    endpoints = frozenset({"spans"})

    def __init__(self, **totals: SpanTotals) -> None:
        self.totals = {int(replica.removeprefix("r")): span_totals for replica, span_totals in totals.items()}
        self.answers = True
        self.replicas = [
            ReplicaRow(id=0, state="serving", host="one", pids=(7, 8), in_flight=3, restarts=1),
            ReplicaRow(id=1, state="starting"),
        ]

    async def query_replicas(self, endpoint: str, *, timeout_s: float) -> dict[int, SpanTotals]:
        assert (endpoint, timeout_s) == ("spans", ANSWER_TIMEOUT_S)
        return dict(self.totals) if self.answers else {}


def span_totals(wall_s: float, train_s: float, began: float = 1.0) -> SpanTotals:
    return SpanTotals(began=began, wall_s=wall_s, cpu_s=0.0, seconds={("train", None): train_s})


def fleet(**services: Service) -> Any:
    return SimpleNamespace(services=services, events=deque())


async def test_shares_of_an_iteration_are_those_since_the_last() -> None:
    trainer = Service(r0=span_totals(10, 5))
    run = fleet(trainer=trainer)
    collector = SpanCollector(run, own_spans=Spans())
    assert (await collector.metrics())["span/trainer/work/train"] == 0.5
    trainer.totals = {0: span_totals(20, 14), 1: span_totals(10, 10)}
    metrics = await collector.metrics()
    assert metrics["span/trainer/work/train"] == 19 / 20
    assert metrics["span/controller/unaccounted"] == 1.0
    assert collector.totals_by_process.keys() == {"controller", "trainer-0", "trainer-1"}


async def test_generator_statistics_count_since_the_last_iteration_and_restart_at_zero() -> None:
    policy: Any = Service()
    policy.endpoints = frozenset({"statistics"})
    answers: dict[int, EngineTotals] = {}

    async def query_replicas(endpoint: str, *, timeout_s: float) -> dict[int, Any]:
        return {"statistics": answers}[endpoint]

    policy.query_replicas = query_replicas
    observer = RunObserver(fleet(policy=policy))
    answers |= {0: EngineTotals(100, 40, 50, 1, 0.25), 1: EngineTotals(100, 20, 60, 0, 0.5)}
    metrics = await observer.metrics()
    assert metrics["generator/prefix_hit_rate"] == 60 / 200
    # 100 and 10 more prompt tokens; the second has been started again.
    answers |= {0: EngineTotals(200, 90, 80, 1, 0.75, 9, 4), 1: EngineTotals(10, 5, 5, 2, 0.125, 9, 3)}
    metrics = {
        name: value for name, value in (await observer.metrics()).items() if name.startswith("generator/")
    }
    assert metrics == {
        "generator/prefix_hit_rate": 55 / 110,
        "generator/tokens": 35.0,
        "generator/preemptions": 2.0,
        "generator/kv_cache_usage": 0.75,
        "generator/waiting": 7.0,
    }
    answers.clear()
    assert not any(name.startswith("generator/") for name in await observer.metrics())


def test_environment_servers_are_a_service_too() -> None:
    started = SimpleNamespace(state="restarting", pid=None, restarts=2)
    row = server_row(SimpleNamespace(started=[started], urls=()))  # type: ignore[arg-type]
    assert row.name == "environment"
    (server,) = row.replicas
    assert (server.state, server.pids, server.restarts) == ("restarting", (), 2)
    external = server_row(SimpleNamespace(started=[], urls=("http://a:1", "http://b:2")))  # type: ignore[arg-type]
    assert [server.host for server in external.replicas] == ["http://a:1", "http://b:2"]
    assert {server.pids for server in external.replicas} == {()}  # they count for no host


async def test_served_versions_and_leases_of_workers_are_queried() -> None:
    class Answering:
        def __init__(self, **answers: dict[int, Any]) -> None:
            self.endpoints = frozenset(answers)
            self.answers = answers

        async def query_replicas(self, endpoint: str, *, timeout_s: float) -> dict[int, Any]:
            return self.answers[endpoint]

    observer = RunObserver(
        fleet(
            policy=Answering(version={0: 3, 1: 2}, spans={}),  # type: ignore[arg-type]
            rollout=Answering(playing={0: {7: 0.0, 8: 1.5}, 1: {}}, version={}),  # type: ignore[arg-type]
        )
    )
    await observer.refresh()
    assert observer.versions == {"policy": {0: 3, 1: 2}, "rollout": {}}
    assert observer.workers == {7: "rollout-0", 8: "rollout-0"}
    assert observer.spans.totals_by_process.keys() == {"controller"}


async def test_groups_leases_and_replicas_of_a_run(tmp_path: Path) -> None:
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
    snapshots: list[StatusSnapshot] = []

    async def look(run: Run) -> None:
        run.buffer.ledger = ledger
        run.observer.workers = {fifth.id: "rollout-1"}
        run.observer.versions = {"policy": {0: 12}}
        run.latest_metrics = {"reward/mean": 0.5, "loss/total": float("nan")}
        snapshots.append(snapshot(run, fleet(policy=Service()), {}))

    await stage.train(look)
    (seen,) = snapshots
    assert seen.groups == {"waiting": 0, "leased": 3, "finished": 1, "trained": 1, "dropped": 1}
    assert {row.group: (row.worker, row.attempt) for row in seen.leases} == {
        4: ("rollout-1", 1),
        5: ("-", 1),
        2: ("-", 2),
    }
    assert seen.metrics == {"reward/mean": 0.5}
    (policy,) = seen.services
    serving, starting = Service().replicas
    assert policy.replicas == (serving.model_copy(update={"version": 12}), starting)


def test_numbers_of_any_library_can_be_logged() -> None:
    metrics = to_floats({"wins": np.float32(0.5), "length": torch.tensor([3]), "lost": 1}, "metrics")
    assert json.loads(json.dumps(metrics)) == {"wins": 0.5, "length": 3.0, "lost": 1.0}


@pytest.mark.parametrize("value", ["most", None, [1.0, 2.0], torch.zeros(2)])
def test_non_numeric_metric_is_refused_by_name(value: object) -> None:
    with pytest.raises(RolloutError, match=r"the task's probe\(\), got wins="):
        to_floats({"wins": value}, "probe")
