"""Tasks that are made from numbers: each split has numbers of its own."""

from collections.abc import Mapping
from typing import Any

import pytest

from openenv_core.tasks import LISTED, RANGE, GeneratedTasks


class Sums(GeneratedTasks):
    SPLITS = {"train": 1000, "test": 30, "hard": 2}  # noqa: RUF012 - read only

    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        return {"sum": f"{self.task_number(split, index)} + 1"}


def test_splits_and_their_tasks() -> None:
    sums = Sums()
    assert sums.list_splits() == [
        {"name": "train", "type": "train"},
        {"name": "test", "type": "test"},
        {"name": "hard", "type": "validation"},
    ]
    assert [sums.num_tasks(split) for split in Sums.SPLITS] == [1000, 30, 2]
    assert sums.get_task("test", 29) == {"split": "test", "index": 29, "sum": "1029 + 1"}
    numbers = {Sums.task_number(split, index) for split, size in Sums.SPLITS.items() for index in range(size)}
    assert numbers == set(range(1032))
    assert len(sums.list_tasks("train")) == LISTED
    assert len(sums.list_tasks("hard")) == 2
    assert [task["index"] for task in sums.get_task_range("hard")] == [0, 1]
    assert [task["index"] for task in sums.get_task_range("test", -2)] == [28, 29]
    assert sums.get_task_range("test", 5, 5) == []


@pytest.mark.parametrize("index", [-1, 30, 1.0, True, "1", None])
def test_an_index_that_is_none(index: Any) -> None:
    with pytest.raises(IndexError, match="from 0 to 29"):
        Sums().get_task("test", index)


@pytest.mark.parametrize("split", ["", "Test", None, 3, ["test"]])
def test_a_split_that_is_none(split: Any) -> None:
    for ask in (
        Sums().num_tasks,
        Sums().list_tasks,
        Sums().get_task_range,
        lambda one: Sums().get_task(one, 0),
    ):
        with pytest.raises(KeyError, match="train, test, hard"):
            ask(split)


def test_a_range_has_a_bound() -> None:
    with pytest.raises(ValueError, match=f"at most {RANGE}"):
        Sums().get_task_range("train")
    assert len(Sums().get_task_range("train", 0, RANGE)) == RANGE
