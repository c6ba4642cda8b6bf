"""Turns become rows: nothing is tokenized again, masks say where each token came from, prompts share their tokens."""

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.tokens.conversation import Prefix, training_rows
from rl_bridge.types import NO_VERSION, Completion, Ending, Trajectory, Turn


def turn(prompt: Sequence[int], answer: list[int], *, version: int = 0, first: float = -0.5) -> Turn:
    logprobs = [first - place for place in range(len(answer))]
    versions = [version] * len(answer)
    return Turn(
        prompt=prompt,
        completion=Completion(tokens=answer, logprobs=logprobs, versions=versions, stopped=True),
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(seed=1, turns=list(turns), ending=Ending.COMPLETED, reward=1.0)


def test_prompts_that_continue_make_one_row() -> None:
    rows = training_rows(
        trajectory(turn([1, 2], [3], version=5), turn([1, 2, 3, 4], [5, 6], version=4, first=-2.0)),
        advantage=0.5,
        index=7,
    )
    assert len(rows) == 1
    row = rows[0]
    assert list(row.tokens) == [1, 2, 3, 4, 5, 6]
    assert list(row.loss_mask) == [False, False, True, False, True, True]
    assert list(row.logprobs) == [0.0, 0.0, -0.5, 0.0, -2.0, -3.0]
    assert list(row.versions) == [NO_VERSION, NO_VERSION, 5, NO_VERSION, 4, 4]
    assert (row.advantage, row.trajectory, row.version) == (0.5, 7, 4)


@pytest.mark.parametrize(
    ("turns", "tokens", "masks"),
    [
        pytest.param([([1, 2], [3]), ([1, 2], [4])], [[1, 2, 3], [1, 2, 4]], ["001", "001"], id="shorter"),
        pytest.param([([1], [2]), ([1, 2], [3])], [[1, 2, 3]], ["011"], id="nothing added"),
        # 0 pads contexts elsewhere: a mask made by comparing with it would lose the answer's tokens.
        pytest.param([([0, 1], [0, 0])], [[0, 1, 0, 0]], ["0011"], id="like padding"),
    ],
)
def test_rows_and_masks_of_turns(
    turns: list[tuple[list[int], list[int]]], tokens: list[list[int]], masks: list[str]
) -> None:
    rows = training_rows(
        trajectory(*(turn(prompt, answer) for prompt, answer in turns)), advantage=1.0, index=0
    )
    assert [list(row.tokens) for row in rows] == tokens
    assert ["".join(str(int(is_loss)) for is_loss in row.loss_mask) for row in rows] == masks


@pytest.mark.parametrize("shared", [False, True])
def test_prefix_that_breaks_begins_a_row(shared: bool) -> None:
    chat = [1, 2]
    prompt = Prefix(chat) if shared else [1, 2]
    chat += [9, 4]
    rows = training_rows(
        # The second prompt spells the first answer otherwise (9 for 3): the tokens sampled stay as they were.
        trajectory(turn(prompt, [3], version=1), turn(Prefix(chat) if shared else chat, [5], version=2)),
        advantage=-1.0,
        index=0,
    )
    assert [list(row.tokens) for row in rows] == [[1, 2, 3], [1, 2, 9, 4, 5]]
    assert [list(row.loss_mask) for row in rows] == [[False, False, True], [False] * 4 + [True]]
    assert [row.version for row in rows] == [1, 2]
    assert {row.trajectory for row in rows} == {0}


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    token = st.integers(0, 3)
    turns: list[Turn] = []
    context: list[int] = []
    for number in range(draw(st.integers(1, 6))):
        fresh = draw(st.lists(token, min_size=1, max_size=3))
        prompt = fresh if draw(st.booleans()) else context + fresh
        answer = draw(st.lists(token, min_size=1, max_size=4))
        turns.append(turn(prompt, answer, version=draw(st.integers(0, 5)), first=-float(number)))
        context = prompt + answer
    return trajectory(*turns)


@settings(max_examples=30)
@given(trajectories())
def test_every_loss_token_follows_exactly_what_the_policy_saw(played: Trajectory) -> None:
    contexts = [
        list(row.tokens[:place])
        for row in training_rows(played, advantage=1.0, index=0)
        for place, is_loss in enumerate(row.loss_mask)
        if is_loss
    ]
    seen = [
        [*one.prompt, *one.completion.tokens[:place]]
        for one in played.turns
        for place in range(len(one.completion.tokens))
    ]
    assert contexts == seen


bounds = st.none() | st.integers(-9, 9)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9)), bounds, bounds)
def test_prefix_equals_the_list_at_its_making(
    before: list[int], more: list[int], start: int | None, stop: int | None
) -> None:
    tokens = list(before)
    prefix = Prefix(tokens)
    tokens += more
    assert list(prefix) == before
    assert len(prefix) == len(before)
    assert prefix[start:stop] == before[start:stop]
    assert prefix[::-1] == before[::-1]
    assert prefix == before
    assert prefix == tuple(before)
    assert prefix == Prefix(before)
    assert (prefix == tokens) == (not more)
    assert (9 in prefix) == (9 in before)
    for place in range(-len(before), len(before)):
        assert prefix[place] == before[place]
    for place in (len(before), -len(before) - 1):
        with pytest.raises(IndexError):
            prefix[place]


def test_prompts_of_one_chat_travel_once() -> None:
    tokens: list[int] = []
    turns = []
    answer = Completion(tokens=[1], logprobs=[0.0], versions=[0], stopped=True)
    for _ in range(32):
        tokens += range(1000, 1128)
        turns.append(Turn(prompt=Prefix(tokens), completion=answer))
    sent = pickle.dumps(turns)
    copies = [Turn(prompt=list(turn.prompt), completion=answer) for turn in turns]
    assert len(pickle.dumps(copies)) > 10 * len(sent)
    arrived: list[Turn] = pickle.loads(sent)
    assert arrived == turns == copies
    assert arrived != turns[:-1]
    # Still one list.
    assert len({id(turn.prompt._tokens) for turn in arrived}) == 1  # type: ignore[attr-defined]
