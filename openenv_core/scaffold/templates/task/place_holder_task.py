"""Place Holder as a task for a language model."""

from pathlib import Path

from place_holder_env import PlaceHolderAction, PlaceHolderEnv, PlaceHolderObservation

from rl_bridge.rollout import Task
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatMessage

NUMBERS = range(1, 11)


class PlaceHolderTask(Task):
    """The policy guesses numbers until it finds the right one."""

    client_type = PlaceHolderEnv

    def messages(self, observation: PlaceHolderObservation) -> list[ChatMessage]:
        """Return the policy's prompt for an observation."""
        return [ask(observation.lowest, observation.highest)]

    def parse(self, text: str) -> PlaceHolderAction | None:
        """Return the action of an answer; None if it is no action."""
        return PlaceHolderAction(guess=int(text)) if text.strip().isdecimal() else None

    def make_policy(self) -> Path:
        """Make a tiny policy, for runs without `model.path`; its tokenizer knows the words of prompts and answers."""
        texts = [ask(lowest, highest)["content"] for lowest in NUMBERS for highest in NUMBERS]
        return make_tiny_policy(self.folder / "initial_policy", texts, seed=self.config.seed)


def ask(lowest: int, highest: int) -> ChatMessage:
    """Return a prompt's message. Numbers are separate words, since a word is a token of the tiny policy."""
    return {"role": "user", "content": f"Guess a number from {lowest} to {highest}"}
