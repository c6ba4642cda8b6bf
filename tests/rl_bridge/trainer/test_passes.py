"""Batches through a model in passes: parts add up, whatever their size and whoever makes them."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from trainer_ranks import batch, settings

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.trainer.passes import Passes


class Table:
    """Stands for a model of several data-parallel ranks, of which this is one: a number for each token's target."""

    device = torch.device("cpu")
    row_multiple = 1

    def __init__(self, rank: int, ranks: int) -> None:
        self.data_rank, self.data_ranks = rank, ranks
        self.numbers = torch.arange(40, dtype=torch.float32, requires_grad=True)
        self.rows: list[int] = []
        self.idle = 0

    @contextlib.contextmanager
    def spmd(self) -> Any:
        yield

    def outputs(self, tokens: Tensor) -> Tensor:
        self.idle += 1
        return self.numbers[tokens]

    def sum_over_data(self, values: Tensor) -> Tensor:
        return values

    def of(self, micro: TrainBatch) -> Tensor:
        self.rows.append(len(micro.packed().tokens))
        return self.numbers[torch.from_numpy(micro.target)]


def passes(table: Table, folder: Path, **options: Any) -> Passes:
    accumulation = options.pop("accumulation", 1)
    return Passes(
        table,  # type: ignore[arg-type]
        replace(settings(folder, folder=folder, **options), gradient_accumulation_steps=accumulation),
    )


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_ranks_add_up_to_the_whole(tmp_path: Path, ranks: int, rows: int) -> None:
    one = batch(0)
    weights = torch.linspace(0.0, 1.0, len(one))
    values, gradient, total = np.zeros(len(one), dtype=np.float32), torch.zeros(40), 0.0
    made = set()
    for rank in range(ranks):
        table = Table(rank, ranks)
        own = passes(table, tmp_path, micro_batch_size=rows)

        def loss(micro: TrainBatch, chosen: NDArray[np.int64], table: Table = table) -> Tensor:
            return (table.of(micro) * weights[torch.from_numpy(chosen)]).sum()

        values += own.evaluate(one, table.of)
        assert all(number <= rows for number in table.rows)
        made.add(len(table.rows) + table.idle)
        total += own.backward(one, loss)
        assert table.numbers.grad is not None
        gradient += table.numbers.grad
    assert len(made) == 1, "a rank would wait for the others"
    assert values.tolist() == one.target.tolist()
    expected = torch.zeros(40).index_add(0, torch.from_numpy(one.target), weights)
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(float((weights * torch.from_numpy(one.target)).sum()), rel=1e-5)


def test_accumulation_asks_for_more_passes(tmp_path: Path) -> None:
    made = []
    for accumulation in (1, 4):
        table = Table(0, 1)
        passes(table, tmp_path, micro_batch_size=4096, accumulation=accumulation).evaluate(batch(1), table.of)
        made.append(len(table.rows))
    assert made[0] == 1
    assert 4 <= made[1] <= 5


def test_evaluation_keeps_no_graph(tmp_path: Path) -> None:
    table = Table(0, 1)
    seen: list[bool] = []

    def value(micro: TrainBatch) -> Tensor:
        seen.append(table.of(micro).requires_grad)
        return table.of(micro)

    passes(table, tmp_path).evaluate(batch(2), value)
    assert seen
    assert not any(seen)
