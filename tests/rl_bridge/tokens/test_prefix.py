"""Prompts that share their tokens: each stays as it was, and all travel as one."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.tokens.prefix import Prefix
from rl_bridge.types import Completion, Turn

bounds = st.none() | st.integers(-9, 9)


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9)), bounds, bounds)
def test_it_is_what_the_list_was(
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
