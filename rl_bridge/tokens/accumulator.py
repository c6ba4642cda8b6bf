"""Turns become training rows: tokens in, tokens out, masks by where each token came from.

Nothing is tokenized here. A turn's prompt either continues the row so far to the token (then the row
grows), or it does not, for example because the chat shows only the newest state; then a new row begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_bridge.types import Completion, TrainSample, Trajectory


@dataclass(slots=True)
class _Row:
    version: int
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def continues_to(self, prompt: Sequence[int]) -> bool:
        return len(prompt) >= len(self.tokens) and list(prompt[: len(self.tokens)]) == self.tokens

    def add_context(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.mask.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))

    def add_completion(self, completion: Completion) -> None:
        self.tokens.extend(completion.tokens)
        self.mask.extend([True] * len(completion.tokens))
        self.logprobs.extend(completion.logprobs)
        self.version = min(self.version, completion.version)


def training_rows(trajectory: Trajectory, *, advantage: float, index: int) -> list[TrainSample]:
    """Turn one trajectory into rows whose masks select exactly the tokens that the policy produced.

    Args:
        trajectory: The exchanges; every completion's `tokens` and `logprobs` must be of one length.
        advantage: What the loss multiplies the tokens with.
        index: The trajectory's number in its batch.

    Returns:
        One row per run of turns in which each prompt continues the tokens before it.
    """
    rows: list[_Row] = []
    for turn in trajectory.turns:
        if not rows or not rows[-1].continues_to(turn.prompt):
            rows.append(_Row(version=turn.completion.version))
        rows[-1].add_context(turn.prompt[len(rows[-1].tokens) :])
        rows[-1].add_completion(turn.completion)
    return [
        TrainSample(
            tokens=row.tokens,
            loss_mask=row.mask,
            logprobs=row.logprobs,
            advantage=advantage,
            trajectory=index,
            version=row.version,
        )
        for row in rows
    ]
