"""Episodes that are held against each other: where they part, and how they are played in this process."""

from typing import Any

import pytest
from counter import Add, AsyncCounter, Count, Counter, CountState

from openenv_core.checker.check import CheckFailed
from openenv_core.checker.playing.compared import play_here
from openenv_core.checker.playing.instance import LocalSession, takes_seed
from openenv_core.checker.playing.parting import parting
from servers import create_app


def result(reward: Any = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": done, "metadata": None}


def served(factory: Any) -> Any:
    return create_app(factory, Add, Count, state_cls=CountState).served


def test_equal_episodes_do_not_part() -> None:
    episode = [result(board=[1, {"x": 2}]), {"error": "EXECUTION_ERROR"}, result(1.0, True, board=[])]
    assert parting(episode, [dict(one) for one in episode]) is None


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ([result(x=1)], [result(x=2)], "at the reset, observation.x is 1 in one and 2 in the other"),
        ([result(x=[0, 1])], [result(x=[0, 2])], "observation.x[1] is 1"),
        ([result(), result(0.5)], [result(), result(0.25)], "at step 1, reward is 0.5"),
        ([result(), result(1)], [result(), result(True)], "reward is 1 in one and True"),
        ([result(), result()], [result(), {"error": "EXECUTION_ERROR"}], "at step 1"),
        ([result(), result()], [result()], "one ends after 1 steps and the other after 0"),
        ([result(x={"a": 1})], [result(x={"b": 1})], "observation.x is {'a': 1}"),
    ],
)
def test_where_episodes_part(one: list[Any], other: list[Any], told: str) -> None:
    found = parting(one, other)
    assert found is not None
    assert told in found


def test_metadata_may_tell_the_time() -> None:
    one, other = result(x=1, metadata={"at": 1}), result(x=1, metadata={"at": 2})
    assert parting([one], [{**other, "metadata": {"at": 2}}]) is None


@pytest.mark.parametrize("factory", [Counter, AsyncCounter])
def test_an_instance_is_played_as_a_server_plays_it(factory: type[Counter]) -> None:
    with LocalSession(served(factory)) as session:
        played = play_here(session, 3, [{"amount": 4}, {"amount": "x"}, {"amount": 9}, {"amount": 1}])
    assert [one.get("error") or (one["observation"]["total"], one["done"]) for one in played] == [
        (3, False),
        (7, False),
        "VALIDATION_ERROR",
        (16, True),
    ]


def test_what_a_step_raises_is_an_error_of_that_step() -> None:
    with LocalSession(served(Counter)) as session:
        session.reset(50)
        assert session.step({"amount": 1}) == {"error": "EXECUTION_ERROR"}


def test_a_constructor_that_raises_fails_the_check() -> None:
    class Broken(Counter):
        def __init__(self) -> None:
            raise RuntimeError("no table")

    with pytest.raises(CheckFailed, match="no table"):
        LocalSession(served(Broken))


def test_who_takes_a_seed() -> None:
    class Unseeded(Counter):
        def reset(self, *, episode_id: str | None = None) -> Count:  # type: ignore[override]
            return Count()

    assert takes_seed(served(Counter)) is True
    assert takes_seed(served(Unseeded)) is False
    assert takes_seed(served(lambda: Counter())) is None
