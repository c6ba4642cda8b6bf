"""Random episodes beside a log that the engine keeps: what is trained on is what was sampled."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from tool_fixtures import TOLD, LoggingEngine, PieceTokenizer, chat_tokenizer, play_any_kind, rows_of, said_by

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.types import NO_VERSION, Ending, Trajectory

AT_ONCE = 50


class Played:
    """Episodes of every kind, and the log of the engine that played them."""

    def __init__(self, tokenizer: ChatTokenizer, pieces: PieceTokenizer, *, episodes: int) -> None:
        source = random.Random(11)
        self._tokenizer = tokenizer
        self.episodes = episodes
        self.engine = LoggingEngine(pieces, lambda prompt: said_by(source, prompt), seed=5)
        self.engine.renewal = 0.01
        self.trajectories: list[Trajectory] = []

    async def play(self) -> None:
        client = GeneratorClient(self.engine, max_batch=64)
        policy = ChatPolicy(self._tokenizer, client, max_new_tokens=120, max_length=2800)
        for first in range(0, self.episodes, AT_ONCE):
            seeds = range(first, first + AT_ONCE)
            played = await asyncio.gather(*(play_any_kind(seed, policy, words=(1, 2, 150)) for seed in seeds))
            self.trajectories += [one for one in played if one is not None]
        await client.close()


@pytest.fixture(scope="module", params=[200, pytest.param(1000, marks=pytest.mark.soak)])
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    with pytest.MonkeyPatch.context() as patch:
        pieces = PieceTokenizer()
        one = Played(chat_tokenizer(patch, pieces), pieces, episodes=request.param)
        asyncio.run(one.play())
        yield one


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


def test_every_token_of_the_batch_is_one_that_was_sampled(played: Played) -> None:
    batch = TrainBatch.from_samples(rows_of(played.trajectories))
    contexts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    seen = set()
    for index, logprob in enumerate(batch.old_logprobs.tolist()):
        one = played.engine.log[logprob]
        assert (one.token, one.version) == (batch.target[index], batch.versions[index])
        position = batch.position[index]
        context = contexts[batch.context[index]][: position + 1].tolist()
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
    rows = [rows_of([one]) for one in trajectories]
    grown = sum(len(own) == 1 < len(one.turns) for own, one in zip(rows, trajectories, strict=True))
    broken = sum(len(own) > 1 for own in rows)
    assert min(grown, broken) > played.episodes / 10
    versions = [[set(turn.completion.versions) for turn in one.turns] for one in trajectories]
    within = sum(any(len(answer) > 1 for answer in own) for own in versions)
    between = sum(len(set().union(*own)) > 1 for own in versions) - within
    assert within > played.episodes / 10  # new weights came in the midst of an answer
    assert between > 0
