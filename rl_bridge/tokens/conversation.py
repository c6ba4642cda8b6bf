"""Growing a chat token by token, and turning it into training rows with a mask of the policy's own tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, SupportsIndex, overload

from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.types import NO_VERSION, PolicyVersion, TrainSample, Trajectory, Turn


class Prefix(Sequence[int]):
    """The first tokens of a list whose owner only appends to it.

    The prompts of an episode share one list in memory, and are pickled together as one: a sixteenth of the size for 32
    turns that fill a context of 4096 tokens.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return self._tokens[start:stop]
            return [self._tokens[position] for position in range(start, stop, step)]
        return self._tokens[range(self._length)[index]]

    def continues(self, prefix: Sequence[int]) -> bool:
        """Whether this sequence is known to begin with `prefix`, as they share a list. Compares no tokens."""
        return (
            isinstance(prefix, Prefix) and prefix._tokens is self._tokens and prefix._length <= self._length
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __repr__(self) -> str:
        return f"Prefix({list(self)})"


class Conversation:
    """The tokens of a chat, each tokenised once.

    The prompt after an answer is the previous prompt, the sampled tokens, and the newly tokenised rest: what the
    template writes after an answer, the new messages, the opening of the next answer. So every prompt begins with
    exactly the tokens before it, whatever the policy has sampled.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[ChatMessage],
        functions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.functions = functions
        self._tokens = list(tokenizer.render_opening(messages, functions))

    @property
    def prompt(self) -> Prefix:
        """The prompt of the next answer. It does not change while the chat grows."""
        return Prefix(self._tokens)

    def append_turn(
        self, answer: Sequence[int], messages: Sequence[ChatMessage], *, stopped: bool = True
    ) -> None:
        """Append an answer's tokens, including the one that ended it, and the messages that follow it.

        An answer that was cut, not `stopped`, lacks the token that ends it: that is added, as a part of the prompt.
        """
        end = () if stopped else self._tokenizer.stop_token_ids[:1]
        self._tokens += [*answer, *end, *self._tokenizer.continuation(messages, self.functions)]


@dataclass(slots=True)
class Row:
    """The tokens of turns in which each prompt continues the tokens before it.

    Attributes:
        tokens: Token ids, shape [L].
        logprobs: Behaviour log-probabilities, 0 for a prompt's tokens, shape [L].
        versions: The weights that sampled each token, `NO_VERSION` for a prompt's tokens, shape [L].
        answers: The bounds of each turn's answer in `tokens`.
        prompt: The last turn's prompt, which the row begins with.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    prompt: Sequence[int] = ()

    def continues_to(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with this row's tokens."""
        # A known prefix is not compared again: otherwise the cost would be quadratic in the number of turns.
        known = len(self.prompt) if isinstance(prompt, Prefix) and prompt.continues(self.prompt) else 0
        end = len(self.tokens)
        return len(prompt) >= end and list(prompt[known:end]) == self.tokens[known:]

    def append(self, turn: Turn) -> None:
        """Append the rest of a turn's prompt, which the row continues to, and its answer."""
        rest, answer = turn.prompt[len(self.tokens) :], turn.completion
        self.prompt = turn.prompt
        self.tokens.extend(rest)
        self.logprobs.extend([0.0] * len(rest))
        self.versions.extend([NO_VERSION] * len(rest))
        self.answers.append((len(self.tokens), len(self.tokens) + len(answer.tokens)))
        self.tokens.extend(answer.tokens)
        self.logprobs.extend(answer.logprobs)
        self.versions.extend(answer.versions)


def join_turns(turns: Sequence[Turn]) -> list[Row]:
    """Join turns into rows: one for each run of turns in which each prompt continues the tokens before it."""
    rows: list[Row] = []
    for turn in turns:
        if not rows or not rows[-1].continues_to(turn.prompt):
            rows.append(Row())
        rows[-1].append(turn)
    return rows


def training_rows(trajectory: Trajectory, *, advantage: float, index: int) -> list[TrainSample]:
    """Turn one trajectory into rows whose masks select exactly the tokens that the policy produced.

    Args:
        trajectory: The trajectory, with its turns.
        advantage: Its advantage, copied to every row of `join_turns`.
        index: Its index in the batch, copied to every row.
    """
    samples = []
    for row in join_turns(trajectory.turns):
        mask = [False] * len(row.tokens)
        for begin, end in row.answers:
            mask[begin:end] = [True] * (end - begin)
        samples.append(
            TrainSample(
                tokens=row.tokens,
                loss_mask=mask,
                logprobs=row.logprobs,
                versions=row.versions,
                advantage=advantage,
                trajectory=index,
            )
        )
    return samples
