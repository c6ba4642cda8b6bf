"""Opponents in self-play: who plays untrained seats, how versions are drawn, and the rows of the cross-table."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from rollout_fixtures import Note, NotebookTask, Notes, word
from serving import serving
from worker_fixtures import absences, playing, poker_decision, trajectories

from envs.kuhn_env import KuhnAction, KuhnObservation
from envs.kuhn_env.server.app import app as kuhn_app
from examples.grpo_kuhn.task import KuhnTask
from openenv_core import MultiAgentEnvironment, State
from rl_bridge.config import EnvConfig, SelfPlayConfig
from rl_bridge.config.self_play import TRAINED, Seating
from rl_bridge.errors import RolloutError
from rl_bridge.rollout.assignment import Absence
from rl_bridge.rollout.opponents import ATTEMPTS, OpponentPool
from rl_bridge.types import Ending, Group, Trajectory
from servers import create_app


def seatings(**keys: Any) -> tuple[Seating, ...]:
    return EnvConfig.model_validate({"app": "a:b", **keys}).seatings


def test_seatings_of_successive_tables() -> None:
    both = {"first": TRAINED, "second": TRAINED}
    assert seatings() == ()
    assert seatings(seats=["first", "second"], exchange_seats=True) == (both,)
    players = {"first": "policy", "second": "frozen"}
    assert seatings(seats=players) == ({"first": TRAINED, "second": "frozen"},)
    exchanged = {"first": "frozen", "second": TRAINED}
    assert seatings(seats=players, exchange_seats=True) == ({"first": TRAINED, "second": "frozen"}, exchanged)
    assert seatings(seats=["first", "second"], trained_seats=["second"]) == (
        {"first": "policy", "second": TRAINED},
    )


@pytest.fixture
async def kuhn(no_backoff: None) -> AsyncIterator[str]:
    async with serving(kuhn_app) as address:
        yield f"http://{address}"


def bet_with_a_king(observation: KuhnObservation) -> KuhnAction:
    return KuhnAction(action="bet" if observation.card == "K" else "pass")


EXCHANGED = ({"first": TRAINED, "second": "frozen"}, {"first": "frozen", "second": TRAINED})


async def test_an_opponent_plays_and_is_no_episode(kuhn: str) -> None:
    async with playing([kuhn], KuhnTask, lambda _: "bet", opponent=lambda _: "pass") as play:
        found = trajectories(await play([1] * 4, seatings=EXCHANGED))
        # Whoever bets wins the ante of the one that passes.
        assert [(each.seat, each.reward, each.others) for each in found] == [
            (seat, 1.0, -1.0) for seat in ("first", "second", "first", "second")
        ]
        assert {
            play.engine.tokenizer.text(turn.completion.tokens) for each in found for turn in each.turns
        } == {"bet"}
        assert len(play.engine.asked) == 4
        assert sum(len(poker_decision(prompt)[1]) == 1 for prompt in play.opponent.asked) == 2


async def test_the_answer_of_an_opponent_that_is_no_action_is_sampled_anew(kuhn: str) -> None:
    answers = iter(["fold"] * (ATTEMPTS - 1) + ["pass"])
    seating = (EXCHANGED[0],)
    async with playing([kuhn], KuhnTask, lambda _: "bet", opponent=lambda _: next(answers)) as play:
        (found,) = trajectories(await play([1], seatings=seating))
        assert (found.reward, found.ending) == (1.0, Ending.COMPLETED)
    async with playing([kuhn], KuhnTask, lambda _: "bet", opponent=lambda _: "fold") as play:
        assert absences(await play([1], seatings=seating)) == [Absence.UNSCORED]
        assert len(play.opponent.asked) == ATTEMPTS


class Duet(MultiAgentEnvironment[Note, Notes, State]):
    """One note each."""

    seats = ("first", "second")

    def reset(self) -> dict[str, Notes]:
        return {seat: Notes(words=[seat]) for seat in self.seats}

    def step(self, actions: Mapping[str, Note]) -> dict[str, Notes]:
        return {seat: Notes(words=[], reward=1.0, terminated=True) for seat in self.seats}


class CarelessTask(NotebookTask):
    """Makes an action of anything, even one that is not of the environment's model."""

    def parse(self, text: str) -> Note:
        return Note.model_construct(text=None if text == "nothing" else text)


