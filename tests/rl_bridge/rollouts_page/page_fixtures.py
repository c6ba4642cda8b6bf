"""A run's folder with rollouts in it, as the page is to show them."""

from collections.abc import Iterable
from pathlib import Path

from rl_bridge.records import Segments, TrajectoryRecord, TurnRecord

SYSTEM = (
    "<|im_start|>system\nYou answer questions about a database.\n\n# Tools\n<tools>\n"
    + "\n".join(f'{{"name": "tool_{n}", "description": "does {n}"}}' for n in range(12))
    + "\n</tools><|im_end|>\n"
)
OPENING = SYSTEM + "<|im_start|>user\nHow many orders are open?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "run_query", "arguments": {"sql": "SELECT 1"}}\n</tool_call><|im_end|>'
RESULT = "\n<|im_start|>user\n<tool_response>\n[[17]]\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def pieces_of(text: str) -> tuple[str, ...]:
    """Cut into pieces of at most four characters, special tokens whole."""
    pieces: list[str] = []
    for part in text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
        if part.startswith("<|"):
            pieces.append(part)
        else:
            pieces.extend(part[at : at + 4] for at in range(0, len(part), 4))
    return tuple(pieces)


def turn(
    context: str,
    answer: str,
    *,
    fresh: bool = False,
    trained: bool = True,
    stopped: bool = True,
    parent: int | None = None,
) -> TurnRecord:
    pieces = pieces_of(answer)
    return TurnRecord(
        fresh=fresh,
        context=context,
        context_tokens=len(context) // 4,
        pieces=pieces,
        tokens=tuple(sum(piece.encode()) for piece in pieces),
        logprobs=(-0.25,) * len(pieces),
        versions=((3, len(pieces)),),
        trained=((trained, len(pieces)),),
        stopped=stopped,
        parent=parent,
    )


def played(
    *turns: TurnRecord,
    group: int = 0,
    sibling: int = 0,
    iteration: int = 1,
    reward: float = 1.0,
    advantage: float | None = 0.5,
    ending: str = "completed",
    tool_calls: int = 0,
) -> TrajectoryRecord:
    return TrajectoryRecord(
        iteration=iteration,
        group=group,
        sibling=sibling,
        seed=group,
        ending=ending,
        reward=reward,
        advantage=advantage,
        version=iteration - 1,
        tool_calls=tool_calls,
        scores={"style": reward / 4},
        turns=turns,
    )


def keep(run: Path, records: Iterable[TrajectoryRecord]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    Segments(run, max_bytes=1 << 30).append([r.model_dump_json().encode() + b"\n" for r in records])
    return run


def conversation() -> list[TrajectoryRecord]:
    """Four siblings: two calls and an answer; a wrong answer; a call that cannot be read; one cut off and masked."""
    good = (
        turn(OPENING, "<think>I look it up.</think>" + CALL, fresh=True),
        turn(RESULT, "There are 17 open orders.<|im_end|>"),
    )
    wrong = (turn(OPENING, "<think>I guess.</think>There are 3.<|im_end|>", fresh=True),)
    unread = (turn(OPENING, '<tool_call>\n{"name": "run_que', fresh=True, stopped=False),)
    anew = (
        turn(OPENING, CALL, fresh=True, trained=False),
        turn(OPENING + "the first state", "16", fresh=True, trained=False, stopped=False),
        turn(OPENING + "the second state", "17 of", fresh=True, trained=False, stopped=False),
    )
    where: dict[str, int] = {"group": 4, "iteration": 5}
    return [
        played(*good, **where, sibling=0, reward=1.0, advantage=1.5, tool_calls=1),
        played(*wrong, **where, sibling=1, reward=0.0, advantage=-0.5),
        played(*unread, **where, sibling=2, reward=-1.0, advantage=-1.0, ending="unparsable_call"),
        played(
            *anew, **where, sibling=3, reward=0.0, advantage=None, ending="truncated_length", tool_calls=1
        ),
    ]
