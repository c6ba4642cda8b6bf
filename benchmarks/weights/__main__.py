"""The cost of moving a policy's weights from a trainer of one and of two ranks (FSDP2) to a generator.

Compared with one thread's memcpy of as many bytes into touched memory, measured after each transfer. Needs Monarch:
  python -m benchmarks.weights                                   100 million parameters, about two minutes
  python -m benchmarks.weights --quick                           does it run?
  python -m benchmarks.weights --ranks 2 --rounds 50             the sharded trainer only
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_most,
    choices,
    main,
    progress,
    setting,
)
from rl_bridge.errors import BridgeError

TRANSPORTS: Final = ("shared_memory", "rdma")
FIRST: Final = "the first transfer"
STEADY: Final = "from then on"
MEMORY: Final = "a rank's memory / the model"
BOUNDS: Final = {"shared_memory, 1 rank": 3.0, "shared_memory, 2 ranks": 5.0}
# Each of two ranks publishes half. Gathering the model would take at least the model's size.
MEMORY_BOUND: Final = 0.6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(20, quick=2, option="transfers beyond the first (20)")
    parameters: int = setting(100_000_000, quick=22_000_000, option="model parameters (100 million)")
    ranks: tuple[str, ...] = setting(
        ("1", "2"), option="ranks of the trainer (1,2)", read=choices(("1", "2"))
    )
    transport: tuple[str, ...] = setting(
        TRANSPORTS, option=f"of {', '.join(TRANSPORTS)}", read=choices(TRANSPORTS)
    )


def measure(plan: Plan, measurements: Measurements) -> None:
    """Transfer a model `rounds` times beyond the first, by each transport.

    Raises:
        BenchmarkError: The received weights are not of one version.
    """
    for transport in plan.transport:
        for ranks in map(int, plan.ranks):
            asyncio.run(_transfers(plan, transport, ranks, measurements))


async def _transfers(plan: Plan, transport: str, ranks: int, measurements: Measurements) -> None:
    from monarch.actor import this_host

    from benchmarks.weights.roles import GeneratorRole, TrainerRole
    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport=transport)  # type: ignore[arg-type]
    subject = f"{transport}, {ranks} rank{'s' if ranks > 1 else ''}"
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
    opened_s, copied_s = taken["opened"] - began, taken["copied"] - began
    getting = time.monotonic()
    got = await generator.get.call_one(version)
    return {
        "put ms": 1000 * max(put["seconds"] for put in puts),
        "to tensors ms": 1000 * opened_s,
        "to the engine's own memory ms": 1000 * copied_s,
        "memcpy ms": 1000 * memcpy_s,
        "to tensors / memcpy": opened_s / memcpy_s,
        "to the engine's own memory / memcpy": copied_s / memcpy_s,
        MEMORY: max(put["bytes"] for put in puts) / nbytes,
        "get, into fresh memory ms": 1000 * (got - getting),
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
        "From the trainer's tensors to tensors in the generator's process": (
            *("put ms", "to tensors ms", "to the engine's own memory ms", "memcpy ms"),
        ),
        "The same over one thread's memcpy of as many bytes into touched memory": (
            *("to tensors / memcpy", "to the engine's own memory / memcpy"),
        ),
        "Peak memory of a trainer's rank while it publishes, beyond its weights": (MEMORY,),
        "A copy of the caller's own": ("get, into fresh memory ms",),
    },
    bars=bars,
    errors=(BenchmarkError, BridgeError),
)

if __name__ == "__main__":
    main("weights")
