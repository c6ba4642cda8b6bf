"""The prompts of the tiny policy and of chat models, and the parser of their answers."""

from collections.abc import Iterator
from typing import Final, Literal

from envs.blackjack_env.oracle import DECISION_STATES, DecisionState
from rl_bridge.tokens.chat import ChatMessage

SYSTEM: Final = "Blackjack. Low total: hit. High total: stand. Say hit or stand."
EXAMPLES: Final[tuple[tuple[DecisionState, Literal["hit", "stand"]], ...]] = (
    (DecisionState(8, False, 10), "hit"),
    (DecisionState(19, False, 10), "stand"),
    (DecisionState(7, False, 3), "hit"),
    (DecisionState(18, False, 10), "stand"),
    (DecisionState(21, False, 3), "stand"),
    (DecisionState(15, True, 1), "hit"),
    (DecisionState(19, False, 5), "stand"),
    (DecisionState(7, False, 6), "hit"),
    (DecisionState(6, False, 1), "hit"),
    (DecisionState(15, False, 6), "stand"),
)
"""Decisions that a chat model is shown with their answers: without them a small one answers in sentences."""


def prompt(total: int, usable_ace: bool, dealer: int) -> list[ChatMessage]:
    """Return the chat for one decision of the tiny policy.

    Each of the three facts is a word without spaces, which is one token for its word-level tokenizer.

    Args:
        total: The player's total, 4 to 21.
        usable_ace: Whether an ace counts as 11 in the total.
        dealer: The dealer's card, 1 (an ace) to 10.
    """
    ace = "yes" if usable_ace else "no"
    return [
        {"role": "user", "content": f"blackjack total={total} ace={ace} dealer={dealer} answer hit or stand"}
    ]


def describe(total: int, usable_ace: bool, dealer: int) -> str:
    """Return a decision in the words of a chat model's prompt, such as `soft 17 against an ace`."""
    return f"{'soft ' if usable_ace else ''}{total} against {'an ace' if dealer == 1 else dealer}"


def prompt_with_examples(total: int, usable_ace: bool, dealer: int) -> list[ChatMessage]:
    """Return the chat for one decision, for checkpoints that were trained to chat; arguments as of `prompt`."""
    messages: list[ChatMessage] = [{"role": "system", "content": SYSTEM}]
    for state, answer in EXAMPLES:
        messages.append({"role": "user", "content": describe(*state)})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": describe(total, usable_ace, dealer)}]


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
