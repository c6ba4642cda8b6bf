"""The policy's prompts, and the parser of its answers."""

from collections.abc import Iterator
from typing import Literal

from envs.blackjack_env.oracle import DECISION_STATES
from rl_bridge.tokens.chat import ChatMessage


def prompt(total: int, usable_ace: bool, dealer: int) -> list[ChatMessage]:
    """Return the chat for one decision.

    Each of the three facts is a word without spaces, which is one token for the tiny policy's word-level tokenizer.
    Checkpoints with another tokenizer read the same text.

    Args:
        total: The player's total, 4 to 21.
        usable_ace: Whether an ace counts as 11 in the total.
        dealer: The dealer's card, 1 (an ace) to 10.
    """
    ace = "yes" if usable_ace else "no"
    return [
        {"role": "user", "content": f"blackjack total={total} ace={ace} dealer={dealer} answer hit or stand"}
    ]


def render_prompts() -> Iterator[str]:
    """Yield every text that the policy reads: the prompt of each decision, which contains the answers."""
    return (prompt(*state)[0]["content"] for state in DECISION_STATES)


def parse(text: str) -> Literal["hit", "stand"] | None:
    """Return the action of an answer, the bare word in any case with an optional full stop; None if it is illegal."""
    word = text.strip().removesuffix(".").lower()
    if word == "hit":
        return "hit"
    if word == "stand":
        return "stand"
    return None
