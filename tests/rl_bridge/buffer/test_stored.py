"""Groups in a checkpoint: they come back as they were, many turns of a chat for the price of one."""

import json
import math
from dataclasses import replace

import pytest

from rl_bridge.buffer.stored import dump_groups, load_groups
from rl_bridge.rollout.episode import shorten_reason
from rl_bridge.tokens.conversation import Prefix
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def answer(*tokens: int, logprob: float = -0.1) -> Completion:
    return Completion(
        tokens=list(tokens), logprobs=[logprob] * len(tokens), versions=[3] * len(tokens), stopped=True
    )


def episode(turns: list[Turn]) -> Trajectory:
    return Trajectory(seed=5, turns=turns, ending=Ending.TRUNCATED_TIME, reward=0.1, tool_calls=2)


def chat(turns: int) -> list[Turn]:
    tokens, said = [1], []
    for number in range(turns):
        said.append(Turn(prompt=Prefix(tokens), completion=answer(number, number)))
        tokens += [number, number, *range(50)]
    return said


def group_of(*turns: list[Turn]) -> Group:
    return Group(id=4, seed=5, trajectories=[episode(one) for one in turns])


def test_groups_come_back_as_they_were() -> None:
    separate = [Turn(prompt=prompt, completion=answer(7)) for prompt in ((1, 2), [1, 2, 7, 3], [9])]
    infinite = [Turn(prompt=[1], completion=answer(7, logprob=-math.inf))]
    groups = [group_of(chat(3), separate, chat(1) + chat(2)), group_of(infinite, [])]
    assert load_groups(dump_groups(groups)) == groups
    assert load_groups(dump_groups([])) == []


def test_prompts_that_share_their_tokens_are_kept_once_and_share_them_again() -> None:
    turns = chat(32)
    (group,) = load_groups(dump_groups([group_of(turns)]))
    prompts = [turn.prompt for turn in group.trajectories[0].turns]
    assert all(isinstance(prompt, Prefix) for prompt in prompts)
    assert len({id(prompt._tokens) for prompt in prompts}) == 1  # type: ignore[attr-defined]
    (kept,) = json.loads(dump_groups([group_of(turns)]))
    numbers = sum(len(turn["prompt"]) for turn in kept["trajectories"][0]["turns"])
    assert numbers == len(turns[-1].prompt)


def test_what_an_older_checkpoint_has_is_read() -> None:
    one = {"tokens": [7], "logprobs": [-0.5], "versions": [3], "stopped": True}
    turns = [{"prompt": [1, 2], "completion": one}, {"prompt": [1, 2, 7, 3], "completion": one}]
    played = {"seed": 5, "turns": turns, "ending": "completed", "reward": 1.0, "tool_calls": 0}
    (group,) = load_groups(json.dumps([{"id": 1, "seed": 5, "trajectories": [played]}]).encode())
    assert [list(turn.prompt) for turn in group.trajectories[0].turns] == [[1, 2], [1, 2, 7, 3]]


def test_a_refusal_with_half_a_character_does_not_keep_a_checkpoint_from_being_written() -> None:
    refused = replace(episode(chat(1)), refusal=shorten_reason("ValueError: no \ud83d"))
    (group,) = load_groups(dump_groups([Group(id=4, seed=5, trajectories=[refused])]))
    assert group.trajectories[0].refusal == "ValueError: no ?"


def test_what_is_damaged_is_not_guessed() -> None:
    (kept,) = json.loads(dump_groups([group_of(chat(2))]))
    kept["trajectories"][0]["turns"][1]["known"] = 2
    with pytest.raises(ValueError, match="that continues one of 1 tokens, got 2"):
        load_groups(json.dumps([kept]).encode())
