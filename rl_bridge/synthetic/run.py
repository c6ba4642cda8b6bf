"""A synthetic job in processes of its own."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rl_bridge.generator.vllm_api import ONE_THREAD
from rl_bridge.loops.observation import SpanCollector
from rl_bridge.metrics.spans import SpanWindow, by_role
from rl_bridge.metrics.throughput import Throughput
from rl_bridge.services.fleet import Fleet
from rl_bridge.synthetic.actor import SyntheticRolloutActor, SyntheticTrainerActor
from rl_bridge.synthetic.job import StepTimes, make_buffer, run_job
from rl_bridge.synthetic.settings import SyntheticSettings


@dataclass(kw_only=True, slots=True, frozen=True)
class SyntheticRun:
    """What a synthetic job did.

    Attributes:
        steps: One after the other.
        throughput: Of all of them, and how the processes spent the time.
    """

    steps: list[StepTimes]
    throughput: Throughput


async def run_synthetic(settings: SyntheticSettings) -> SyntheticRun:
    """Start the processes, run the job, end the processes.

    Raises:
        rl_bridge.errors.BridgeError: A process could not be started, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-synthetic-") as logs:
        async with Fleet(Path(logs)) as fleet:
            rollout = await SyntheticRolloutActor.options(
                name="rollout", num_replicas=settings.workers, environment=ONE_THREAD
            ).as_service(settings)
            trainer = await SyntheticTrainerActor.options(name="trainer", environment=ONE_THREAD).as_service(
                settings
            )
            collector, window = SpanCollector(fleet), SpanWindow()
            await collector.collect()
            window.advance(collector.known)
            began = time.perf_counter()
            steps = await fleet.guard(run_job(settings, rollout, trainer, make_buffer(settings)))
            seconds = time.perf_counter() - began
            await collector.collect()
            return SyntheticRun(
                steps=steps,
                throughput=Throughput(
                    seconds=seconds,
                    steps=len(steps),
                    groups=len(steps) * settings.groups_per_batch,
                    roles=by_role(window.advance(collector.known)),
                ),
            )
