"""What the base guarantees of a class that does not write its own `state`."""

import asyncio
import gc
import random
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from openenv_core import Action, ConfigurationError, Environment, EpisodeOverError, Observation, State
from openenv_core.environment import Transform
from openenv_core.lifecycle import models_of
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import CallToolAction, ListToolsAction, ToolEnvironment, ToolResult, tool
from openenv_core.tools.context import SILENT


class Guess(Action):
    number: int


class Face(Observation):
    hint: str = ""


class Rolls(State):
    sides: int = 6


class Dice(Environment[Guess, Face, Rolls]):
    def reset(self, *, sides: int = 6) -> Face:
        if sides < 2:
            raise InvalidResetOptionError(f"a die has no {sides} sides")
        self.state.sides = sides
        self.secret = self.rng.randint(1, sides)
        return Face(hint=f"1 to {sides}")

    def step(self, action: Guess) -> Face:
        if action.number < 1:
            raise ValueError("a die has no such face")
        won = action.number == self.secret
        return Face(hint=f"guess {self.state.step_count}", reward=float(won), terminated=won)


class AsyncDice(Environment[Guess, Face]):
    async def reset(self) -> Face:
        await asyncio.sleep(0)
        return Face(hint=str(self.rng.random()))

    async def step(self, action: Guess) -> Face:
        await asyncio.sleep(0)
        return Face(truncated=self.state.step_count == 2)


def reset(environment: Environment[Any, Any, Any], **options: Any) -> Any:
    return environment.reset(**options)


def test_seed_id_and_count_are_kept_and_the_state_is_unwritten() -> None:
    dice = Dice()
    assert dice.state == Rolls()
    reset(dice, seed=7, episode_id="mine", sides=20)
    assert dice.secret == random.Random(7).randint(1, 20)
    assert dice.state == Rolls(seed=7, episode_id="mine", sides=20)
    wrong = Guess(number=dice.secret % 20 + 1)
    assert dice.step(wrong).hint == "guess 1"
    with pytest.raises(ValueError, match="no such face"):
        dice.step(Guess(number=0))  # a step that failed does not count
    assert dice.step(wrong).hint == "guess 2"

    reset(dice)
    drawn = dice.state
    assert drawn.step_count == 0
    assert drawn.seed is not None
    assert dice.secret == random.Random(drawn.seed).randint(1, 6)
    reset(dice)
    assert (drawn.seed, drawn.episode_id) != (dice.state.seed, dice.state.episode_id)


def test_steps_before_the_first_reset_and_after_the_end_are_refused() -> None:
    dice = Dice()
    with pytest.raises(EpisodeOverError, match="no episode has begun"):
        dice.step(Guess(number=1))
    reset(dice)
    assert dice.step(Guess(number=dice.secret)).done
    with pytest.raises(EpisodeOverError):
        dice.step(Guess(number=1))
    reset(dice)
    assert not dice.step(Guess(number=dice.secret + 1)).done


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"edges": 6}, "no reset options but seed, episode_id and sides, got edges"),
        ({"sides": 1}, "a die has no 1 sides"),
        ({"sides": "many"}, "sides: Input should be a valid integer"),
        ({"seed": -1}, "integer >= 0 or null for the seed"),
        ({"episode_id": 5}, "text or null for the episode_id"),
    ],
)
def test_unknown_and_invalid_reset_options_are_refused_and_the_episode_goes_on(
    options: dict[str, Any], said: str
) -> None:
    dice = Dice()
    reset(dice, seed=1, sides=None)
    with pytest.raises(InvalidResetOptionError, match=said):
        reset(dice, **options)
    assert dice.state == Rolls(seed=1, episode_id=dice.state.episode_id)
    assert dice.step(Guess(number=dice.secret)).done


def test_asynchronous_methods_need_no_twin() -> None:
    async def play() -> None:
        dice = AsyncDice()
        first = await dice.reset(seed=3)  # type: ignore[call-arg]
        assert first.hint == str(random.Random(3).random())
        assert not (await dice.step(Guess(number=1))).done
        assert (await dice.step(Guess(number=1))).done
        assert dice.state.step_count == 2
        with pytest.raises(EpisodeOverError):
            await dice.step(Guess(number=1))

    asyncio.run(play())


class Shout(Transform[Face]):
    def __call__(self, observation: Face) -> Face:
        return observation.model_copy(update={"hint": observation.hint.upper()})


class Closeness:
    resets = 0

    def reset(self) -> None:
        self.resets += 1

    def __call__(self, action: Guess, observation: Face) -> float:
        return action.number / 10


class AsyncCloseness(Closeness):
    async def __call__(self, action: Guess, observation: Face) -> float:  # type: ignore[override]
        return action.number / 10


def test_rubric_and_transform_are_reset_and_applied() -> None:
    rubric = Closeness()
    dice = Dice(transform=Shout(), rubric=rubric)
    assert reset(dice).hint == "1 TO 6"
    answer = dice.step(Guess(number=3))
    assert (answer.hint, answer.reward, rubric.resets) == ("GUESS 1", 0.3, 1)

    async def play() -> None:
        dice = AsyncDice(rubric=AsyncCloseness())
        await dice.reset()
        assert (await dice.step(Guess(number=2))).reward == 0.2

    asyncio.run(play())
    reset(dice := Dice(rubric=AsyncCloseness()))
    with pytest.raises(TypeError, match="make step"):
        dice.step(Guess(number=3))


