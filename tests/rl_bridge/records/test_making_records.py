"""Trajectories and the rows made of them, as records."""

import random

from rl_bridge.records import LeftOut, TokenDecoder, TrajectoryRecord, make_group_records, shorten_text
from rl_bridge.tokens.arrays import TrajectoryTokens
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn
from tests.rl_bridge.records.records_fixtures import decode, trajectory, turn


def spread(values: tuple[tuple[int, int], ...]) -> list[int]:
    return [value for value, number in values for _ in range(number)]


def record(one: Trajectory, advantage: float | None) -> TrajectoryRecord:
    group, tokens = Group(id=4, seed=7, trajectories=[one]), TrajectoryTokens.of(one.turns)
    (made,) = make_group_records(group, [tokens], [advantage], iteration=9, text=TokenDecoder(decode))
    return made


def test_conversation_that_goes_on_and_one_that_begins_anew() -> None:
    one = trajectory(
        turn("ask", "call"),
        turn("askcallresult", "go"),
        turn("state 2", "stay"),
        reward=0.25,
        ending=Ending.TRUNCATED_TURNS,
    )
    one.scores = {"legal": 0.75}
    made = record(one, 1.5)
    assert made.scores == {"legal": 0.75}
    assert (made.iteration, made.group, made.sibling, made.seed) == (9, 4, 0, 7)
    assert (made.ending, made.reward, made.advantage, made.version) == ("truncated_turns", 0.25, 1.5, 3)
    assert [(t.fresh, t.context, t.context_tokens, "".join(t.pieces)) for t in made.turns] == [
        (True, "ask", 3, "call"),
        (False, "result", 6, "go"),
        (True, "state 2", 7, "stay"),
    ]
    assert [t.trained for t in made.turns] == [((True, 4),), ((True, 2),), ((True, 4),)]
    assert [t.parent for t in made.turns] == [None, 0, None]
    assert made.turns[1].tokens == (103, 111)


def test_turn_continues_the_longest_turn_that_its_prompt_begins_with() -> None:
    made = record(
        trajectory(
            turn("ask", "call"),
            turn("askcallresult", "go"),
            turn("title", "a"),
            turn("askcallother", "b"),
            turn("askcallotherbthen", "c"),
            turn("askcaller", "d"),
        ),
        1.0,
    )
    assert [t.parent for t in made.turns] == [None, 0, None, 0, 3, 0]
    assert [t.fresh for t in made.turns] == [True, False, True, True, False, True]


def test_random_episodes_show_what_the_trainer_gets() -> None:
    draw = random.Random(5)
    for _ in range(200):
        turns: list[Turn] = []
        chat: list[int] = []
        for _ in range(draw.randint(1, 8)):
            if draw.random() < 0.3:
                chat = []  # the prefix breaks
            chat = [*chat, *draw.choices(range(97, 123), k=draw.randint(1, 6))]
            number = draw.randint(0, 5)
            answer = Completion(
                tokens=draw.choices(range(97, 123), k=number),
                logprobs=[-draw.random() for _ in range(number)],
                versions=sorted(draw.choices(range(4), k=number)),
                stopped=True,
            )
            turns.append(Turn(prompt=tuple(chat), completion=answer))
            chat = [*chat, *answer.tokens]
        one = trajectory(*turns)
        rows = training_rows(one, advantage=1.0, index=0)
        made = record(one, 1.0)
        assert not any(trained for turn in record(one, None).turns for trained in spread(turn.trained))
        shown = [
            (token, round(logprob, 4), version)
            for part in made.turns
            for token, logprob, version, trained in zip(
                part.tokens, part.logprobs, spread(part.versions), spread(part.trained), strict=True
            )
            if trained
        ]
        assert shown == [
            (token, round(logprob, 4), version)
            for row in rows
            for token, logprob, version, on in zip(
                row.tokens, row.logprobs, row.versions, row.loss_mask, strict=True
            )
            if on
        ]
        assert sum(turn.fresh for turn in made.turns) == len(rows)
        # Contexts and answers, put together again, are the rows.
        texts: list[str] = []
        for part in made.turns:
            texts[len(texts) - (not part.fresh) :] = [
                ("" if part.fresh else texts[-1]) + part.context + "".join(part.pieces)
            ]
        assert texts == [decode(row.tokens) for row in rows]


def test_long_context_loses_its_middle() -> None:
    assert shorten_text("abcdefghij", 10) == ("abcdefghij", None)
    assert shorten_text("abcdefghijk", 5) == ("abijk", LeftOut(at=2, characters=6))
