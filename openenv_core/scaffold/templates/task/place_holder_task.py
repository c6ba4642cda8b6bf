"""Place Holder as a language model sees it."""

from pathlib import Path

from place_holder_env import PlaceHolderAction, PlaceHolderEnv, PlaceHolderObservation

from rl_bridge.rollout import Task
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatMessage

NUMBERS = range(1, 11)


class PlaceHolderTask(Task):
    """A number is asked for until it is found."""

    client_type = PlaceHolderEnv

    def messages(self, observation: PlaceHolderObservation) -> list[ChatMessage]:
        """What the policy reads before each answer."""
        return [ask(observation.lowest, observation.highest)]

    def parse(self, text: str) -> PlaceHolderAction | None:
        """What an answer means; None where it means nothing."""
        return PlaceHolderAction(guess=int(text)) if text.strip().isdecimal() else None

    def make_policy(self) -> Path:
        """A tiny one, for runs without `model.path`; it knows the words that are asked and answered."""
        texts = [ask(lowest, highest)["content"] for lowest in NUMBERS for highest in NUMBERS]
        return make_tiny_policy(self.folder / "initial_policy", texts, seed=self.config.seed)


def ask(lowest: int, highest: int) -> ChatMessage:
    """One chat message. A tiny policy reads word by word, so numbers stand alone."""
    return {"role": "user", "content": f"Guess a number from {lowest} to {highest}"}
