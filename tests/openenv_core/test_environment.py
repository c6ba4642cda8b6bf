"""What authors inherit: transforms, rubrics, generated tasks."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from openenv_core import Action, ConfigurationError, Environment, Observation, State
from openenv_core.environment import CompositeTransform, NullTransform, Transform
from openenv_core.tasks import GeneratedTasks


class Bare(Environment[Action, Observation, State]):
    def reset(self) -> Observation:
        self._reset_rubric()
        return self._apply_transform(Observation())

    def step(self, action: Action) -> Observation:
        observation = Observation(metadata={"of": action.metadata})
        observation.reward = self._apply_rubric(action, observation)
        return self._apply_transform(observation)

    @property
    def state(self) -> State:
        return State()


class Mark(Transform[Observation]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, observation: Observation) -> Observation:
        observation.metadata = {
            **observation.metadata,
            "marks": [*observation.metadata.get("marks", ()), self.name],
        }
        return observation


class Rubric:
    def __init__(self) -> None:
        self.told = 0

    def __call__(self, action: Action, observation: Observation) -> float:
        return float(action.metadata["worth"])

    def reset(self) -> None:
        self.told += 1


class AsyncRubric(Rubric):
    async def __call__(self, action: Action, observation: Observation) -> float:  # type: ignore[override]
        return super().__call__(action, observation) + 1

    async def reset_async(self) -> None:
        self.told += 100


ACTION = Action(metadata={"worth": 0.5})


class Own(Bare):
    def __init__(self) -> None:
        """Skip the constructor of the base."""


def test_transforms_apply_in_order_and_without_any_observations_are_unchanged() -> None:
    for environment in (Bare(), Bare(None, None), Bare(transform=NullTransform()), Own()):
        environment.reset()
        assert environment.step(ACTION) == Observation(reward=0.0, metadata={"of": {"worth": 0.5}})
    assert (Own().transform, Own().rubric) == (None, None)
    environment = Bare(CompositeTransform([Mark("a"), NullTransform(), Mark("b")]))
    assert environment.reset().metadata == {"marks": ["a", "b"]}


def test_rubric_gives_the_reward_and_is_reset_per_episode() -> None:
    rubric = Rubric()
    for environment, worth in (
        (Bare(rubric=rubric), 0.5),
        (Bare(rubric=lambda action, observation: 0.25), 0.25),
    ):
        environment.reset()
        assert environment.step(ACTION).reward == worth
    assert rubric.told == 1


async def test_sync_and_async_rubrics_can_be_awaited_and_async_ones_must_be() -> None:
    for rubric, worth, resets in ((Rubric(), 0.5, 1), (AsyncRubric(), 1.5, 100), (None, 0.0, 0)):
        environment = Bare(rubric=rubric)
        await environment._reset_rubric_async()
        assert await environment._apply_rubric_async(ACTION, Observation()) == worth
        assert getattr(rubric, "told", 0) == resets
    with pytest.raises(TypeError, match=r"got coroutine; .*_apply_rubric_async"):
        Bare(rubric=AsyncRubric()).step(ACTION)


# Methods that are coroutines, for callers who do not await


class Slow(Environment[Action, Observation, State]):
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def reset_async(self, **options: Any) -> Observation:
        self.calls.append(f"reset {options}")
        await asyncio.sleep(0)
        return Observation()

    async def step_async(self, action: Action) -> Observation:
        self.calls.append("step")
        await asyncio.sleep(0)
        return Observation(reward=1.0)

    async def close_async(self) -> None:
        self.calls.append("close")

    @property
    def state(self) -> State:
        return State()


def play_slowly() -> None:
    environment = Slow()
    assert environment.reset(seed=1) == Observation()
    assert environment.step(Action()).reward == 1.0  # type: ignore[union-attr]
    environment.close()
    assert environment.calls == ["reset {'seed': 1}", "step", "close"]


async def test_coroutines_run_to_completion_with_and_without_an_event_loop() -> None:
    play_slowly()
    await asyncio.to_thread(play_slowly)


def test_async_step_under_the_sync_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="call the method step_async"):

        class Deaf(Slow):
            async def step(self, action: Action) -> Observation:
                return Observation()


# Tasks that are made from numbers: each split has numbers of its own


class Sums(GeneratedTasks):
    SPLITS = {"train": 1000, "test": 30, "hard": 2}  # noqa: RUF012 - read only

    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        return {"sum": f"{self.task_number(split, index)} + 1"}


def test_splits_have_their_own_tasks() -> None:
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
    assert len(sums.list_tasks("train")) == Sums.LISTED
    assert len(sums.list_tasks("hard")) == 2
    assert [task["index"] for task in sums.get_task_range("hard")] == [0, 1]
    assert [task["index"] for task in sums.get_task_range("test", -2)] == [28, 29]
    assert sums.get_task_range("test", 5, 5) == []


def test_invalid_index_split_or_range_is_refused() -> None:
    sums: Any = Sums()
    for index in (-1, 30, 1.0, True, "1", None):
        with pytest.raises(IndexError, match="index below 30"):
            sums.get_task("test", index)
    for split in ("", "Test", None, 3, ["test"]):
        for ask in (sums.num_tasks, sums.list_tasks, sums.get_task_range, lambda one: sums.get_task(one, 0)):
            with pytest.raises(KeyError, match="train, test, hard"):
                ask(split)
    with pytest.raises(ValueError, match=f"at most {Sums.RANGE}"):
        sums.get_task_range("train")
    assert len(sums.get_task_range("train", 0, Sums.RANGE)) == Sums.RANGE
