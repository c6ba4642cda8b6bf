"""Parts of the checks: comparing episodes, playing an instance, the hook in a server's processes."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from counter import Add, AsyncCounter, Count, Counter, CountState
from games import BlockingRounds
from subjects import Walk, look, walk

from openenv_core.checker import inside
from openenv_core.checker.playing import LocalEnvironment, Turn, find_difference, turns
from openenv_core.checker.results import Status
from openenv_core.errors import ExecutionError, NotForkableError
from openenv_core.types import StepResult
from servers import create_app

NUMBERS = count()


def result(reward: Any = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": done, "metadata": None}


def serve_factory(factory: Any) -> Any:
    return create_app(factory, Add, Count, state_cls=CountState).served


def test_equal_episodes_do_not_part_and_metadata_may_differ() -> None:
    episode = [result(board=[1, {"x": 2}]), {"error": "EXECUTION_ERROR"}, result(1.0, True, board=[])]
    assert find_difference(episode, [dict(one) for one in episode]) is None
    one, other = (
        Turn(0, 0, 0, None, StepResult({"x": 1, "metadata": {"at": at}}, None, False)).comparable
        for at in (1, 2)
    )
    assert find_difference([one], [other]) is None


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([result(x=1)], [result(x=2)], "at the reset, observation.x is 1 in one and 2 in the other"),
        ([result(x=[0, 1])], [result(x=[0, 2])], "observation.x[1] is 1"),
        ([result(), result(0.5)], [result(), result(0.25)], "at step 1, reward is 0.5"),
        ([result(), result(1)], [result(), result(True)], "reward is 1 in one and True"),
        ([result(), result()], [result(), {"error": "EXECUTION_ERROR"}], "at step 1"),
        ([result(), result()], [result()], "one ends after 1 steps and the other after 0"),
    ],
)
def test_first_difference_of_episodes(one: list[Any], other: list[Any], message: str) -> None:
    found = find_difference(one, other)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("factory", [Counter, AsyncCounter])
def test_an_instance_is_played_as_a_server_plays_it(factory: type[Counter]) -> None:
    actions = [{"amount": 4}, {"amount": "x"}, {"amount": 9}, {"amount": 1}]
    with LocalEnvironment(serve_factory(factory)) as environment:
        found = [turn.error or (turn.result.total, turn.done) for turn in turns(environment, 3, actions)]
    assert found == [(3, False), (7, False), "VALIDATION_ERROR", (16, True)]


def test_a_game_of_several_seats_is_played_as_a_server_plays_it() -> None:
    with LocalEnvironment(create_app(BlockingRounds).served) as environment:
        rewards = [turn.result.reward for turn in turns(environment, 3, [{"number": 4}] * 3)]
    assert rewards == [None, None, None, 4]


def test_actions_and_options_are_played_again_unchanged() -> None:
    class Using(Counter):
        def reset(self, *, seed: int | None = None, cards: Any = None) -> Count:  # type: ignore[override]
            return Count(total=cards.pop())

        def step(self, action: Add) -> Count:
            return Count(total=action.metadata["cards"].pop())

    actions = [{"amount": 1, "metadata": {"cards": [1, 2]}}]
    with LocalEnvironment(serve_factory(Using), {"cards": [3, 4]}) as environment:
        episodes = [[turn.result.total for turn in turns(environment, 0, actions)] for _ in range(2)]
    assert episodes == [[4, 2], [4, 2]]


def test_exception_of_the_environment_is_an_error_or_a_finding() -> None:
    with LocalEnvironment(serve_factory(Counter)) as environment:
        environment.reset(seed=50)
        with pytest.raises(ExecutionError):
            environment.step({"amount": 1})

    def broken() -> Counter:
        raise RuntimeError("no table")

    with pytest.raises(ExecutionError, match="no table"):
        LocalEnvironment(serve_factory(broken))


def test_seeds_are_checked_where_reset_takes_one() -> None:
    class Random(Counter):
        def step(self, action: Add) -> Count:
            return Count(total=next(NUMBERS))

    class Unseeded(Random):
        def reset(self, *, episode_id: str | None = None) -> Count:  # type: ignore[override]
            return super().reset(episode_id=episode_id)

    seeded, unseeded = (
        look("same_seed_same_episode", create_app(one, Add, Count, state_cls=CountState))
        for one in (Random, Unseeded)
    )
    assert (seeded.status, "got two" in seeded.message) == (Status.FAILED, True)
    assert (unseeded.status, "accepts no seed" in unseeded.message) == (Status.SKIPPED, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotForkableError("not this episode"), Status.SKIPPED), (RuntimeError("no disk"), Status.FAILED)],
)
def test_an_episode_that_cannot_be_forked_is_no_fault(error: Exception, status: Status) -> None:
    class Forkable(Walk):
        FORKABLE = True

        def snapshot(self) -> Any:
            raise error

    found = look("forks_go_their_own_way", walk(Forkable))
    assert (found.status, str(error) in found.message) == (status, True), found
    assert (
        look("forks_go_their_own_way", walk(type("Copied", (Walk,), {"FORKABLE": True}))).status
        is Status.PASSED
    )


def test_a_sitecustomize_of_the_users_own_runs_as_well(tmp_path: Path) -> None:
    own, hook = tmp_path / "own", tmp_path / "hook"
    for folder, text in ((own, "print('my own')"), (hook, Path(inside.__file__).read_text())):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
    env = {**os.environ, inside.COLLECTED: str(tmp_path / "collected"), "PYTHONPATH": f"{hook}:{own}"}
    output = subprocess.check_output([sys.executable, "-c", ""], env=env, text=True, timeout=30)
    assert output.strip() == "my own"
