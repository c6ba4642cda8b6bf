"""A chat that grows by answers and by what they were told: tokens in, tokens out."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.tokens.chat import ChatTokenizer, Message
from rl_bridge.tokens.prefix import Prefix


class Conversation:
    """The tokens of a chat, each tokenised once.

    The prompt behind an answer is the prompt before it, the tokens that were sampled, and the freshly tokenised rest:
    what the template writes after an answer, the new messages, the opening of the next answer. So every prompt begins
    with all that came before, to the token, whatever the policy has sampled.

    Args:
        tokenizer: Of the policy's checkpoint.
        messages: What it begins with.
        functions: The tools that the policy is told of, as chat templates take them.

    Raises:
        rl_bridge.errors.ModelError: The chat template does not do for it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        functions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._functions = functions
        self._tokens = list(tokenizer.opening(messages, functions))

    @property
    def prompt(self) -> Prefix:
        """What the next answer is to be sampled after. It stays as it is while the chat grows."""
        return Prefix(self._tokens)

    def go_on(self, answer: Sequence[int], messages: Sequence[Message]) -> None:
        """Take an answer, as it was sampled, and what was said to it.

        Args:
            answer: Its tokens, up to and with the one that ended it.
            messages: At least one.
        """
        self._tokens += [*answer, *self._tokenizer.continuation(messages, self._functions)]
