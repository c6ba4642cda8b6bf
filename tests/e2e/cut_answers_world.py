"""A world of one word, and the task of saying it; for test_cut_answers.py. The run's processes import it by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from openenv_core import Action, EnvClient, Environment, Observation, State
from rl_bridge.rollout import Task
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending, Trajectory
from servers import create_app

WORDS = ("left", "right")
ILLEGAL_ANSWER = -1.0


class Said(Action):
    word: str


class Shown(Observation):
    word: str


class OneWord(Environment[Said, Shown, State]):
    """Shows a word; to say it earns 1, to say the other one nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._word = WORDS[0]

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Shown:
        self._word = WORDS[(seed or 0) % len(WORDS)]
        return Shown(word=self._word)

    def step(self, action: Said) -> Shown:
        return Shown(word=self._word, reward=float(action.word == self._word), done=True)

    @property
    def state(self) -> State:
        return State()


app = create_app(OneWord, Said, Shown, env_name="one_word", max_concurrent_envs=256)


class OneWordClient(EnvClient[Said, Shown, State]):
    action_type = Said
    observation_type = Shown
    state_type = State


class OneWordTask(Task):
    client_type = OneWordClient

    def messages(self, observation: Shown) -> list[ChatMessage]:
        return [{"role": "user", "content": observation.word}]

    def parse(self, text: str) -> Said | None:
        """An answer is one word. More of them, as of a policy that never stops, mean nothing."""
        return Said(word=text) if text in WORDS else None

    def make_policy(self) -> Path:
        return make_tiny_policy(self.folder / "initial_policy", WORDS, seed=self.config.seed)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the shares of answers that were cut, also of those that meant nothing, and what nothing earned."""
        nothing = [one for one in trajectories if one.ending != Ending.COMPLETED]
        cut = [not one.summarize().stopped for one in trajectories]
        cut_for_nothing = [not one.summarize().stopped for one in nothing]
        return {
            "world/cut": sum(cut) / len(trajectories),
            "world/cut_for_nothing": sum(cut_for_nothing) / len(trajectories),
            "world/most_for_nothing": max((one.reward for one in nothing), default=ILLEGAL_ANSWER),
        }
