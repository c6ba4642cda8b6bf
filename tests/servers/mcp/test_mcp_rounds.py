"""What travels through a client of the stateless wire between the rounds of one call."""

from typing import Any

from openenv_core.tools import Elicit, Request, Sample
from servers.mcp.rounds import Rounds

NAME = Elicit(message="Who?", schema={"type": "object", "properties": {}})
THOUGHT = Sample(messages="2 + 2?", max_tokens=5)
ANN = {"action": "accept", "content": {"name": "Ann"}}
FOUR = {"role": "assistant", "content": {"type": "text", "text": "4"}, "model": "m"}


def next_round(before: Rounds, responses: Any) -> Rounds:
    return Rounds(before.result()["requestState"], responses)


def both() -> dict[str, Request]:
    return {"name": NAME, "thought": THOUGHT}


def test_what_is_missing_is_asked_again_and_what_came_is_kept() -> None:
    first = Rounds(None, None)
    assert first.answers(both()) is None
    assert list(first.result()["inputRequests"]) == ["name", "thought"]
    second = next_round(first, {"name": ANN, "other": FOUR})
    assert second.answers(both()) is None
    assert list(second.result()["inputRequests"]) == ["thought"]
    third = next_round(second, {"thought": FOUR})
    assert third.answers(both()) == {"name": ANN, "thought": FOUR}
    assert not third.open


def test_answers_of_another_kind_are_none() -> None:
    for wrong in (FOUR, 5, None, [], {"action": "perhaps"}):
        rounds = Rounds(None, {"name": wrong})
        assert rounds.answers({"name": NAME}) is None


def test_one_name_may_be_used_for_one_question_after_the_other() -> None:
    bob = ANN | {"content": {"name": "Bob"}}
    first = Rounds(None, {"name": ANN})
    assert first.answers({"name": NAME}) == {"name": ANN}
    assert first.answers({"name": NAME}) is None  # the answer was to the first
    second = next_round(first, {"name": bob})
    assert second.answers({"name": NAME}) == {"name": ANN}
    assert second.answers({"name": NAME}) == {"name": bob}


def test_a_tool_that_asks_something_else_this_time_is_answered_anew() -> None:
    first = Rounds(None, {"name": ANN})
    first.answers({"name": NAME})
    first.answers({"thought": THOUGHT})
    second = next_round(first, {"thought": FOUR})
    assert second.answers({"thought": THOUGHT}) is None
    third = next_round(second, {"thought": FOUR})
    assert third.answers({"thought": THOUGHT}) == {"thought": FOUR}
    assert third.answers({"name": NAME}) is None
