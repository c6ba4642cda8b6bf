"""Turns become rows: nothing is tokenized again, masks say where each token came from, prompts share their tokens."""

import pickle
from collections.abc import Callable, Sequence

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
    turns = turn([1, 2], [3], version=5), turn([1, 2, 3, 4], [5, 6], version=4, first=-2.0)
    (row,) = training_rows(trajectory(*turns), advantage=0.5, index=7)
    assert list(row.tokens) == [1, 2, 3, 4, 5, 6]
    assert list(row.loss_mask) == [False, False, True, False, True, True]
    assert list(row.logprobs) == [0.0, 0.0, -0.5, 0.0, -2.0, -3.0]
    assert list(row.versions) == [NO_VERSION, NO_VERSION, 5, NO_VERSION, 4, 4]
    assert (row.advantage, row.trajectory, row.version) == (0.5, 7, 4)


@pytest.mark.parametrize("kind", [Prefix, list])
def test_prefix_that_breaks_begins_a_row(kind: Callable[[list[int]], Sequence[int]]) -> None:
    chat = [1, 2]
    first = turn(kind(chat), [3], version=1)
    chat += [9, 4]
    # The second prompt spells the first answer otherwise (9 for 3): the tokens sampled stay as they were.
    rows = training_rows(trajectory(first, turn(kind(chat), [5], version=2)), advantage=-1.0, index=0)
    assert [list(row.tokens) for row in rows] == [[1, 2, 3], [1, 2, 9, 4, 5]]
    assert [list(row.loss_mask) for row in rows] == [[False, False, True], [False] * 4 + [True]]
    assert [row.version for row in rows] == [1, 2]
    assert {row.trajectory for row in rows} == {0}


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Prompts that continue, add nothing, or begin anew. 0 pads contexts elsewhere; here it is a token like others."""
    token = st.integers(0, 3)
    turns: list[Turn] = []
    context: list[int] = []
    for number in range(draw(st.integers(1, 6))):
        continues = bool(context) and draw(st.booleans())
        fresh = draw(st.lists(token, min_size=0 if continues else 1, max_size=3))
        prompt = context + fresh if continues else fresh
        answer = draw(st.lists(token, min_size=1, max_size=4))
        turns.append(turn(prompt, answer, version=draw(st.integers(0, 5)), first=-float(number)))
        context = prompt + answer
    return trajectory(*turns)


@settings(max_examples=30)
@given(trajectories())
def test_every_loss_token_follows_exactly_what_the_policy_saw(played: Trajectory) -> None:
    learned = [
        (list(row.tokens[: place + 1]), row.logprobs[place], row.versions[place])
        for row in training_rows(played, advantage=1.0, index=0)
        for place, is_loss in enumerate(row.loss_mask)
        if is_loss
    ]
    assert learned == [
        ([*one.prompt, *answer.tokens[: place + 1]], answer.logprobs[place], answer.versions[place])
        for one in played.turns
        for answer in [one.completion]
        for place in range(len(answer.tokens))
    ]


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
    for _ in range(32):
        tokens += range(1000, 1128)
        turns.append(turn(Prefix(tokens), [1]))
    sent = pickle.dumps(turns)
    copies = [turn(list(one.prompt), [1]) for one in turns]
    assert len(pickle.dumps(copies)) > 10 * len(sent)
    arrived: list[Turn] = pickle.loads(sent)
    assert arrived == turns == copies
    # Still one list.
    assert len({id(one.prompt._tokens) for one in arrived}) == 1  # type: ignore[attr-defined]
