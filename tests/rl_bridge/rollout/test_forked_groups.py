"""Groups that begin in the middle of an episode: played once to a turn, forked there, and on by each sibling."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from rollout_fixtures import Notebook, NotebookTask, Notes
from serving import serving
from tool_fixtures import DeskTask, LoggingEngine, PieceTokenizer, calling, chat_tokenizer, rows_of
from worker_fixtures import absences, playing, trajectories

from envs.blackjack_env.server.app import app as blackjack_app
from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.models import CodeInterpreterObservation, CodeInterpreterState, Execute
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend
from examples.grpo_blackjack.task import BlackjackTask
from openenv_core.sandbox import Isolation
from openenv_core.tools import ToolObservation
from rl_bridge.errors import EpisodeLostError
from rl_bridge.rollout import Task
from rl_bridge.rollout.assignment import Absence, sampling_seed
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending
from servers import create_app


async def test_what_siblings_share_is_played_once_and_is_context(
    desk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, number = PieceTokenizer(), itertools.count()

    def said(prompt: str) -> str:
        mine = next(number)
        return (
            calling("add", a=mine, b=0)
            if prompt.count("<tool_response>") < 2 + mine % 2
            else calling("finish")
        )

    engine = LoggingEngine(pieces, said)
    tokenizer = chat_tokenizer(monkeypatch, pieces)
    async with playing(
        [desk], DeskTask, said, tokenizer=tokenizer, engine=engine, max_new_tokens=400, max_length=8000
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


async def test_an_episode_that_ends_before_is_one_of_siblings_that_share_nothing(notebook: str) -> None:
    async with playing([notebook], NotebookTask, lambda prompt: "word") as play:
        result = await play([5] * 3, length=2, fork_turn=2, sampling_key=(7, 3))
        assert [len(one.turns) for one in trajectories(result)] == [2, 2, 2]
        expected = [sampling_seed(7, 3, sibling, turn) for sibling in range(3) for turn in range(2)]
        assert sorted(play.engine.seeds) == sorted(expected)
        play.engine.seeds.clear()
        await play([5] * 3, length=3, fork_turn=2, sampling_key=(7, 3))
        expected = [sampling_seed(7, 3, 0, turn) for turn in (0, 1)]
        expected += [sampling_seed(7, 3, sibling, 2) for sibling in range(3)]
        assert sorted(play.engine.seeds) == sorted(expected)


async def test_sibling_whose_session_fails_is_brought_there_again_by_the_same_answers(notebook: str) -> None:
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


async def test_sibling_that_cannot_be_brought_there_again_is_dropped(
    notebook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, as_it_was = itertools.count(), Notebook.reset

    async def never_the_same(self: Notebook, *, seed: int | None = None, **options: Any) -> Notes:
        seen = await as_it_was(self, seed=seed, **options)
        self._words[0] += f"-{next(numbers)}"
        return seen.model_copy(update={"words": list(self._words)})

    monkeypatch.setattr(Notebook, "reset", never_the_same)
    async with playing([notebook], NotebookTask, lambda prompt: "word", max_attempts=2) as play:
        result = await play([5] * 3, fork_turn=1, test="other", failing=[5], at=2)
    assert absences(result) == [Absence.DROPPED] * 3
    assert result.last_failure is not None
    assert EpisodeLostError.__name__ in result.last_failure
    assert "did not reach the fork of its group again" in result.last_failure


async def test_groups_that_wait_for_sessions_do_not_wait_for_each_other(notebook: str) -> None:
    async with playing([notebook], NotebookTask, lambda prompt: "word", sessions=6, max_attempts=20) as play:
        groups = [play([seed] * 4, fork_turn=1, flaky=0.1) for seed in range(8)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*groups, play([99] * 5))
        assert all(absences(result) == [None] * len(result.outcomes) for result in results)
        assert sum(result.retried for result in results) > 0


async def test_group_that_is_told_to_stop_before_its_fork_has_nothing(notebook: str) -> None:
    async with playing([notebook], NotebookTask, lambda prompt: "word") as play:
        play.engine.before = lambda: play.worker.cancel([1])
        assert absences(await play([5] * 3, fork_turn=2)) == [Absence.UNFINISHED] * 3


async def test_siblings_of_a_hand_of_blackjack_get_the_same_cards_until_they_part(no_backoff: None) -> None:
    said = itertools.cycle(["hit", "stand"])
    async with (
        serving(blackjack_app) as address,
        playing([f"http://{address}"], BlackjackTask, lambda prompt: next(said)) as play,
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


class CellTask(Task):
    """An answer is code; the policy is shown what came of it."""

    client_type = CodeInterpreterEnv

    def messages(self, observation: Any) -> list[ChatMessage]:
        return [{"role": "user", "content": f"seen {getattr(observation, 'result', None)}"}]

    def parse(self, text: str) -> Execute:
        return Execute(code=text)


async def test_siblings_of_an_interpreter_have_its_variables_and_go_their_own_ways(no_backoff: None) -> None:
    settings = InterpreterSettings(
        preload=(),
        strongest_isolation=Isolation.PROCESS,  # the quickest to start
        minimum_isolation=Isolation.PROCESS,
        tasks="none",
        max_snapshot=True,
    )
    shared = SharedBackend(settings)
    app = create_app(
        lambda: CodeInterpreterEnvironment(shared),
        Execute,
        CodeInterpreterObservation | ToolObservation,
        env_name="code_interpreter",
        max_concurrent_envs=8,
        state_cls=CodeInterpreterState,
        lifespan=shared.lifespan,
    )
    cells = itertools.count(1)

    def said(prompt: str) -> str:
        return "x=[0];x" if "None" in prompt else f"x.append({next(cells)})or(x)"

    async with serving(app) as address, playing([f"http://{address}"], CellTask, said) as play:
        siblings = trajectories(await play([1] * 3, fork_turn=1, num_turns=3, snapshot=True))
        tokenizer = play.worker.policy.tokenizer
        assert {tokenizer.text(list(one.turns[0].prompt)) for one in siblings} == {"seen [0]"}
        seen = [tokenizer.text(list(one.turns[1].prompt)) for one in siblings]
    assert Counter(seen) == Counter(f"seen [0, {number}]" for number in (1, 2, 3))
