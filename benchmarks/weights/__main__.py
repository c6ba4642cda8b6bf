"""The cost of moving a policy's weights from a trainer of one and of two ranks (FSDP2) to a generator.

Compared with one thread's memcpy of as many bytes into touched memory, measured after each transfer. Needs Monarch:
  python -m benchmarks.weights                                   100 million parameters, about two minutes
  python -m benchmarks.weights --quick                           does it run?
"""

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bar, Benchmark, BenchmarkError, Measurements, at_most, main, progress, setting
from rl_bridge.errors import BridgeError

FIRST: Final = "the first transfer"
STEADY: Final = "from then on"
MEMORY: Final = "a rank's memory / the model"
BOUNDS: Final = {"1 rank": 3.0, "2 ranks": 5.0}
# Each of two ranks publishes half. Gathering the model would take at least the model's size.
MEMORY_BOUND: Final = 0.6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(20, quick=2, option="transfers beyond the first (20)")
    parameters: int = setting(100_000_000, quick=22_000_000)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Transfer a model `rounds` times beyond the first, from a trainer of one rank and from one of two.

    Raises:
        BenchmarkError: The received weights are not of one version.
    """
    for ranks in (1, 2):
        asyncio.run(_transfers(plan, ranks, measurements))


async def _transfers(plan: Plan, ranks: int, measurements: Measurements) -> None:
    from monarch.actor import this_host

    from benchmarks.weights.roles import GeneratorRole, TrainerRole
    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport="shared_memory")
    subject = f"{ranks} rank{'s' if ranks > 1 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        trainers = this_host().spawn_procs(per_host={"ranks": ranks})
        generators = this_host().spawn_procs(per_host={"replicas": 1})
        rendezvous = str(Path(folder) / secrets.token_hex(4))
        trainer = trainers.spawn("trainer", TrainerRole, store, plan.parameters, ranks, rendezvous)
        generator = generators.spawn("generator", GeneratorRole, store, plan.parameters)
        try:
            await generator.ready.call_one()
            for version in range(plan.rounds + 3):
                progress(f"{subject}: transfer {version} of {plan.rounds + 2}")
                values = await _transfer(trainer, generator, version)
                if version not in (
                    1,
                    2,
                ):  # the second transfer writes the ring's second segment for the first time
                    measurements.add_all(subject, STEADY if version else FIRST, values)
        finally:
            await store.close()
            await generators.stop()
            await trainers.stop()


async def _transfer(trainer: Any, generator: Any, version: int) -> dict[str, float]:
    (nbytes, *_) = [size for _, size in (await trainer.fill.call(float(version + 1))).items()]
    puts: list[dict[str, float]] = [put for _, put in (await trainer.put.call(version)).items()]
    taken = await generator.take.call_one(version)
    if taken["values"] != 1:
        raise BenchmarkError(f"expected the weights of version {version} alone, got {taken['values']} values")
    began, memcpy_s = min(put["began"] for put in puts), taken["memcpy_s"]
    opened_s = taken["opened"] - began
    return {
        "put ms": 1000 * max(put["seconds"] for put in puts),
        "to tensors ms": 1000 * opened_s,
        "memcpy ms": 1000 * memcpy_s,
        "to tensors / memcpy": opened_s / memcpy_s,
        MEMORY: max(put["bytes"] for put in puts) / nbytes,
    }


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for subject, bound in BOUNDS.items():
        label = f"to tensors / memcpy, {subject}, {STEADY}"
        yield from at_most(label, measurements.median("to tensors / memcpy", subject, STEADY), bound)
    for subject, load in measurements.measured(MEMORY):
        if "2 ranks" in subject:
            label = f"{MEMORY}, {subject}, {load}: most of all rounds"
            yield from at_most(label, measurements.most(MEMORY, subject, load), MEMORY_BOUND)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(measure,),
    tables={
        "From the trainer's tensors to tensors in the generator's process, and one thread's memcpy of as many bytes": (
            *("put ms", "to tensors ms", "memcpy ms", "to tensors / memcpy"),
        ),
        "Peak memory of a trainer's rank while it publishes, beyond its weights": (MEMORY,),
    },
    bars=bars,
    errors=(BenchmarkError, BridgeError),
)

if __name__ == "__main__":
    main("weights")
