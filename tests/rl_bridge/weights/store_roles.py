"""Actors for the tests of the store. Their roles' processes import them by this name."""

import os
import signal
from collections.abc import Mapping

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint, current_rank
from store_stage import state_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from rl_bridge.services.actor import ServiceActor
from rl_bridge.weights import WeightStore, store

COLUMNS, ROWS = [Shard(0)], [Shard(1)]


def make_model(version: int) -> torch.nn.Module:
    """A model whose every weight is another number; its extents are not multiples of the ranks."""
    model = torch.nn.Sequential()
    model.add_module("embedding", torch.nn.Embedding(7, 5))
    model.add_module("up", torch.nn.Linear(5, 9))
    model.add_module("down", torch.nn.Linear(9, 5, bias=False))
    model.add_module("norm", torch.nn.LayerNorm(5))
    count = 0
    for parameter in model.parameters():
        values = torch.arange(count, count + parameter.numel(), dtype=torch.float32)
        parameter.data = (values + 1000 * version).view_as(parameter)
        count += parameter.numel()
    return model


class Publisher(ServiceActor):
    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @concurrent_endpoint
    async def put(self, key: int | str, value: float, size: int = 8) -> None:
        await self._store.put(key, state_of(value, size=size))

    @concurrent_endpoint
    async def die_while_putting(self, key: int) -> None:
        def half(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        store._pack = half
        await self._store.put(key, state_of(float(key)))

    @concurrent_endpoint
    async def close(self) -> None:
        await self._store.close()


class Reader(ServiceActor):
    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @concurrent_endpoint
    async def get(self, key: int | str) -> dict[str, torch.Tensor]:
        return await self._store.get(key)


class Ranked(Actor):
    """One of several ranks, of a trainer by FSDP2 or a generator by TP."""

    def __init__(self, store: WeightStore, ranks: int, rendezvous: str) -> None:
        self._store = store
        self._rank, self._ranks = current_rank().rank, ranks
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=self._rank, world_size=ranks)
        self._mesh = init_device_mesh("cpu", (ranks,))

    @concurrent_endpoint
    async def put(self, version: int) -> int:
        """Publish the model as FSDP2 has it; returns how much the ranks told each other for that."""
        model = make_model(version)
        fully_shard(model, mesh=self._mesh)
        state = model.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        with CommDebugMode() as communication:
            await self._store.put(version, state, rank=self._rank, ranks=self._ranks)
        return communication.get_total_counts()

    @concurrent_endpoint
    async def check(self, version: int) -> int:
        """Read the model as TP has it; returns how much the ranks told each other for that."""
        like: dict[str, torch.Tensor] = {**tensor_parallel(self._mesh, version=0)}
        expected = tensor_parallel(self._mesh, version=version)
        with CommDebugMode() as communication:
            copy = await self._store.get(version, like)
            async with self._store.open(version, like) as state:
                require_same(state, expected)
        require_same(copy, expected)
        require_same(await self._store.get(version), make_model(version).state_dict())
        return communication.get_total_counts()


def tensor_parallel(mesh: DeviceMesh, *, version: int) -> dict[str, DTensor]:
    """The model cut by hand, as column- and row-wise parallel layers have it."""
    placements = {"embedding.weight": ROWS, "up.weight": COLUMNS, "up.bias": COLUMNS, "down.weight": ROWS}
    rank, ranks = mesh.get_local_rank(), mesh.size()
    result = {}
    for name, whole in make_model(version).state_dict().items():
        placed = placements.get(name, [Replicate()])
        chunks = torch.chunk(whole, ranks, placed[0].dim) if isinstance(placed[0], Shard) else [whole] * ranks
        result[name] = DTensor.from_local(
            chunks[rank], mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return result


def require_same(read: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        got = read[name]
        if isinstance(tensor, DTensor):
            assert isinstance(got, DTensor)
            assert got.placements == tensor.placements
            assert got.shape == tensor.shape
            got, tensor = got.to_local(), tensor.to_local()
        assert torch.equal(got, tensor), name
