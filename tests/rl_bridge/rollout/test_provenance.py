"""Random episodes beside a log that the engine keeps: what is trained on is what was sampled."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tool_fixtures import (
    TOLD,
    AnsweringDeskTask,
    Desk,
    DeskTask,
    Direct,
    LastLineTask,
    LoggingEngine,
    PieceTokenizer,
    Recital,
    RecitalTask,
    chat_tokenizer,
    said_by,
    task_of,
)

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout.episode import EpisodeSettings, play_episode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.accumulator import training_rows
from rl_bridge.types import NO_VERSION, Ending, TrainSample, Trajectory

AT_ONCE = 50
MAX_NEW, MAX_LENGTH = 120, 2800


class Played:
    """Episodes of every kind, and the log of the engine that played them."""

    def __init__(self, tokenizer: object, pieces: PieceTokenizer, *, episodes: int) -> None:
        self._random = random.Random(11)
        self._tokenizer = tokenizer
        self.episodes = episodes
        self.engine = LoggingEngine(pieces, lambda prompt: said_by(self._random, prompt), seed=5)
        self.engine.renewal = 0.01
        self.trajectories: list[Trajectory] = []

    async def play(self) -> None:
        client = GeneratorClient(self.engine, max_batch=64)
        self._policy = ChatPolicy(
            self._tokenizer,  # type: ignore[arg-type]
            client,
            max_new_tokens=MAX_NEW,
            max_length=MAX_LENGTH,
        )
        for first in range(0, self.episodes, AT_ONCE):
            played = await asyncio.gather(*(self._one(seed) for seed in range(first, first + AT_ONCE)))
            self.trajectories += [one for one in played if one is not None]
        await client.close()

    async def _one(self, seed: int) -> Trajectory | None:
        kinds: list[type[Any]] = [DeskTask, AnsweringDeskTask, RecitalTask, LastLineTask, DeskTask]
        kind = kinds[seed % 5]
        tools = issubclass(kind, DeskTask)
        options = (
            {"words": self._random.choice([1, 2, 150])} if tools else {"length": self._random.randrange(1, 9)}
        )
        return await play_episode(
            Direct(Desk() if tools else Recital()),
            self._policy,
            task_of(kind),
            seed=seed,
            settings=EpisodeSettings(
                temperature=1.0,
                num_turns=self._random.choice([4, 8, 32]),
                illegal_reward=-1.0,
                reset_options=options,
            ),
        )


@pytest.fixture(scope="module", params=[200, pytest.param(1000, marks=pytest.mark.soak)])
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    with pytest.MonkeyPatch.context() as patch:
        pieces = PieceTokenizer()
        one = Played(chat_tokenizer(patch, pieces), pieces, episodes=request.param)
        asyncio.run(one.play())
        yield one


def rows_of(trajectories: Sequence[Trajectory]) -> list[TrainSample]:
    return [
        row
        for index, trajectory in enumerate(trajectories)
        for row in training_rows(trajectory, advantage=1.0, index=index)
    ]


def test_every_trained_token_is_one_that_was_sampled(played: Played) -> None:
    log, pieces = played.engine.log, PieceTokenizer()
    rows = rows_of(played.trajectories)
    told = {number for number, piece in enumerate(pieces.pieces) if TOLD in piece}
    template = {pieces.numbers[piece] for piece in ("<|start|>", "<tool_response>", "</tool_response>")}
    trained = 0
    for row in rows:
        for place, is_loss in enumerate(row.loss_mask):
            token = row.tokens[place]
            if not is_loss:
                assert (row.logprobs[place], row.versions[place]) == (0.0, NO_VERSION)
                continue
            trained += 1
            one = log[row.logprobs[place]]  # with the log-probability that it had, of which there is one
            assert (one.token, one.version) == (token, row.versions[place])
            # After what the engine saw: its prompt, and the answer up to there.
            begin = place - one.place
            assert list(row.tokens[begin:place]) == list(one.tokens[: one.place])
            assert all(row.loss_mask[begin:place])
            if one.place == 0:
                assert tuple(row.tokens[:place]) == one.prompt
            # None is the world's, or the template's.
            assert token not in told
            assert token not in template
    # And none is left out.
    assert trained == len(log)


def test_so_is_every_token_of_the_batch(played: Played) -> None:
    batch = TrainBatch.from_samples(rows_of(played.trajectories))
    seen = set()
    for index, logprob in enumerate(batch.old_logprobs.tolist()):
        one = played.engine.log[logprob]
        assert (one.token, one.version) == (batch.target[index], batch.versions[index])
        position = batch.position[index]
        context = batch.contexts[batch.context[index], : position + 1].tolist()
        if one.place == 0:
            assert context == list(one.prompt)
        else:
            assert context[-one.place :] == list(one.tokens[: one.place])
        seen.add(logprob)
    assert seen == played.engine.log.keys()


def test_all_kinds_of_episodes_are_among_them(played: Played) -> None:
    trajectories = played.trajectories
    endings = Counter(one.ending for one in trajectories)
    assert len(trajectories) == played.episodes
    for ending in Ending:
        if ending in (Ending.TRUNCATED_TIME, Ending.REFUSED_ACTION) or ending.is_failure():
            continue  # of the clock, of environments that do not take every call, and of machines
        assert endings[ending] >= played.episodes / 100, ending
    assert max(one.tool_calls for one in trajectories) == 32
    rows = [training_rows(one, advantage=1.0, index=0) for one in trajectories]
    grown = sum(len(own) == 1 < len(one.turns) for own, one in zip(rows, trajectories, strict=True))
    broken = sum(len(own) > 1 for own in rows)
    assert min(grown, broken) > played.episodes / 10
    versions = [[set(turn.completion.versions) for turn in one.turns] for one in trajectories]
    within = sum(any(len(answer) > 1 for answer in own) for own in versions)
    between = sum(len(set().union(*own)) > 1 for own in versions) - within
    assert within > played.episodes / 10  # new weights came in the midst of an answer
    assert between > 0
