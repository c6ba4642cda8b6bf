"""Groups that begin in the middle of an episode: played once to a turn, forked there, and on by each sibling."""

import asyncio
import itertools
from typing import Any

import pytest
from rollout_fixtures import Notebook, NotebookTask, Notes, word
from serving import eventually, serving
from tool_fixtures import DeskTask, LoggingEngine, PieceTokenizer, calling, chat_tokenizer, rows_of
from worker_fixtures import absences, playing, trajectories

from envs.blackjack_env.server.app import app as blackjack_app
from examples.grpo_blackjack.task import BlackjackTask
from rl_bridge.errors import EpisodeLostError
from rl_bridge.rollout.assignment import Absence, sampling_seed
from rl_bridge.rollout.task import Dialogue
from rl_bridge.types import Ending


async def test_shared_beginning_of_siblings_is_played_once_and_not_trained(
    desk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, number = PieceTokenizer(), itertools.count()

    def script(prompt: str) -> str:
        own_number = next(number)
        return (
            calling("add", a=own_number, b=0)
            if prompt.count("<tool_response>") < 2 + own_number % 2
            else calling("finish")
        )

    engine = LoggingEngine(pieces, script)
    tokenizer = chat_tokenizer(monkeypatch, pieces)
    async with playing(
        [desk], DeskTask, script, tokenizer=tokenizer, engine=engine, max_new_tokens=400, max_length=8000
    ) as play:
        result = await play([5] * 4, fork_turn=2)
        siblings = trajectories(result)
        assert len(siblings) == 4
        assert len(engine.asked) == 2 + sum(len(one.turns) for one in siblings)
        # The chat is one row each, which begins with all that was said before; none of that is learned.
        (shared,) = {tuple(one.turns[0].prompt) for one in siblings}
        assert pieces.decode(shared, skip_special_tokens=False).count("<tool_response>") == 2
        rows = rows_of(siblings)
        assert len(rows) == 4
        for row, one in zip(rows, siblings, strict=True):
            assert tuple(row.tokens[: len(shared)]) == shared
            assert not any(row.loss_mask[: len(shared)])
            assert sum(row.loss_mask) == sum(len(turn.completion.tokens) for turn in one.turns)
        # What was earned on the way there is part of each one's reward.
        assert {one.reward for one in siblings} == {
            0.5 + 0.25 * (len(one.turns) - 1) + 1.0 for one in siblings
        }
        assert {one.ending for one in siblings} == {Ending.COMPLETED}


async def test_episode_that_ends_before_the_fork_starts_siblings_from_scratch(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        result = await play([5] * 3, length=2, fork_turn=2, sampling_key=(7, 3))
        assert [len(one.turns) for one in trajectories(result)] == [2, 2, 2]
        expected = [sampling_seed(7, 3, sibling, turn) for sibling in range(3) for turn in range(2)]
        assert sorted(play.engine.seeds) == sorted(expected)
        play.engine.seeds.clear()
        await play([5] * 3, length=3, fork_turn=2, sampling_key=(7, 3))
        expected = [sampling_seed(7, 3, 0, turn) for turn in (0, 1)]
        expected += [sampling_seed(7, 3, sibling, 2) for sibling in range(3)]
        assert sorted(play.engine.seeds) == sorted(expected)


async def test_failed_sibling_replays_the_shared_answers(notebook: str) -> None:
    words = itertools.count()
    async with playing([notebook], NotebookTask, lambda prompt: f"word{next(words)}") as play:
        result = await play([5] * 3, fork_turn=1, test="fork", failing=[5], at=2)
        siblings = trajectories(result)
        assert result.retried == 3  # each of the forks is as the one that they were made of
        assert {tuple(one.turns[0].prompt) for one in siblings} == {tuple(siblings[0].turns[0].prompt)}
        assert [len(one.turns) for one in siblings] == [2, 2, 2]
        assert next(words) == 1 + 3 * 2  # nobody was asked twice
        assert {one.reward for one in siblings} == {0.75}
        assert play.sessions.opened == 1 + 3  # none goes on in a session that failed


async def test_sibling_that_cannot_replay_the_beginning_is_dropped(
    notebook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, as_it_was = itertools.count(), Notebook.reset

    async def never_the_same(self: Notebook, *, seed: int | None = None, **options: Any) -> Notes:
        seen = await as_it_was(self, seed=seed, **options)
        self._words[0] += f"-{next(numbers)}"
        return seen.model_copy(update={"words": list(self._words)})

    monkeypatch.setattr(Notebook, "reset", never_the_same)
    async with playing([notebook], NotebookTask, word, max_attempts=2) as play:
        result = await play([5] * 3, fork_turn=1, test="other", failing=[5], at=2)
    assert absences(result) == [Absence.DROPPED] * 3
    assert result.last_failure is not None
    assert EpisodeLostError.__name__ in result.last_failure
    assert "did not reach the fork of its group again" in result.last_failure


async def test_groups_that_wait_for_sessions_do_not_wait_for_each_other(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=6, max_attempts=20) as play:
        groups = [play([seed] * 4, fork_turn=1, flaky=0.1) for seed in range(8)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*groups, play([99] * 5))
        assert all(absences(result) == [None] * len(result.outcomes) for result in results)
        assert sum(result.retried for result in results) > 0


async def test_group_stopped_before_its_fork_is_unfinished(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        play.engine.before = lambda: play.worker.cancel([1])
        assert absences(await play([5] * 3, fork_turn=2)) == [Absence.UNFINISHED] * 3


async def test_siblings_of_a_hand_of_blackjack_get_the_same_cards_until_they_part(no_backoff: None) -> None:
    replies = itertools.cycle(["hit", "stand"])
    async with (
        serving(blackjack_app) as address,
        playing([f"http://{address}"], BlackjackTask, lambda prompt: next(replies)) as play,
    ):
        result = await play([16] * 6, fork_turn=1)
    siblings = trajectories(result)
    assert len({tuple(one.turns[0].prompt) for one in siblings}) == 1
    by_answers: dict[tuple[int, ...], set[float]] = {}
    for one in siblings:
        answers = tuple(token for turn in one.turns for token in turn.completion.tokens)
        by_answers.setdefault(answers, set()).add(one.reward)
    assert len(by_answers) > 1
    assert all(len(rewards) == 1 for rewards in by_answers.values())


async def test_session_of_an_ended_sibling_is_for_others_before_the_slowest_has_ended(notebook: str) -> None:
    resume = asyncio.Event()

    class OneIsSlow(NotebookTask):
        begun = 0

        async def begin(self, *arguments: Any) -> Dialogue:
            self.begun += 1
            if self.begun == 2:  # the first one after the fork
                await resume.wait()
            return await super().begin(*arguments)

    async with playing([notebook], OneIsSlow, word, sessions=5) as play:
        group = asyncio.create_task(play([5] * 4, fork_turn=1))
        await eventually(lambda: play.task.begun == 5)  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            assert absences(await play([9] * 3)) == [None] * 3
        assert not group.done()
        assert play.sessions.slots_taken == 2  # the slow one's, and the one that it was forked from
        resume.set()
        assert absences(await group) == [None] * 4
