"""Weights that stay on a GPU: refusals, and on a real GPU that two processes read the same bits in order."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from store_stage import Directory, assert_same, snapshot_of, state_of

from rl_bridge.errors import WeightsError
from rl_bridge.generator.vllm_worker import WeightReceiver, WeightSender
from rl_bridge.weights import Box, ShardSpec, WeightStore
from rl_bridge.weights.assembly import SnapshotState
from rl_bridge.weights.device import HANDLE_BYTES, Buffers, DeviceAddress
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.segments import SegmentAddress
from rl_bridge.weights.snapshot import LazySum, Publication, Snapshot

WAIT_S = 120.0
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no GPU here, and CUDA IPC is between processes on one"
)


@pytest.fixture
async def cuda_store(directory: Directory) -> AsyncIterator[WeightStore]:
    store = WeightStore(directory, transport="cuda_ipc", timeout_s=0.3)
    yield store
    await store.close()


async def test_weights_in_the_host_s_memory_are_refused(cuda_store: WeightStore) -> None:
    with pytest.raises(
        WeightsError, match=r"expected weights on a GPU .*'cuda_ipc', got them on cpu; .*shared_memory"
    ):
        await cuda_store.put(1, state_of(1.0))
    with pytest.raises(WeightsError):
        await cuda_store.get(1)


async def test_a_rank_without_a_gpu_is_refused_though_it_has_nothing_to_publish(
    cuda_store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(WeightsError, match="expected a GPU in each process"):
        await cuda_store.put(1, state_of(1.0), rank=1, ranks=2)


async def announce(directory: Directory, store: WeightStore, **origin: Any) -> None:
    """Have version 1 in the directory as one who publishes on a GPU puts it there; its segment is `store`'s."""
    await store.put("header", state_of(1.0))
    (there,) = (await snapshot_of(directory, "header")).contributions
    assert isinstance(there.location, SegmentAddress)
    address = DeviceAddress(segment=there.location, handle=bytes(HANDLE_BYTES), nbytes=4096, gpu="other")
    publication = Publication(group=directory.group(), number=1)
    contribution = replace(there, location=address, origin=replace(there.origin, **origin))
    await directory.announce(1, publication, contribution.origin, 1, None)
    await directory.complete(1, publication, contribution)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([], "expected a GPU in each process that publishes or reads weights .* was given none"),
        (["mine"], "cannot read weights on GPU other: process .* was given mine; .*colocate"),
    ],
)
async def test_a_reader_that_cannot_see_the_publisher_s_gpu_is_told_so_and_holds_nothing(
    cuda_store: WeightStore,
    store: WeightStore,
    directory: Directory,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device.index])
    )
    await announce(directory, store)
    with pytest.raises(WeightsError, match=message):
        await cuda_store.get(1)
    for version in (2, 3, 4):  # it is in nobody's way
        await store.put(version, state_of(float(version)))


async def test_a_reader_on_another_machine_is_told_so(
    cuda_store: WeightStore, store: WeightStore, directory: Directory
) -> None:
    await announce(directory, store, machine="another", pid=2**22 + 1)
    with pytest.raises(WeightsError, match="on another machine, which the transport 'rdma' can reach"):
        await cuda_store.get(1)


def on_gpu(value: float, *, size: int = 8) -> dict[str, torch.Tensor | LazySum]:
    """State of several types, with a scalar, an empty tensor, one that is not contiguous, and a sum."""
    state: dict[str, torch.Tensor | LazySum] = {
        "bfloat16": torch.full((size, 3), value, dtype=torch.bfloat16, device="cuda"),
        "transposed": torch.arange(6.0, device="cuda").reshape(2, 3).T + value,
        "int64": torch.tensor([-(2**62), int(value)], device="cuda"),
        "bool": torch.tensor([True, False, True], device="cuda"),
        "scalar": torch.tensor(value, device="cuda"),
        "zero rows": torch.zeros(0, 7, device="cuda"),
        "on the host": torch.full((3,), -value),
    }
    base = torch.ones(4, 2, device="cuda")
    return state | {"sum": LazySum(base=base, added=lambda box: torch.full(box.shape, value, device="cuda"))}


def expected_of(value: float, *, size: int = 8) -> dict[str, torch.Tensor]:
    return {
        name: (torch.full((4, 2), 1.0 + value) if isinstance(tensor, LazySum) else tensor.cpu())
        for name, tensor in on_gpu(value, size=size).items()
    }


