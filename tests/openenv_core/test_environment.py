"""The base class: what subclasses get from its constructor, and that they need not call it."""

import pytest

from openenv_core import Action, Environment, Observation, State
from openenv_core.transforms import CompositeTransform, NullTransform, Transform


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


def test_without_either_nothing_changes() -> None:
    for environment in (Bare(), Bare(None, None), Bare(transform=NullTransform())):
        assert environment.step(ACTION) == Observation(reward=0.0, metadata={"of": {"worth": 0.5}})


def test_a_subclass_need_not_call_the_constructor() -> None:
    class Own(Bare):
        def __init__(self) -> None:
            self.mine = 1

    environment = Own()
    environment.reset()
    assert (environment.transform, environment.rubric) == (None, None)
    assert environment.step(ACTION).reward == 0.0


def test_a_rubric_gives_the_reward_and_hears_of_episodes() -> None:
    rubric = Rubric()
    environment = Bare(rubric=rubric)
    environment.reset()
    assert rubric.told == 1
    assert environment.step(ACTION).reward == 0.5


def test_a_function_is_a_rubric() -> None:
    environment = Bare(rubric=lambda action, observation: 0.25)
    environment.reset()
    assert environment.step(ACTION).reward == 0.25


async def test_rubrics_of_either_kind_can_be_awaited() -> None:
    for rubric, worth, told in ((Rubric(), 0.5, 1), (AsyncRubric(), 1.5, 100), (None, 0.0, 0)):
        environment = Bare(rubric=rubric)
        await environment._reset_rubric_async()
        assert await environment._apply_rubric_async(ACTION, Observation()) == worth
        assert getattr(rubric, "told", 0) == told


def test_an_async_rubric_in_a_plain_step_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got an awaitable; .*_apply_rubric_async"):
        Bare(rubric=AsyncRubric()).step(ACTION)


def test_transforms_apply_in_order() -> None:
    environment = Bare(CompositeTransform([Mark("a"), NullTransform(), Mark("b")]))
    assert environment.reset().metadata == {"marks": ["a", "b"]}