async def test_an_action_of_an_opponent_that_the_environment_refuses_is_sampled_anew(
    no_backoff: None,
) -> None:
    """It is no error of the run, any more than the policy's own."""
    answers = iter(["nothing"] * (ATTEMPTS - 1) + ["word"])
    seating = (EXCHANGED[0],)
    async with serving(create_app(Duet, Note, Notes)) as address:
        url = f"http://{address}"
        async with playing([url], CarelessTask, word, opponent=lambda _: next(answers)) as play:
            (found,) = trajectories(await play([1], seatings=seating))
            assert (found.reward, found.ending) == (1.0, Ending.COMPLETED)
        async with playing([url], CarelessTask, word, opponent=lambda _: "nothing") as play:
            assert absences(await play([1], seatings=seating)) == [Absence.UNSCORED]
            assert len(play.opponent.asked) == ATTEMPTS


async def test_functions_the_server_and_the_policy_itself_are_opponents(kuhn: str) -> None:
    function = f"{__name__}:bet_with_a_king"
    for seed in range(4):
        async with playing([kuhn], KuhnTask, lambda _: "bet") as play:
            (against_function,) = trajectories(
                await play([seed], seatings=({"first": TRAINED, "second": function},))
            )
            card, _ = poker_decision(play.engine.asked[0])
            assert against_function.reward in ((1.0,) if card == "K" else (1.0, -2.0))
            (against_server,) = trajectories(
                await play([seed], seatings=({"first": TRAINED, "second": "server:equilibrium"},))
            )
            assert (against_server.seat, against_server.others) == ("first", None)
            asked = len(play.engine.asked)
            (against_itself,) = trajectories(
                await play([seed], seatings=({"first": "policy", "second": TRAINED},))
            )
            assert (against_itself.seat, abs(against_itself.reward), len(play.engine.asked) - asked) == (
                "second",
                2.0,
                2,
            )
    async with playing([kuhn], KuhnTask, lambda _: "bet") as play:
        with pytest.raises(RolloutError, match="a generator to play frozen"):
            await play([1], seatings=(EXCHANGED[0],))


def pool(**settings: Any) -> OpponentPool:
    return OpponentPool(SelfPlayConfig.model_validate(settings), seed=3)


def group(version: int, *rewards: float) -> Group:
    won = [Trajectory(seed=1, ending=Ending.COMPLETED, reward=reward) for reward in rewards]
    return Group(seed=1, opponent=version, trajectories=won)


def test_versions_that_have_been_saved_are_drawn_uniformly() -> None:
    assert pool().versions(50) == [0]
    versions = pool(pool_interval=5, pool_size=3)
    assert versions.versions(5) == [0]  # it is saved after its opponent is drawn
    assert versions.versions(6) == [0, 5]
    assert versions.versions(31) == [0, 20, 25, 30]
    later = pool(pool_interval=1000, pool_size=3)
    counts = Counter(later.draw(3001 + iteration) for iteration in range(900))
    assert counts.keys() == {0, 1000, 2000, 3000}
    assert all(170 <= count <= 280 for count in counts.values())  # 225, by four standard deviations
    assert [later.draw(4000 + n) for n in range(20)] == [later.draw(4000 + n) for n in range(20)]


def test_opponents_that_are_not_beaten_are_drawn_more_often() -> None:
    hard = pool(pool_interval=1000, draw="win_rate")
    metrics = hard.add_results([group(0, *[1.0] * 98), group(1000, *[-1.0] * 49, *[0.0] * 49)])
    assert metrics == {"opponent/0/win_rate": 1.0, "opponent/1000/win_rate": 0.0, "opponent/version": 1000.0}
    assert (hard.win_rate(0), hard.win_rate(1000), hard.win_rate(2000)) == (0.99, 0.01, 0.5)
    counts = Counter(hard.draw(2001 + iteration) for iteration in range(900))
    # By (1 - win rate)^2: 0.0001, 0.9801 and 0.25.
    assert counts[0] <= 3
    assert 660 <= counts[1000] <= 770
    assert counts[1000] + counts[2000] >= 897
    saved = hard.state()
    hard.add_results([group(0, *[-1.0] * 49)])
    assert hard.win_rate(0) == 0.5  # earlier games count half
    hard.restore(saved)
    assert hard.win_rate(0) == 0.99
    assert hard.add_results([Group(seed=1)]) == {}
