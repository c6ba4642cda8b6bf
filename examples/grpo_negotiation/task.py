"""The negotiation as a task for a small chat model: a short prompt with examples, and the parser of its messages."""

from collections.abc import Sequence
from typing import Final

from envs.negotiation_env import NegotiationAction, NegotiationEnv, NegotiationObservation
from envs.negotiation_env.division import worth
from envs.negotiation_env.models import Item
from rl_bridge.rollout import Task
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, Ending

LETTERS: Final[dict[str, Item]] = {"A": "books", "B": "hats", "C": "balls"}
"""What a player says to take all items of a kind."""
ACCEPT: Final = "yes"
SYSTEM: Final = "A, B, C or yes?"
EXAMPLES: Final = (
    ("A 2 B 2 C 6", "C"),
    ("A 1 B 6 C 3 offer 8", ACCEPT),
    ("A 7 B 3 C 0", "A"),
    ("A 2 B 8 C 0", "B"),
)
"""What a player reads, and what it may say, each one token: without them a small model answers in sentences."""


def describe(observation: NegotiationObservation) -> str:
    """Return what all items of each kind are worth to the player, of 10, and what it is offered, if anything."""
    items, values = observation.items, observation.values
    text = " ".join(f"{letter} {items[item] * values[item]}" for letter, item in LETTERS.items())
    return text if observation.offer is None else f"{text} offer {worth(observation.offer, values)}"


def read_message(text: str, observation: NegotiationObservation) -> NegotiationAction | None:
    """Return the action of a message, to take all of one kind or to accept; None if it is not legal here."""
    word = text.strip()
    if word == ACCEPT:
        return None if observation.offer is None else NegotiationAction(message="I accept.", accept=True)
    if (item := LETTERS.get(word)) is None:
        return None
    return NegotiationAction(message=f"I take the {item}.", take={item: observation.items[item]})


class NegotiationTask(Task):
    """A task whose messages are what the player takes, or `yes`. A chat shows the newest observation alone."""

    client_type = NegotiationEnv

    def messages(self, observation: NegotiationObservation) -> list[ChatMessage]:
        """Return the examples and the observation as a chat."""
        chat: list[ChatMessage] = [{"role": "system", "content": SYSTEM}]
        for shown, said in EXAMPLES:
            chat += [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
        return [*chat, {"role": "user", "content": describe(observation)}]

    def parse(self, text: str) -> NegotiationAction | None:
        """Return the action of a message that means the same in every game; a dialogue reads the others, too."""
        return NegotiationAction(message="I accept.", accept=True) if text.strip() == ACCEPT else None

    async def begin(
        self, session: Session, policy: ChatPolicy, observation: NegotiationObservation
    ) -> "NegotiationDialogue":
        """Begin a dialogue that reads messages by the newest observation."""
        return NegotiationDialogue(self, policy, observation)


class NegotiationDialogue:
    """One player's side of a game."""

    tool_calls = 0

    def __init__(
        self, task: NegotiationTask, policy: ChatPolicy, observation: NegotiationObservation
    ) -> None:
        self._task = task
        self._policy = policy
        self._observation = observation

    def prompt(self) -> Sequence[int] | None:
        """Return the tokens of the newest observation's chat."""
        return self._policy.prompt(self._task.messages(self._observation))

    def read(self, completion: Completion, text: str) -> Sequence[NegotiationAction] | Ending:
        """Return the action of a message; an illegal one ends the game."""
        action = read_message(text, self._observation)
        return Ending.ILLEGAL if action is None else (action,)

    def add_observation(self, observation: NegotiationObservation) -> None:
        """Take what the player sees next."""
        self._observation = observation
