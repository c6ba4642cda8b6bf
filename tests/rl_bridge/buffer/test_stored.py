"""Tokens of played groups as arrays, kept by the trainer; and the groups without them, as the controller keeps them."""

import json
import math
import random

import numpy as np
import pytest

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.stored import (
    LeasesInUse,
    StoredBatch,
    TokenStore,
    dump_groups,
    load_groups,
    make_samples,
    token_key,
    token_leases,
)
from rl_bridge.errors import TrainerWentBackError
from rl_bridge.rollout.episode import shorten_reason
from rl_bridge.tokens.arrays import TrajectoryTokens, dump_tokens, load_tokens
from rl_bridge.tokens.conversation import Prefix, join_turns, training_rows
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def draw_turns(draw: random.Random) -> list[Turn]:
    """Turns of chats that go on or begin anew, whose answers may be empty, certain, or of several versions."""
    turns, chat = list[Turn](), list[int]()
    for _ in range(draw.randint(1, 8)):
        if draw.random() < 0.3:
            chat = []
        chat += draw.choices(range(100), k=draw.randint(1 if not chat else 0, 6))
        number = draw.randint(0, 5)
        answer = Completion(
            tokens=draw.choices(range(100), k=number),
            logprobs=draw.choices([-math.inf, 0.0, -0.1, -2.5], k=number),
            versions=sorted(draw.choices(range(4), k=number)),
            stopped=draw.random() < 0.5,
        )
        turns.append(Turn(prompt=Prefix(chat) if draw.random() < 0.5 else tuple(chat), completion=answer))
        chat = [*chat, *answer.tokens]
    return turns


def episode(turns: list[Turn]) -> Trajectory:
    return Trajectory(seed=5, turns=turns, ending=Ending.TRUNCATED_TIME, reward=0.1, tool_calls=2)


def test_arrays_hold_the_training_rows_to_the_last_bit_also_from_a_file() -> None:
    draw = random.Random(3)
    played = {(lease, 1): draw_turns(draw) for lease in range(60)} | {(60, 0): list[Turn]()}
    tokens = {key: TrajectoryTokens.of(turns) for key, turns in played.items()}
    for kept in (tokens, load_tokens(dump_tokens(tokens))):
        assert kept.keys() == played.keys()
        for key, turns in played.items():
            rows = kept[key].samples(advantage=0.5, index=7, group=2, reward=0.25)
            expected = training_rows(episode(turns), advantage=0.5, index=7)
            for row, other in zip(rows, expected, strict=True):
                for name in ("tokens", "loss_mask", "versions"):
                    assert getattr(row, name).tolist() == getattr(other, name)
                assert row.logprobs.tolist() == np.asarray(other.logprobs, dtype=np.float32).tolist()
                assert (row.advantage, row.trajectory, row.group, row.reward) == (0.5, 7, 2, 0.25)
            joined = [
                (index, begin, end)
                for index, row in enumerate(join_turns(turns))
                for begin, end in row.answers
            ]
            spans = list(kept[key].iterate_turns())
            assert [(turn.row, turn.begin, turn.end) for turn in spans] == joined
            assert [turn.stopped for turn in spans] == [turn.completion.stopped for turn in turns]
    assert load_tokens(dump_tokens({})) == {}


def test_tokens_take_twelve_bytes_a_token_of_the_policy_whatever_the_turns() -> None:
    answer = Completion(tokens=[1] * 1000, logprobs=[-0.5] * 1000, versions=[3] * 1000, stopped=True)
    tokens = TrajectoryTokens.of([Turn(prompt=[0] * 500, completion=answer)])
    assert (tokens.tokens.nbytes, tokens.logprobs.nbytes) == (1500 * 4, 1000 * 4)
    assert tokens.runs.tolist() == [[500, -1], [1000, 3]]


def test_a_step_gets_its_tokens_and_what_nobody_refers_to_is_dropped() -> None:
    store = TokenStore()
    turns = [
        Turn(prompt=[1, 2], completion=Completion(tokens=[3], logprobs=[-0.5], versions=[0], stopped=True))
    ]
    for lease in range(6):
        store.put({(lease, sibling): TrajectoryTokens.of(turns) for sibling in range(2)})
    # Of a group that waits, one that is being played, and two under leases that the controller had not given out.
    batch = StoredBatch(
        keys=np.array([[1, 0], [1, 1]]),
        advantages=np.array([2.0, 2.0]),
        trajectories=np.array([4, 4]),
        groups=np.array([0, 0]),
        rewards=np.array([1.0, 1.0]),
        in_use=LeasesInUse(leases=frozenset({2}), next_lease=4),
    )
    rows = make_samples(batch, store.take(batch))
    assert TrainBatch.from_samples(rows).advantages.tolist() == [2.0, 2.0]
    assert len(store) == 2 * len([1, 2, 4, 5])
    store.get([(1, 0)])  # until the next step, for the records
    store.drop_unused(batch.in_use)
    with pytest.raises(TrainerWentBackError, match=r"lease and sibling \(1, 0\)"):
        store.get([(1, 0)])


def test_groups_come_back_without_their_tokens() -> None:
    played = episode(draw_turns(random.Random(1)))
    refused = Trajectory(
        seed=5, ending=Ending.REFUSED_ACTION, reward=-1.0, refusal=shorten_reason("ValueError: no \ud83d")
    )
    siblings = [one.without_tokens(lease=9, sibling=number) for number, one in enumerate((played, refused))]
    group = Group(id=4, seed=5, trajectories=siblings)
    (restored,) = load_groups(json.loads(json.dumps(dump_groups([group]))))
    assert restored == group
    assert restored.version == played.version
    assert restored.trajectories[0].summarize().tokens == sum(
        len(turn.completion.tokens) for turn in played.turns
    )
    assert restored.trajectories[1].refusal == "ValueError: no ?"
    assert [token_key(one) for one in restored.trajectories] == [(9, 0), (9, 1)]
    assert token_leases([restored, Group(seed=0, trajectories=[played])]) == {9}
    with pytest.raises(ValueError, match="has handed to the trainer"):
        token_key(played)
