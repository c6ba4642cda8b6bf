"""For tests of the store: a directory whose callers can be of any group, and states to publish."""

import torch

from rl_bridge.weights import WeightStore
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.snapshot import Key, Snapshot


class Directory(WeightDirectory):
    """A directory whose callers can be of any group."""

    caller = "first trainer"

    def group(self) -> str:
        return self.caller


def sibling(store: WeightStore, directory: Directory) -> WeightStore:
    """The store as another process of the run has it."""
    other = WeightStore.__new__(WeightStore)
    other.__setstate__({**store.__getstate__(), "_directory": directory})
    return other


def state_of(value: float, *, size: int = 8) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size, 2), value), "bias": torch.full((3,), -value)}


def assert_same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


async def snapshot_of(directory: Directory, key: Key) -> Snapshot:
    found = await directory.find(key, 0)
    assert isinstance(found, Snapshot)
    return found