def assert_same_on_gpu(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(tensor.is_cuda for tensor in state.values() if tensor.numel())
    assert_same({name: tensor.cpu() for name, tensor in state.items()}, expected)


@needs_gpu
async def test_publisher_s_own_process_reads_its_buffer_in_place(
    cuda_store: WeightStore, directory: Directory
) -> None:
    await cuda_store.put(1, on_gpu(1.0))
    assert_same(await cuda_store.get(1), expected_of(1.0))
    async with cuda_store.open(1) as state:
        assert all(tensor.is_cuda for tensor in state.values() if tensor.numel())
    box = Box(start=(1, 1), shape=(3, 2))
    like: dict[str, torch.Tensor | ShardSpec] = {
        "bfloat16": ShardSpec(box=box, dtype=torch.float32),
        "int64": torch.empty(2, dtype=torch.float64, device="cuda"),
    }
    found = await cuda_store.get(1, like)
    assert found["int64"].device.type == "cuda"
    assert found["int64"].tolist() == [-(2.0**62), 1.0]
    assert torch.equal(found["bfloat16"], torch.ones(3, 2))


@needs_gpu
async def test_another_process_reads_bit_for_bit_and_is_never_overwritten(
    cuda_store: WeightStore, directory: Directory
) -> None:
    cuda_store._timeout_s = WAIT_S
    async with OtherProcess(directory) as reader:
        await cuda_store.put(1, on_gpu(1.0))
        await reader.hold(1)
        for version in range(2, 9):
            await cuda_store.put(version, on_gpu(float(version)))
            await reader.check(version)
        await reader.call("check_held", (1.0,))
        # As many held as the ring has segments: the next one waits until one is let go of.
        for version in (9, 10):
            await reader.hold(version - 1)
            await cuda_store.put(version, on_gpu(float(version)))
        await reader.hold(10)
        waiting = asyncio.ensure_future(cuda_store.put(11, on_gpu(11.0)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await reader.call("check_held", (1.0, 8.0, 9.0, 10.0))
        await reader.call("release")
        await waiting
        await reader.check(11)
        for version, size in ((12, 1 << 20), (13, 1 << 20), (14, 8)):  # buffers grow, and stay as large
            await cuda_store.put(version, on_gpu(float(version), size=size))
            await reader.check(version, size=size)


@needs_gpu
async def test_an_engine_in_a_process_of_its_own_is_handed_addresses_and_takes_copies(
    cuda_store: WeightStore, directory: Directory
) -> None:
    await cuda_store.put(1, on_gpu(1.0))
    async with OtherProcess(directory) as engine, cuda_store.open(1) as state:
        handed = WeightSender().write(state)
        assert len(handed) < 1 << 16
        await engine.call("take_over", handed, 1.0)


@needs_gpu
async def test_a_publisher_that_closes_takes_nothing_from_who_reads(
    cuda_store: WeightStore, directory: Directory
) -> None:
    async with OtherProcess(directory) as reader:
        await cuda_store.put(1, on_gpu(1.0, size=1 << 20))
        await reader.hold(1)
        await reader.call("check_held", (1.0,), 1 << 20)  # which maps it
        await cuda_store.close()
        # To where that was, if anything.
        filler = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        await reader.call("check_held", (1.0,), 1 << 20)
        del filler


class OtherProcess:
    """A reader in a process of its own. What it finds wrong is an error here."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def __aenter__(self) -> "OtherProcess":
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call("release")
        (process,) = self._pool._processes.values()
        await asyncio.to_thread(self._pool.shutdown)
        assert process.exitcode == 0

    async def hold(self, version: int) -> None:
        await self.call("hold", await snapshot_of(self._directory, version))

    async def check(self, version: int, *, size: int = 8) -> None:
        await self.call("check", await snapshot_of(self._directory, version), float(version), size)

    async def call(self, method: str, *arguments: Any) -> None:
        """Call a method of its `Reading`."""
        answer = asyncio.get_running_loop().run_in_executor(self._pool, _read, method, arguments)
        await asyncio.wait_for(answer, WAIT_S)


def _read(method: str, arguments: tuple[Any, ...]) -> None:
    reading = _own_reading()
    reading.loop.run_until_complete(getattr(reading, method)(*arguments))


@cache
def _own_reading() -> "Reading":
    return Reading()


class Reading:
    """What the other process does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._directory = WeightDirectory()
        self._store = WeightStore(self._directory, transport="cuda_ipc", timeout_s=WAIT_S)
        self._held = AsyncExitStack()
        self._states: list[SnapshotState] = []

    async def _learn(self, snapshot: Snapshot) -> None:
        (one,) = snapshot.contributions
        await self._directory.announce(snapshot.key, snapshot.publication, one.origin, 1, None)
        await self._directory.complete(snapshot.key, snapshot.publication, one)

    async def hold(self, snapshot: Snapshot) -> None:
        await self._learn(snapshot)
        self._states.append(await self._held.enter_async_context(self._store.open(snapshot.key)))

    async def check(self, snapshot: Snapshot, value: float, size: int) -> None:
        await self._learn(snapshot)
        expected = expected_of(value, size=size)
        assert_same(await self._store.get(snapshot.key), expected)
        like = {name: tensor.cuda() for name, tensor in expected.items()}
        copies = await self._store.get(snapshot.key, like)
        assert all(tensor.is_cuda for tensor in copies.values())
        assert_same_on_gpu(copies, expected)

    async def check_held(self, values: Sequence[float], size: int = 8) -> None:
        assert len(values) == len(self._states)
        for value, state in zip(values, self._states, strict=True):
            assert_same_on_gpu(dict(state), expected_of(value, size=size))

    async def take_over(self, handed: bytes, value: float) -> None:
        state = WeightReceiver().read(handed)
        assert isinstance(state, SnapshotState)
        assert isinstance(state.held, Buffers)
        copies = dict(state.copy_to("cuda"))
        state.held.close()
        assert all(tensor.is_cuda for tensor in copies.values())
        assert_same_on_gpu(copies, expected_of(value))

    async def release(self) -> None:
        self._states.clear()
        await self._held.aclose()