class Loaded(Dice):
    """A subclass that calls its base: one episode, and one step."""

    def reset(self, *, sides: int = 6) -> Face:
        return super().reset(sides=2 * sides)

    def step(self, action: Guess) -> Face:
        return super().step(action)


def test_calls_of_the_base_belong_to_the_same_episode_and_step() -> None:
    loaded = Loaded()
    assert reset(loaded, seed=5).hint == "1 to 12"
    assert loaded.secret == random.Random(5).randint(1, 12)
    loaded.step(Guess(number=1))
    assert loaded.state.step_count == 1


class Adder(ToolEnvironment):
    def reset(self) -> Observation:
        self.total = self.rng.randint(1, 9)
        return Observation()

    @tool
    def submit(self, total: int) -> bool:
        """Give the total."""
        return total == self.total

    @tool
    async def wait(self) -> int:
        """Wait."""
        await asyncio.sleep(0)
        return self.state.step_count

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        return replace(result, done=name == "submit")


def test_calls_of_tools_are_steps_and_lists_are_none() -> None:
    adder = Adder()
    with pytest.raises(EpisodeOverError):
        adder.call_tool("submit", {"total": 1}, SILENT)
    reset(adder, seed=1)
    adder.step(ListToolsAction())
    assert adder.state.step_count == 0

    async def wait() -> Any:
        return await adder.step(CallToolAction(tool_name="wait"))

    assert asyncio.run(wait()).result == 1
    assert adder.step(CallToolAction(tool_name="submit", arguments={"total": adder.total})).done
    assert adder.state.step_count == 2
    with pytest.raises(EpisodeOverError):
        adder.step(CallToolAction(tool_name="submit", arguments={"total": 1}))


def test_a_call_that_is_closed_before_it_starts_is_no_step_and_no_warning() -> None:
    adder = Adder()
    reset(adder)
    for call in (
        adder.step(CallToolAction(tool_name="wait")),
        adder.call_tool("wait", {}, SILENT),
    ):
        assert isinstance(call, Coroutine)
        call.close()
        del call
        gc.collect()  # of a coroutine that was never awaited, Python warns here
    assert adder.state.step_count == 0
    assert asyncio.run(adder.step(CallToolAction(tool_name="wait"))).result == 1


class ByHand(Dice):
    """A class that writes its state keeps its episodes by hand, also with methods of a base that does not."""

    @property
    def state(self) -> Rolls:
        return Rolls(step_count=9)


def test_a_class_that_writes_its_state_is_left_alone() -> None:
    assert (Dice.KEEPS_EPISODES, ByHand.KEEPS_EPISODES) == (True, False)
    assert (Dice.SUPPORTS_CONCURRENT_SESSIONS, ByHand.SUPPORTS_CONCURRENT_SESSIONS) == (True, False)
    by_hand = ByHand()
    by_hand.secret = 1
    assert by_hand.step(Guess(number=1)).done
    assert by_hand.step(Guess(number=1)).done
    with pytest.raises(TypeError, match="seed"):
        reset(by_hand, seed=1)


class ByHandWithSuper(Dice):
    """As released environments do: its methods call those of a base that keeps episodes elsewhere."""

    @property
    def state(self) -> Rolls:
        return Rolls(step_count=9)

    def reset(self, *, seed: int | None = None, **options: Any) -> Face:
        self.rng = random.Random(seed)
        return Face()

    def step(self, action: Guess) -> Face:
        self.secret = 1
        return super().step(action)


class ByHandAsync(AsyncDice):
    @property
    def state(self) -> State:
        return State(step_count=2)

    async def reset(self, **options: Any) -> Face:
        self.rng = random.Random(0)
        return await super().reset()

    async def step(self, action: Guess) -> Face:
        return await super().step(action)


async def test_super_of_a_class_that_writes_its_state_keeps_nothing_either() -> None:
    by_hand = ByHandWithSuper()
    for _ in range(2):  # neither before a reset nor after the end is a step refused
        assert by_hand.step(Guess(number=1)).done
    assert (await ByHandAsync().step(Guess(number=1))).truncated
    assert (await ByHandAsync().reset(seed=3)).hint == str(random.Random(0).random())


def test_forks_have_their_own_generator_and_state() -> None:
    dice, fork = Dice(), Dice()
    reset(dice, seed=2)
    fork.restore(dice.snapshot())
    assert fork.rng.random() == dice.rng.random()
    fork.step(Guess(number=1))
    assert (dice.state.step_count, fork.state.step_count) == (0, 1)


def test_models_come_from_the_type_arguments() -> None:
    class Both(Environment[Guess | Action, Face]):
        pass

    assert (models_of(Loaded).action, models_of(Loaded).observation, models_of(Loaded).state) == (
        Guess,
        Face,
        Rolls,
    )
    assert models_of(Both).action == Guess | Action
    assert models_of(Both).state is State

    class Mixin(Environment):  # type: ignore[type-arg]
        """Names no models, and comes first."""

    class Mixed(Mixin, Dice):
        pass

    assert (models_of(Mixed).action, models_of(Mixed).state) == (Guess, Rolls)

    class Sided(State):
        sides: int

    with pytest.raises(ConfigurationError, match="sides has no default"):

        class Unmade(Environment[Guess, Face, Sided]):
            pass
