"""Weights for another process: what is read is what was written, in place, and nothing is left behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_bridge.generator.handover import Giver, Taker


def state(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "odd": torch.randn(3, 5, generator=drawn),
        "half": torch.randn(7, generator=drawn).to(torch.bfloat16),
        "turned": torch.randn(4, 6, generator=drawn).T,
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }


def same(read: dict[str, Tensor], written: dict[str, Tensor]) -> bool:
    return list(read) == list(written) and all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in written.items()
    )


def test_tensors_are_read_as_they_were_written() -> None:
    giver, taker = Giver(), Taker()
    assert same(taker.read(giver.write(state(1))), state(1))
    giver.close()


def test_memory_and_mapping_are_used_again_until_more_is_needed() -> None:
    giver, taker = Giver(), Taker()
    first = giver.write(state(1))
    before = taker.read(first)["odd"].data_ptr()
    second = giver.write(state(2))
    assert (second["inode"], taker.read(second)["odd"].data_ptr()) == (first["inode"], before)
    assert same(taker.read(second), state(2))
    larger = {**state(3), "more": torch.ones(100_000)}
    third = giver.write(larger)
    assert third["inode"] != first["inode"]
    assert same(taker.read(third), larger)
    giver.close()


@pytest.mark.soak
def test_another_process_reads_them() -> None:
    giver = Giver()
    handover = giver.write({"weight": torch.arange(6, dtype=torch.float32).view(2, 3)})
    read = (
        "from rl_bridge.generator.handover import Taker\n"
        f"print(Taker().read({handover!r})['weight'].tolist())"
    )
    told = subprocess.run(
        [sys.executable, "-c", read],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.strip() == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
    giver.close()
