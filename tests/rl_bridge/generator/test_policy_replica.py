"""A replica's weights: their sources, their order, and how long a snapshot is held."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_fixtures import engine_config
from safetensors.torch import save_file
from torch import Tensor

from rl_bridge.errors import GeneratorError, ModelError, WeightsError
from rl_bridge.generator.base import UpdateMetrics
from rl_bridge.generator.replica import PolicyReplica
from rl_bridge.services.own_process import RUN_VARIABLE, GpuLock


class FakeEngine:
    """Takes weights when it is told to."""

    def __init__(self) -> None:
        self.version = 0
        self.loads: list[tuple[int, dict[str, Tensor], Future[UpdateMetrics]]] = []

    def load(self, version: int, state: dict[str, Tensor]) -> "Future[UpdateMetrics]":
        future: Future[UpdateMetrics] = Future()
        self.loads.append((version, state, future))
        return future

    def finish(self, failure: Exception | None = None) -> None:
        version, _, future = self.loads[-1]
        if failure is not None:
            future.set_exception(failure)
            return
        self.version = version
        future.set_result(UpdateMetrics(version=version, transport_s=100.0, pause_s=0.5, load_s=0.25))


class FakeStore:
    """Has versions 1 to 9; knows which are held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    @asynccontextmanager
    async def open(self, version: int, device: str) -> AsyncIterator[dict[str, Tensor]]:
        if version > 9:
            raise WeightsError(f"there is no version {version}")
        await asyncio.sleep(0.02 if version == 1 else 0)  # the first is the slowest
        self.held.append(version)
        try:
            yield {"weight": torch.full((2,), float(version))}
        finally:
            self.held.remove(version)


class FakeCheckpoint:
    def tensors(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(2)}

    def require_same_shapes(self, state: dict[str, Tensor]) -> None:
        if state["weight"][0] == 7:
            raise WeightsError("a weight is missing")


@pytest.fixture
def own_turns(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Locks of a GPU that no other test has."""
    monkeypatch.setenv(RUN_VARIABLE, request.node.name)


class Stage:
    def __init__(self, gpu_lock: GpuLock | None = None) -> None:
        self.engine, self.store = FakeEngine(), FakeStore()
        store: Any = self.store
        self.replica: Any = PolicyReplica(engine_config(), "nowhere", store, gpu_lock=gpu_lock)
        self.replica.engine = self.engine
        self.replica._checkpoint = FakeCheckpoint()

    def update(self, version: int) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.replica.update_weights(version))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def load(self, version: int, failure: Exception | None = None) -> UpdateMetrics:
        """Update to a version, which the engine loads or fails to; its snapshot is held meanwhile."""
        before, task = len(self.engine.loads), self.update(version)
        await self.until(lambda: len(self.engine.loads) > before)
        assert self.store.held == ([version] if version else [])
        assert self.engine.loads[-1][1]["weight"].tolist() == [float(version)] * 2
        self.engine.finish(failure)
        try:
            metrics: UpdateMetrics = await task
            return metrics
        finally:
            assert self.store.held == []


async def test_snapshot_is_held_until_it_is_loaded_and_version_0_is_the_checkpoint() -> None:
    stage = Stage()
    assert (await stage.update(0)).load_s == 0
    assert stage.engine.loads == []  # it is what the engine began with
    with pytest.raises(GeneratorError, match="half-way"):
        await stage.load(4, GeneratorError("half-way"))
    metrics = await stage.load(2)
    assert (metrics.version, metrics.pause_s, metrics.load_s) == (2, 0.5, 0.25)
    assert 100.0 <= metrics.transport_s < 200.0  # what the engine copied before its pause is a part of it
    assert stage.engine.version == 2
    assert (await stage.load(0)).version == stage.engine.version == 0


@pytest.mark.parametrize("version", [10, 7])
async def test_unavailable_weights_change_nothing(version: int) -> None:
    stage = Stage()
    with pytest.raises(WeightsError):
        await stage.update(version)
    assert stage.engine.loads == []
    assert stage.store.held == []
    assert (await stage.load(3)).version == 3


@pytest.mark.usefixtures("own_turns")
async def test_sleeping_replica_without_weights_releases_its_turn() -> None:
    stage, trainer = Stage(GpuLock()), GpuLock()
    with pytest.raises(WeightsError):
        await stage.update(10)
    await trainer.acquire(0.0)
    trainer.release()
    await stage.load(3)
    with pytest.raises(WeightsError):
        await stage.update(10)
    assert stage.replica._gpu_lock.held  # it answers on, with the weights that it has
    stage.replica._gpu_lock.release()


@pytest.mark.usefixtures("own_turns")
async def test_setup_imports_before_it_waits_for_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def finished(what: str) -> Any:
        def do() -> "Future[None]":
            done.append(what)
            future: Future[None] = Future()
            future.set_result(None)
            return future

        return do

    monkeypatch.setattr("rl_bridge.generator.replica.import_engine", lambda: done.append("import"))
    stage, trainer = Stage(GpuLock()), GpuLock()
    monkeypatch.setattr(stage.engine, "start", finished("start"), raising=False)
    monkeypatch.setattr(stage.engine, "sleep", finished("sleep"), raising=False)
    await trainer.acquire(0.0)
    setting_up = asyncio.ensure_future(stage.replica.setup())
    await stage.until(lambda: done)
    await asyncio.sleep(0.1)
    assert done == ["import"]
    trainer.release()
    await setting_up
    assert done == ["import", "start", "sleep"]
    await trainer.acquire(0.0)  # it is left to others
    trainer.release()


async def test_another_checkpoint_of_the_same_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    stage = Stage()
    for name, value in (("fits", 3.0), ("differs", 7.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
    load = asyncio.ensure_future(stage.replica.load_checkpoint(str(tmp_path / "fits"), 1))
    await stage.until(lambda: stage.engine.loads)
    stage.engine.finish()
    assert (await load).version == 1
    assert stage.engine.loads[0][1]["weight"].tolist() == [3.0, 3.0]
    with pytest.raises(WeightsError, match="a weight is missing"):
        await stage.replica.load_checkpoint(str(tmp_path / "differs"), 2)
    with pytest.raises(ModelError, match="found none"):
        await stage.replica.load_checkpoint(str(tmp_path), 2)
    assert len(stage.engine.loads) == 1
