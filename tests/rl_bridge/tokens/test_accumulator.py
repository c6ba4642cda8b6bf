"""Turns become rows: nothing is tokenized again, and masks say where each token came from."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.tokens.accumulator import training_rows
from rl_bridge.tokens.prefix import Prefix
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


def test_a_prefix_that_breaks_begins_a_row() -> None:
    rows = training_rows(
        # The second prompt spells the first answer otherwise (9 for 3): the tokens sampled stay as they were.
        trajectory(turn([1, 2], [3], version=1), turn([1, 2, 9, 4], [5], version=2)),
        advantage=-1.0,
        index=0,
    )
    assert [list(row.tokens) for row in rows] == [[1, 2, 3], [1, 2, 9, 4, 5]]
    assert [list(row.loss_mask) for row in rows] == [[False, False, True], [False] * 4 + [True]]
    assert [row.version for row in rows] == [1, 2]
    assert {row.trajectory for row in rows} == {0}


def test_a_shorter_prompt_begins_a_row() -> None:
    rows = training_rows(trajectory(turn([1, 2], [3]), turn([1, 2], [4])), advantage=1.0, index=0)
    assert [list(row.tokens) for row in rows] == [[1, 2, 3], [1, 2, 4]]


def test_a_prompt_that_adds_nothing_continues() -> None:
    rows = training_rows(trajectory(turn([1], [2]), turn([1, 2], [3])), advantage=1.0, index=0)
    assert [list(row.tokens) for row in rows] == [[1, 2, 3]]


def test_padding_like_tokens_are_trained_on_where_the_policy_sampled_them() -> None:
    # 0 pads contexts elsewhere: a mask made by comparing with it would lose the answer's tokens.
    (row,) = training_rows(trajectory(turn([0, 1], [0, 0])), advantage=1.0, index=0)
    assert list(row.loss_mask) == [False, False, True, True]


class Counting(list[int]):
    """Knows how many of its items have been looked at by slices."""

    looked_at = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked_at += len(found)
        return found


def test_an_episode_costs_what_it_is_long() -> None:
    chat = Counting()
    turns = []
    for number in range(32):
        chat += range(number, number + 50)
        turns.append(turn(Prefix(chat), [number] * 50))
        chat += [number] * 50
    (row,) = training_rows(trajectory(*turns), advantage=1.0, index=0)
    assert list(row.tokens) == list(chat)
    assert chat.looked_at <= len(chat)


def test_prompts_that_share_their_list_are_believed_as_far_as_they_share_it() -> None:
    chat = [1, 2]
    first = turn(Prefix(chat), [3])
    chat += [9, 4]  # which is not what was sampled
    second = turn(Prefix(chat), [5])
    rows = training_rows(trajectory(first, second), advantage=1.0, index=0)
    assert [list(row.tokens) for row in rows] == [[1, 2, 3], [1, 2, 9, 4, 5]]


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


@given(trajectories())
def test_loss_tokens_are_the_completions_in_order(played: Trajectory) -> None:
    rows = training_rows(played, advantage=1.0, index=0)
    selected = [
        token_logprob_version
        for row in rows
        for *token_logprob_version, is_loss in zip(
            row.tokens, row.logprobs, row.versions, row.loss_mask, strict=True
        )
        if is_loss
    ]
    completions = [
        [*sampled]
        for one in played.turns
        for sampled in zip(
            one.completion.tokens, one.completion.logprobs, one.completion.versions, strict=True
        )
    ]
    assert selected == completions
    assert min(row.version for row in rows) == played.version


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
