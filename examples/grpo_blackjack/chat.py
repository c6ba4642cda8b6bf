"""What the policy reads, and what its answer means."""

from collections.abc import Iterator
from typing import Literal

from envs.blackjack_env.oracle import DECISION_STATES
from rl_bridge.tokens.chat import ChatMessage


def prompt(total: int, usable_ace: bool, dealer: int) -> list[ChatMessage]:
    """The chat for one decision.

    Each of the three facts is one word without spaces, so that a tokenizer by words makes one token of each;
    a checkpoint with a tokenizer of its own reads the same text.

    Args:
        total: The player's, 4 to 21.
        usable_ace: Whether an ace counts as 11 in it.
        dealer: The dealer's card, 1 (an ace) to 10.
    """
    ace = "yes" if usable_ace else "no"
    return [
        {"role": "user", "content": f"blackjack total={total} ace={ace} dealer={dealer} answer hit or stand"}
    ]


def render_prompts() -> Iterator[str]:
    """All that is ever read: the prompt of every decision, which has the answers in it."""
    return (prompt(*state)[0]["content"] for state in DECISION_STATES)


def parse(text: str) -> Literal["hit", "stand"] | None:
    """The action an answer means: the bare word, in any case, a full stop allowed. Anything else is illegal."""
    word = text.strip().removesuffix(".").lower()
    if word == "hit":
        return "hit"
    if word == "stand":
        return "stand"
    return None
