"""Transfers weights from a trainer of one or two ranks to a generator, and compares with a memcpy of as many bytes."""

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.weights.roles import MEBIBYTE, GeneratorRole, Put, TrainerRole
from benchmarks.wire.measurements import Measurements
from rl_bridge.weights import WeightStore

FIRST = "the first transfer"
STEADY = "from then on"
MEMORY = "a rank's memory / the model"


class BenchError(Exception):
    """Transferred weights differ from those sent."""


async def transfers(
    transport: str,
    ranks: int,
    parameters: int,
    rounds: int,
    measurements: Measurements,
    progress: Callable[[str], None],
) -> None:
    """Transfer a model `rounds` times beyond the first, and add the measurements.

    Raises:
        BenchError: The received weights are not of one version.
    """
    from monarch.actor import this_host

    store = WeightStore.create(transport=transport)  # type: ignore[arg-type]
    subject = f"{transport}, {ranks} rank{'s' if ranks > 1 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        trainers = this_host().spawn_procs(per_host={"ranks": ranks})
        generators = this_host().spawn_procs(per_host={"replicas": 1})
        rendezvous = str(Path(folder) / secrets.token_hex(4))
        trainer = trainers.spawn("trainer", TrainerRole, store, parameters, ranks, rendezvous)
        generator = generators.spawn("generator", GeneratorRole, store, parameters)
        try:
            await generator.ready.call_one()
            for version in range(rounds + 3):
                progress(f"{subject}: transfer {version} of {rounds + 2}")
                # The second transfer writes the ring's second segment for the first time.
                load = FIRST if version == 0 else "" if version < 3 else STEADY
                await _transfer(trainer, generator, version, _adder(measurements, subject, load))
        finally:
            await store.close()
            await generators.stop()
            await trainers.stop()


async def _transfer(trainer: Any, generator: Any, version: int, add: Callable[[str, float], None]) -> None:
    (nbytes, *_) = [size for _, size in (await trainer.fill.call(float(version + 1))).items()]
    puts: list[Put] = [put for _, put in (await trainer.put.call(version)).items()]
    transfer = await generator.take.call_one(version)
    if transfer.values != 1:
        raise BenchError(f"expected the weights of version {version} alone, got {transfer.values} values")
    began = min(put.began for put in puts)
    megabytes = nbytes / MEBIBYTE
    add("put ms", 1000 * max(put.seconds for put in puts))
    add("to tensors ms", 1000 * (transfer.opened - began))
    add("to the engine's own memory ms", 1000 * (transfer.copied - began))
    add("memcpy ms", 1000 * transfer.memcpy_s)
    add("to tensors / memcpy", (transfer.opened - began) / transfer.memcpy_s)
    add("to the engine's own memory / memcpy", (transfer.copied - began) / transfer.memcpy_s)
    add(MEMORY, max(put.memory_mb for put in puts) / megabytes)
    began = time.monotonic()
    add("get, into fresh memory ms", 1000 * (await generator.get.call_one(version) - began))


def _adder(measurements: Measurements, subject: str, load: str) -> Callable[[str, float], None]:
    def add(metric: str, value: float) -> None:
        if load:
            measurements.add(metric, subject, load, value)

    return add
