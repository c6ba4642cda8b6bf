"""Turns become training rows: tokens in, tokens out, masks by where each token came from.

Nothing is tokenized here. A turn's prompt either continues the row so far to the token (then the row
grows), or it does not, for example because the chat shows only the newest state; then a new row begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_bridge.tokens.prefix import Prefix
from rl_bridge.types import NO_VERSION, Completion, PolicyVersion, TrainSample, Trajectory


@dataclass(slots=True)
class _Row:
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    prompt: Sequence[int] = ()
    """The last one, with which the row begins."""

    def continues_to(self, prompt: Sequence[int]) -> bool:
        # What is known is not compared again: else an episode's cost would grow with the square of its turns.
        known = len(self.prompt) if isinstance(prompt, Prefix) and prompt.continues(self.prompt) else 0
        end = len(self.tokens)
        return len(prompt) >= end and list(prompt[known:end]) == self.tokens[known:]

    def add_prompt(self, prompt: Sequence[int]) -> None:
        tokens = prompt[len(self.tokens) :]
        self.prompt = prompt
        self.tokens.extend(tokens)
        self.mask.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([NO_VERSION] * len(tokens))

    def add_completion(self, completion: Completion) -> None:
        self.tokens.extend(completion.tokens)
        self.mask.extend([True] * len(completion.tokens))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.versions)


def training_rows(trajectory: Trajectory, *, advantage: float, index: int) -> list[TrainSample]:
    """Turn one trajectory into rows whose masks select exactly the tokens that the policy produced.

    Args:
        trajectory: The exchanges.
        advantage: What the loss multiplies the tokens with.
        index: The trajectory's number in its batch.

    Returns:
        One row per run of turns in which each prompt continues the tokens before it.
    """
    rows: list[_Row] = []
    for turn in trajectory.turns:
        if not rows or not rows[-1].continues_to(turn.prompt):
            rows.append(_Row())
        rows[-1].add_prompt(turn.prompt)
        rows[-1].add_completion(turn.completion)
    return [
        TrainSample(
            tokens=row.tokens,
            loss_mask=row.mask,
            logprobs=row.logprobs,
            versions=row.versions,
            advantage=advantage,
            trajectory=index,
        )
        for row in rows
    ]
