"""Self-play: a worker plays all seats of a game at one table; rewards by seat, and tables that a seat leaves."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from rollout_fixtures import GONE, FakeEngine, FakeTokenizer, Note, NotebookTask, Notes, word
from serving import serving
from worker_fixtures import absences, playing, poker_decision, trajectories

from envs.kuhn_env.models import KuhnObservation
from envs.kuhn_env.server.app import app as kuhn_app
from examples.grpo_kuhn.task import KuhnTask
from openenv_core import MultiAgentEnvironment, State, StepResult
from openenv_core.multi_agent import SeatPolicy
from rl_bridge.errors import EpisodeUnscoredError, RolloutError
from rl_bridge.rollout.assignment import Absence
from rl_bridge.rollout.groups import trained_trajectories
from rl_bridge.rollout.table import SeatSession, Table
from rl_bridge.types import Ending, Group
from servers import create_app

SEATS = ("first", "second")


@pytest.fixture
async def kuhn(no_backoff: None) -> AsyncIterator[str]:
    async with serving(kuhn_app) as address:
        yield f"http://{address}"


def check_then_call(prompt: str) -> str:
    """The first player checks and calls with a king or a queen, else folds; the second bets."""
    card, moves = poker_decision(prompt)
    if len(moves) == 1:
        return "bet"
    return "pass" if not moves or card == "J" else "bet"


async def test_seats_share_a_table_and_each_has_its_own_trajectory_and_reward(kuhn: str) -> None:
    async with playing([kuhn], KuhnTask, check_then_call) as play:
        for seed in range(6):
            found = trajectories(await play([seed] * 6, seats=SEATS))
            assert [each.seat for each in found] == ["first", "second"] * 3
            assert {each.ending for each in found} == {Ending.COMPLETED}
            assert [len(each.turns) for each in found] == [2, 1] * 3
            # Groups share the deal, so a scripted policy plays the same game at every table.
            assert len({tuple(each.turns[0].prompt) for each in found}) == 2
            assert [each.reward for each in found[::2]] == [-each.reward for each in found[1::2]]
            card, _ = poker_decision(play.engine.tokenizer.text(found[0].turns[0].prompt))
            assert abs(found[0].reward) == (1.0 if card == "J" else 2.0)
        assert play.sessions.opened <= 3


async def test_baseline_is_that_of_the_seat(kuhn: str) -> None:
    answers: Iterator[str] = iter(["bet", "bet", "bet", "pass", "pass", "bet"])

    def call_or_fold(prompt: str) -> str:
        return next(answers) if poker_decision(prompt)[1] else "bet"

    async with playing([kuhn], KuhnTask, call_or_fold) as play:
        found = trajectories(await play([3] * 12, seats=SEATS))
    won = {seat: [each.reward for each in found if each.seat == seat] for seat in SEATS}
    assert len(set(won["first"])) == 2
    trained = trained_trajectories([Group(seed=3, trajectories=found)] * 2, normalize_std=False)
    assert [item.index for item in trained] == list(range(24))
    assert [item.group for item in trained] == [0, 1] * 6 + [2, 3] * 6
    for item in trained:
        rewards = won[item.trajectory.seat]
        assert item.advantage == pytest.approx(item.reward - sum(rewards) / 6)


async def test_an_answer_that_is_no_action_is_that_seats_alone(kuhn: str) -> None:
    async with playing(
        [kuhn], KuhnTask, lambda prompt: "fold" if poker_decision(prompt)[1] else "bet"
    ) as play:
        result = await play([1, 1], seats=SEATS)
        (second,) = trajectories(result)
        assert (second.seat, second.ending, second.reward) == ("second", Ending.ILLEGAL, -1.5)
        assert absences(result) == [Absence.UNSCORED, None]
        # The session plays on, at another table.
        play.engine.script = check_then_call
        assert len(trajectories(await play([1, 1], seats=SEATS))) == 2


async def test_an_environment_without_seats_is_refused(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        with pytest.raises(RolloutError, match="seat"):
            await play([1, 1], seats=SEATS)


async def test_probabilities_are_those_of_the_answers_met() -> None:
    tokenizer: Any = FakeTokenizer()
    async with playing(
        [], KuhnTask, word, tokenizer=tokenizer, engine=FakeEngine(tokenizer, str.upper)
    ) as play:
        chats = [[{"role": "user", "content": text}] for text in ("a b", "c")]
        found = await play.worker.policy.answer_probabilities(chats, samples=3)  # type: ignore[arg-type]
        assert found == [{"A B": pytest.approx(0.36787944)}, {"C": pytest.approx(0.60653066)}]
        assert play.engine.seeds == [0, 1, 2] * 2


class Replies:
    """Answers each call with the next of a list."""

    def __init__(self, *replies: StepResult[Any]) -> None:
        self._replies = iter(replies)

    async def reset(self, **options: Any) -> StepResult[Any]:
        assert options == {"seed": 4, "seat": list(SEATS)}
        return next(self._replies)

    async def step_seats(self, actions: Mapping[str, Any], /) -> StepResult[Any]:
        return next(self._replies)


def reply(
    seat: str, reward: float | None = None, *, done: bool = False, others: Any = (), **metadata: Any
) -> StepResult[Any]:
    observation = KuhnObservation(seat="first", card="J", text="", done=done)
    return StepResult(observation, reward, done, {"seat": seat, "others": dict(others), **metadata})


def seen(reward: float | None, *, terminated: bool = False, truncated: bool = False) -> dict[str, Any]:
    observation = {"seat": "second", "card": "K", "text": "it is over"}
    return {"observation": observation, "reward": reward, "terminated": terminated, "truncated": truncated}


def sit(*replies: StepResult[Any]) -> tuple[Table, SeatSession, SeatSession]:
    table = Table(Replies(*replies), SEATS, KuhnObservation)
    return table, table.seat("first"), table.seat("second")


async def test_what_a_seat_earns_while_it_waits_comes_with_its_next_reply() -> None:
    table, first, second = sit(
        reply("first"),
        reply("first", 0.5, others={"second": seen(0.25)}),
        reply("second", 0.125, others={"first": seen(1.0)}),
        reply("first", 2.0, done=True, others={"second": seen(-2.0, truncated=True)}),
    )
    assert (await first.reset(seed=4)).reward == 0.0
    assert (await first.step(None)).reward == 0.5
    await table.act("first", None)
    assert (await second.reset(seed=4)).reward == 0.375
    last = await second.step(None)
    assert (last.reward, last.done, last.truncated, last.observation.card) == (-2.0, True, True, "K")
    last = await table.wait("first")
    assert (last.reward, last.done, last.truncated) == (3.0, True, False)


async def test_seats_that_act_at_once_are_asked_at_once() -> None:
    table, first, second = sit(
        reply("first", turn=["first", "second"], others={"second": seen(None)}),
        reply("first", turn=["first"]),  # the second one has acted
        reply("first", 1.0, turn=["first", "second"], others={"second": seen(-1.0)}),
        reply("first", turn=["first"]),
        reply("first", 2.0, done=True, others={"second": seen(-2.0, terminated=True)}),
    )
    shown = [(await seat.reset(seed=4)).observation.card for seat in (first, second)]
    assert shown == ["J", "K"]
    for rewards, done in (((1.0, -1.0), False), ((2.0, -2.0), True)):
        steps = [asyncio.create_task(seat.step(None)) for seat in (second, first)]
        later, earlier = await asyncio.gather(*steps)
        assert ((earlier.reward, later.reward), earlier.done, later.done) == (rewards, done, done)
    assert table.earned_by_others("first") == -3.0


async def test_a_seat_that_ended_before_the_others_gets_one_last_reply() -> None:
    table, first, second = sit(
        reply("first"),
        reply("first", others={"second": seen(-1.0, terminated=True)}),
        reply("second", done=True, others={"first": seen(1.0, terminated=True)}),
    )
    await first.reset(seed=4)
    assert not (await first.step(None)).done
    assert (await second.reset(seed=4)).reward == -1.0
    table.leave("second")  # whose game is over: the other's goes on
    assert (await first.step(None)).reward == 1.0


@pytest.mark.parametrize("at", [0, 1])
async def test_a_table_that_is_not_scored_has_no_result_for_any_seat(at: int) -> None:
    replies = [reply("first"), reply("second", done=True)]
    replies[at] = reply("first", done=True, unscored="the judge is gone")
    table, first, second = sit(*replies)

    async def play() -> None:
        await first.reset(seed=4)
        await first.step(None)

    with pytest.raises(EpisodeUnscoredError, match="the judge is gone"):
        await play()
    table.leave("first")
    with pytest.raises(EpisodeUnscoredError, match="seat first was left"):
        await second.reset(seed=4)


class Band(MultiAgentEnvironment[Note, Notes, State]):
    """Three players write at once. The first of its games fails, as only the right one is shown."""

    seats = ("left", "right", "third")
    POLICIES: ClassVar[dict[str, SeatPolicy]] = {"quiet": lambda notes, rng: Note(text="quiet")}
    games: ClassVar[Iterator[int]]

    def reset(self) -> dict[str, Notes]:
        return {seat: Notes(words=[seat]) for seat in self.seats}

    def step(self, actions: Mapping[str, Note]) -> dict[str, Notes]:
        failing = "right" if next(self.games) == 0 else None
        assert actions["third"].text == "quiet"
        words = [actions[seat].text for seat in self.seats]
        return {
            seat: Notes(words=words, reward=len(seat), terminated=True, **(GONE if seat == failing else {}))
            for seat in self.seats
        }


async def test_a_game_that_fails_is_played_again_by_all_seats_with_the_same_answers(no_backoff: None) -> None:
    """The seats act at once, and the server plays another one."""
    Band.games = itertools.count()
    async with (
        serving(create_app(Band, Note, Notes)) as address,
        playing([f"http://{address}"], NotebookTask, lambda prompt: f"I am {prompt}") as play,
    ):
        result = await play([5, 5], seats=("left", "right"))
    assert [(each.seat, each.reward) for each in trajectories(result)] == [("left", 4.0), ("right", 5.0)]
    assert (result.retried, sorted(play.engine.asked)) == (1, ["left", "right"])


class Relay(MultiAgentEnvironment[Note, Notes, State]):
    """The left player is out after one note; the right one goes on, and earns more."""

    seats = ("left", "right")

    def reset(self) -> dict[str, Notes]:
        return {seat: Notes(words=[seat]) for seat in self.seats}

    def step(self, actions: Mapping[str, Note]) -> dict[str, Notes]:
        out = "left" not in actions
        return {seat: Notes(words=[seat], reward=1.0, terminated=out or seat == "left") for seat in actions}


async def test_what_others_earn_counts_to_the_end_of_their_game(no_backoff: None) -> None:
    async with (
        serving(create_app(Relay, Note, Notes)) as address,
        playing([f"http://{address}"], NotebookTask, word) as play,
    ):
        found = trajectories(await play([5, 5], seats=("left", "right")))
        assert [(each.reward, each.others) for each in found] == [(1.0, 2.0), (2.0, 1.0)]
        texts = iter(["word", "word", "nonsense"])
        play.engine.script = lambda _: next(texts)
        found = trajectories(await play([5, 5], seats=("left", "right")))
        # The right one has left its game, which so has no total.
        assert [(each.ending, each.others) for each in found] == [
            (Ending.COMPLETED, None),
            (Ending.ILLEGAL, None),
        ]


async def test_a_seat_that_is_left_is_nobodys_error() -> None:
    contexts: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
    table, first, second = sit(reply("first"))
    await first.reset(seed=4)
    table.leave("first")  # while nobody waits for the second seat's turn
    del table, first, second
    gc.collect()
    assert contexts == []
