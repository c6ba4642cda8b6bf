"""A run in real processes is asked how it stands while one of them is killed."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge.config import Config
from rl_bridge.metrics.status import ReplicaRow, StatusSnapshot

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
CONFIG = {"env": {"app": "a:b"}, "rollout": {"task": "c:D"}}


async def test_mesh_leases_and_a_restart_are_seen_from_outside(tmp_path: Path) -> None:
    from rl_bridge.loops.observation import RunObserver
    from rl_bridge.loops.status import snapshot
    from rl_bridge.metrics.status import StatusServer, ask_status, served_address
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.synthetic.actor import SyntheticRolloutActor, SyntheticTrainerActor
    from rl_bridge.synthetic.job import make_buffer, run_job
    from rl_bridge.synthetic.settings import SyntheticSettings

    # Episodes of one length, so long that there always are leases, and more than enough steps.
    settings = SyntheticSettings(iterations=1000, episode_s=0.4, sigma=0.0, train_s=0.05)
    async with Fleet(tmp_path / "logs") as fleet:
        rollout = await SyntheticRolloutActor.options(name="rollout", num_replicas=2).as_service(settings)
        trainer = await SyntheticTrainerActor.options(name="trainer").as_service(settings)
        buffer, observer = make_buffer(settings), RunObserver(fleet)
        servers: Any = SimpleNamespace(status=[], urls=("http://elsewhere:8000",))

        def take() -> StatusSnapshot:
            run: Any = SimpleNamespace(
                folder=tmp_path,
                config=Config.model_validate(CONFIG),
                version=buffer.admission.served,
                buffer=buffer,
                observer=observer,
                newest={},
            )
            return snapshot(run, fleet, servers)

        async with StatusServer("127.0.0.1", 0, take, refresh=observer.refresh, folder=tmp_path):
            job = asyncio.ensure_future(run_job(settings, rollout, trainer, buffer))

            async def seen(wanted: Callable[[StatusSnapshot], bool]) -> StatusSnapshot:
                address = served_address(tmp_path)
                assert address is not None
                async with asyncio.timeout(PATIENCE_S):
                    while not wanted(found := await ask_status(address)):
                        assert not job.done(), job.exception()
                return found

            first = await seen(lambda found: found.version >= 2 and bool(found.leases))
            assert {service.name: len(service.replicas) for service in first.services} == {
                "rollout": 2,
                "trainer": 1,
                "environment": 1,
            }
            assert first.pid == os.getpid()
            assert len(first.hosts) == 1
            assert first.spans.keys() == {"controller", "rollout-0", "rollout-1", "trainer-0"}
            assert first.groups["trained"] >= 2 * settings.groups_per_batch
            held = await seen(
                lambda found: {lease.worker for lease in found.leases} >= {"rollout-0", "rollout-1"}
            )
            assert all(0 <= lease.age_s < PATIENCE_S for lease in held.leases)

            victim = worker(first, 1)
            os.kill(victim.pids[0], signal.SIGKILL)
            again = await seen(
                lambda found: worker(found, 1).restarts == 1 and worker(found, 1).state == "serving"
            )
            assert worker(again, 1).pids != victim.pids
            assert worker(again, 0).restarts == 0
            assert [event.what.partition(":")[0] for event in again.events if event.replica == 1] == [
                "starting",
                "serving",
                "lost",
                "restarting",
                "starting",
                "serving",
            ]
            trained = again.groups["trained"]
            await seen(lambda found: found.groups["trained"] > trained)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)


def worker(snapshot: StatusSnapshot, replica: int) -> ReplicaRow:
    (service,) = (service for service in snapshot.services if service.name == "rollout")
    return service.replicas[replica]
