"""Episodes through a real server: how they end, and what becomes of them when infrastructure fails."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
from rollout_fixtures import (
    FakeEngine,
    FakeTokenizer,
    NotebookTask,
    Script,
    TableTask,
    stand_on_17,
)

from openenv_core import LocalProcessProvider
from rl_bridge.config import Config
from rl_bridge.errors import GeneratorError, RolloutError
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout import Task, workers
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.groups import into_groups, siblings
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.workers import RolloutWorkers
from rl_bridge.types import Ending, Trajectory

HERE = str(Path(__file__).parent)
TIMEOUT_S = 60.0
"""A bound for tests that would hang otherwise; none is meant to come near it."""


@pytest.fixture(scope="module")
def blackjack() -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(scope="module")
def notebook() -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BACKOFF_S", 0.001)


def active_sessions(url: str) -> int:
    with urlopen(f"{url}/active_sessions", timeout=10) as reply:
        return int(json.load(reply))


async def until_no_session_is_left(url: str) -> None:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(active_sessions, url):  # noqa: ASYNC110 - it is another process's
            await asyncio.sleep(0.01)


class Play:
    """Workers with everything they need."""

    def __init__(
        self,
        url: str | Callable[[], str],
        task: type[Task],
        script: Script,
        *,
        sessions: int = 8,
        max_length: int = 64,
        max_attempts: int = 3,
    ) -> None:
        tokenizer = FakeTokenizer()
        self.engine = FakeEngine(tokenizer, script)
        self.generator = GeneratorClient(self.engine, max_batch=64)
        config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}})
        policy = ChatPolicy(
            tokenizer,  # type: ignore[arg-type]  # the real one needs transformers
            self.generator,
            max_new_tokens=4,
            max_length=max_length,
        )
        address = url if callable(url) else lambda: url
        self.clients: list[Any] = []

        def connect() -> Any:
            self.clients.append(task.client_type(address(), message_timeout_s=10))
            return self.clients[-1]

        self.workers = RolloutWorkers(
            connect, sessions=sessions, task=task(config, Path()), policy=policy, max_attempts=max_attempts
        )

    async def __call__(
        self,
        seeds: list[int],
        *,
        temperature: float = 1.0,
        num_turns: int = 32,
        timeout_s: float = TIMEOUT_S,
        **reset_options: Any,
    ) -> list[Trajectory | None]:
        settings = EpisodeSettings(
            temperature=temperature, num_turns=num_turns, illegal_reward=-1.5, reset_options=reset_options
        )
        return await self.workers.play(seeds, settings, timeout_s=timeout_s)


@asynccontextmanager
async def playing(*arguments: Any, **options: Any) -> AsyncIterator[Play]:
    play = Play(*arguments, **options)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(play.generator.close)
        stack.push_async_callback(play.workers.close)
        yield play


async def test_hands_are_played_to_their_end(blackjack: str) -> None:
    async with playing(blackjack, TableTask, stand_on_17) as play:
        hands = await play(list(range(100)))
        # As many sessions as allowed, kept from hand to hand.
        assert len(play.clients) == 8
        assert await asyncio.to_thread(active_sessions, blackjack) == 8
        assert (play.workers.retried, play.workers.dropped) == (0, 0)
    await until_no_session_is_left(blackjack)
    assert [hand.seed for hand in hands if hand] == list(range(100))
    assert {hand.ending for hand in hands if hand} == {Ending.COMPLETED}
    assert {hand.reward for hand in hands if hand} == {-1.0, 0.0, 1.0}
    assert {hand.version for hand in hands if hand} == {3}
    for hand in hands:
        assert hand is not None
        # The script hit until it had 17, and stood then, or went bust.
        assert [len(turn.prompt) for turn in hand.turns] == [3] * len(hand.turns)
        assert all(turn.completion.logprobs == [-0.5] for turn in hand.turns)


async def test_siblings_share_the_deal(blackjack: str) -> None:
    async with playing(blackjack, TableTask, stand_on_17) as play:
        seeds = [11, 12, 13, 14, 15]
        groups = into_groups(await play(siblings(seeds, 4)), 4)
    assert [group.seed for group in groups] == seeds
    for group in groups:
        assert len(group.trajectories) == 4
        # One policy, one deal: the same hand to the last card.
        lives = {
            (tuple(tuple(turn.prompt) for turn in hand.turns), hand.reward) for hand in group.trajectories
        }
        assert len(lives) == 1
    assert len({tuple(group.trajectories[0].turns[0].prompt) for group in groups}) > 1


async def test_the_temperature_reaches_the_engine(blackjack: str) -> None:
    async with playing(blackjack, TableTask, stand_on_17) as play:
        await play([1, 2], temperature=0.7)
        await play([1, 2], temperature=0.0)
        assert {
            (asked.temperature, asked.max_new_tokens, asked.stop_token_ids) for asked in play.engine.asked
        } == {
            (0.7, 4, (0,)),
            (0.0, 4, (0,)),
        }


async def test_an_answer_that_is_no_action_ends_the_hand_and_is_penalised(blackjack: str) -> None:
    async with playing(blackjack, TableTask, lambda prompt: "fold") as play:
        hands = await play([1, 2, 3])
        assert (play.workers.retried, play.workers.dropped) == (0, 0)
    assert [(h.ending, h.reward, len(h.turns)) for h in hands if h] == [(Ending.ILLEGAL, -1.5, 1)] * 3


async def test_the_penalty_comes_on_top_of_what_was_earned(notebook: str) -> None:
    async with playing(
        notebook, NotebookTask, lambda prompt: "nonsense" if len(prompt.split()) == 3 else "word"
    ) as play:
        (episode,) = await play([1], length=9)
    assert episode is not None
    assert (episode.ending, len(episode.turns)) == (Ending.ILLEGAL, 3)
    assert episode.reward == 0.25 + 0.25 - 1.5


async def test_a_limit_of_turns_truncates(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        (episode,) = await play([1], num_turns=2, length=3)
        (whole,) = await play([1], num_turns=3, length=3)
    assert episode is not None
    assert whole is not None
    assert (episode.ending, len(episode.turns), episode.reward) == (Ending.TRUNCATED_TURNS, 2, 0.5)
    assert episode.ending.is_truncated()
    # The last turn that is allowed may end the episode.
    assert (whole.ending, len(whole.turns), whole.reward) == (Ending.COMPLETED, 3, 0.75)
    assert not whole.ending.is_truncated()


async def test_a_prompt_that_leaves_no_room_truncates(notebook: str) -> None:
    # Four new tokens at most, so a prompt of three words fits into seven, and one of four does not.
    async with playing(notebook, NotebookTask, lambda prompt: "word", max_length=7) as play:
        (episode,) = await play([1], length=9)
    assert episode is not None
    assert (episode.ending, len(episode.turns), episode.reward) == (Ending.TRUNCATED_LENGTH, 3, 0.75)
    assert [len(turn.prompt) for turn in episode.turns] == [1, 2, 3]


async def test_an_episode_that_is_over_before_it_begins_is_no_trajectory(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        with pytest.raises(RolloutError, match="none of 2 episodes"):
            await play([1, 2], over_at_once=True)


async def test_an_environment_that_fails_once_is_asked_again(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        await asyncio.to_thread(urlopen, Request(f"{notebook}/fail/3", method="POST"), timeout=10)
        episodes = await play(list(range(16)))
        assert (play.workers.retried, play.workers.dropped) == (3, 0)
        # Each failure cost its session, and another was made.
        assert len(play.clients) == 8 + 3
    await until_no_session_is_left(notebook)
    assert [(e.ending, e.reward, len(e.turns)) for e in episodes if e] == [(Ending.COMPLETED, 0.75, 3)] * 16


async def test_an_environment_that_keeps_failing_is_dropped_and_counted(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        seeds = siblings([1, 2, 3], 2)
        episodes = await play(seeds, broken_seeds=[2])
        assert (play.workers.retried, play.workers.dropped) == (6, 2)
    await until_no_session_is_left(notebook)
    assert [episode and episode.seed for episode in episodes] == [1, 1, None, None, 3, 3]
    assert [group.seed for group in into_groups(episodes, 2)] == [1, 3]


async def test_nothing_but_failures_is_an_error(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        with pytest.raises(RolloutError, match=r"none of 2 episodes could be played.*seed 1 is broken"):
            await play([1, 1], broken_seeds=[1])
        assert play.workers.dropped == 2
        # The workers live on.
        assert all(await play([2, 3]))


async def test_no_seed_is_no_episode(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        assert await play([]) == []


async def test_a_server_at_capacity_is_asked_again() -> None:
    with LocalProcessProvider("rollout_fixtures:narrow_app", cwd=HERE) as provider:
        url = str(provider.url)
        async with playing(url, NotebookTask, lambda prompt: "word", max_attempts=3) as holder:
            # Two sessions, which are all there are, held from here on.
            await asyncio.gather(*(holder.workers._client(slot) for slot in range(2)))
            await holder([1, 2])
            async with playing(url, NotebookTask, lambda prompt: "word", max_attempts=3) as play:
                with pytest.raises(RolloutError, match=r"none of 2 .*expected a free session"):
                    await play([1, 2])
                assert (play.workers.retried, play.workers.dropped) == (6, 2)
                # One comes free while it is tried again.
                await holder.workers.close()
                await until_no_session_is_left(url)
                assert all(await play([1, 2]))
                assert play.workers.dropped == 2


def kill_server(port: str) -> None:
    """SIGKILL to the process that serves a port, whatever stands between it and this one."""
    for process in psutil.Process().children(recursive=True):
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        if any(str(connection.laddr.port) == port for connection in listening):
            os.kill(process.pid, signal.SIGKILL)


async def test_a_server_that_dies_is_never_scored_as_play() -> None:
    with LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as provider:
        url = str(provider.url)
        async with playing(url, TableTask, stand_on_17) as play:
            calls = 0

            def in_the_midst() -> None:
                nonlocal calls
                calls += 1
                if calls == 10:
                    kill_server(url.rpartition(":")[2])

            play.engine.before = in_the_midst
            hands = await play(list(range(64)))
            finished = [hand for hand in hands if hand]
            assert 0 < len(finished) < 64
            assert play.workers.dropped == 64 - len(finished)
            assert play.workers.retried == 3 * play.workers.dropped
    # What was lost has no reward; what has one was really played.
    assert all(hand.ending is Ending.COMPLETED and hand.turns for hand in finished)


async def test_episodes_of_a_dead_server_are_played_on_its_successor() -> None:
    with (
        LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as first,
        LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as second,
    ):
        where = str(first.url)
        async with playing(lambda: where, TableTask, stand_on_17) as play:
            calls = 0

            def in_the_midst() -> None:
                nonlocal calls, where
                calls += 1
                if calls == 10:
                    where = str(second.url)
                    kill_server(str(first.url).rpartition(":")[2])

            undisturbed = await play(list(range(64)))
            play.engine.before = in_the_midst
            hands = await play(list(range(64)))
            assert play.workers.dropped == 0
            # Each of the eight sessions found out once.
            assert play.workers.retried == 8
        await until_no_session_is_left(str(second.url))
        # Begun anew from their seeds, they are the hands that they would have been.
        assert hands == undisturbed


async def test_too_slow_is_an_error_that_says_how_far_it_came(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word", sessions=2) as play:
        with pytest.raises(RolloutError, match=r"expected 2 episodes within 0\.2 s, got 0"):
            await play([1, 2], wait_s=5.0, timeout_s=0.2)
    await until_no_session_is_left(notebook)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        # A fault in the task's own code, and one in the script that stands in for the engine.
        (lambda prompt: "explode", ZeroDivisionError),
        (lambda prompt: str(1 // 0), ZeroDivisionError),
    ],
    ids=["task", "engine"],
)
async def test_our_own_faults_end_the_rollout(notebook: str, script: Script, error: type[Exception]) -> None:
    async with playing(notebook, NotebookTask, script) as play:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(error):
                await play(list(range(32)))
        assert (play.workers.retried, play.workers.dropped) == (0, 0)
    await until_no_session_is_left(notebook)


async def test_an_engine_that_fails_is_not_the_environments_fault(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:

        def fail() -> None:
            raise GeneratorError("out of memory")

        play.engine.before = fail
        with pytest.raises(GeneratorError, match="out of memory"):
            await play(list(range(8)))
        assert play.workers.retried == 0


async def test_a_request_that_the_server_refuses_is_not_repeated(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        # A note is a text; this one is a number of words that its model refuses on the server.
        play.workers._task.parse = lambda text: {"text": 7}  # type: ignore[method-assign]
        with pytest.raises(Exception, match="VALIDATION_ERROR"):
            await play([1, 2])
        assert play.workers.retried == 0
    await until_no_session_is_left(notebook)


async def test_a_cancelled_rollout_gives_its_sessions_back(notebook: str) -> None:
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        waiting = asyncio.Event()
        play.engine.before = waiting.set
        task = asyncio.ensure_future(play(list(range(64)), length=8))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_no_session_is_left(notebook)


async def test_progress_counts_every_episode_once(notebook: str) -> None:
    told: list[int] = []
    async with playing(notebook, NotebookTask, lambda prompt: "word") as play:
        settings = EpisodeSettings(
            temperature=1.0, num_turns=8, illegal_reward=0.0, reset_options={"broken_seeds": [3]}
        )
        await play.workers.play(range(20), settings, timeout_s=TIMEOUT_S, progress=told.append)
    assert told == list(range(1, 21))
