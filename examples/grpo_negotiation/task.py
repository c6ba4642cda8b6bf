"""The negotiation as a task for a small chat model: a short prompt with examples, and the parser of its messages."""

from collections.abc import Sequence
from typing import Final

from envs.negotiation_env import NegotiationAction, NegotiationEnv, NegotiationObservation
from envs.negotiation_env.models import ITEMS
from rl_bridge.rollout import Task
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, Ending

SYSTEM: Final = "Take some, or accept."
EXAMPLES: Final = (
    ("2 books 1 hats 3 balls", "2 0 1"),
    ("1 books 3 hats 2 balls; offered 0 books 2 hats 2 balls", "accept"),
    ("3 books 2 hats 1 balls", "0 2 1"),
    ("4 books 1 hats 1 balls; offered 3 books 0 hats 1 balls", "accept"),
)
"""What a player reads, and what it may say: without them a small model answers in sentences."""
ACCEPT: Final = "accept"


def describe(observation: NegotiationObservation) -> str:
    """Return what there is, and what the player is offered."""
    text = " ".join(f"{observation.items[item]} {item}" for item in ITEMS)
    if observation.offer is None:
        return text
    return f"{text}; offered {' '.join(f'{observation.offer[item]} {item}' for item in ITEMS)}"


def read_message(text: str, observation: NegotiationObservation) -> NegotiationAction | None:
    """Return the action of a message: `accept`, or three numbers to take; None if it is not legal here."""
    words = text.strip().removesuffix(".").lower().split()
    if words == [ACCEPT]:
        return None if observation.offer is None else NegotiationAction(message=ACCEPT, accept=True)
    if len(words) != len(ITEMS) or not all(word.isdecimal() and len(word) == 1 for word in words):
        return None
    take = dict(zip(ITEMS, map(int, words), strict=True))
    if any(count > observation.items[item] for item, count in take.items()):
        return None
    return NegotiationAction(message=" ".join(words), take=take)


class NegotiationTask(Task):
    """A task whose messages are `accept` or what the player takes. A chat shows the newest observation alone."""

    client_type = NegotiationEnv

    def messages(self, observation: NegotiationObservation) -> list[ChatMessage]:
        """Return the examples and the observation as a chat."""
        chat: list[ChatMessage] = [{"role": "system", "content": SYSTEM}]
        for shown, said in EXAMPLES:
            chat += [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
        return [*chat, {"role": "user", "content": describe(observation)}]

    def parse(self, text: str) -> NegotiationAction | None:
        """Never called: what is legal depends on the observation."""
        raise NotImplementedError

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
