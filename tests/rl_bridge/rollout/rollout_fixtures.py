"""What the tests of rollouts play with: environments that misbehave on request, and a scripted policy.

Imported by the tests, and by the server that serves its apps.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI

from envs.blackjack_env import BlackjackAction, BlackjackEnv, BlackjackObservation
from envs.blackjack_env.server.app import app as blackjack
from openenv_core import Action, EnvClient, Environment, Observation, State
from rl_bridge.rollout import Task
from rl_bridge.tokens.chat import Message
from rl_bridge.types import Completion, SamplingSettings
from servers import create_app


class Note(Action):
    text: str


class Notes(Observation):
    """Everything said so far: it grows by a word a step."""

    words: list[str]


class Notebook(Environment[Note, Notes, State]):
    """Takes notes until it has `length`, each worth 0.25; fails, waits or ends early where a reset asks for it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    failures_left = 0
    """Of the whole server: steps that shall still raise."""

    def __init__(self) -> None:
        self._words: list[str] = []

    async def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        length: int = 3,
        over_at_once: bool = False,
        broken_seeds: Sequence[int] = (),
        wait_s: float = 0.0,
    ) -> Notes:
        if seed in broken_seeds:
            raise RuntimeError(f"seed {seed} is broken")
        await asyncio.sleep(wait_s)
        self._length = length
        self._words = [f"seed{seed}"]
        return Notes(words=list(self._words), done=over_at_once)

    async def step(self, action: Note) -> Notes:
        if Notebook.failures_left:
            Notebook.failures_left -= 1
            raise RuntimeError("the environment is out of order")
        self._words.append(action.text)
        return Notes(words=list(self._words), reward=0.25, done=len(self._words) > self._length)

    @property
    def state(self) -> State:
        return State(step_count=len(self._words))


class NotebookClient(EnvClient[Note, Notes, State]):
    action_type = Note
    observation_type = Notes
    state_type = State


def with_session_count(app: FastAPI) -> FastAPI:
    """Adds what the tests look at: how many sessions the server holds, and a switch that makes steps fail."""

    @app.get("/active_sessions")
    async def active_sessions() -> int:
        return int(app.state.sessions.active)

    @app.post("/fail/{steps}")
    async def fail(steps: int) -> None:
        Notebook.failures_left = steps

    return app


blackjack_app = with_session_count(blackjack)
notebook_app = with_session_count(
    create_app(Notebook, Note, Notes, env_name="notebook", max_concurrent_envs=64)
)
narrow_app = with_session_count(create_app(Notebook, Note, Notes, env_name="notebook", max_concurrent_envs=2))


class TableTask(Task):
    """BlackJack in three words; no report, no pictures."""

    client_type = BlackjackEnv

    def messages(self, observation: BlackjackObservation) -> list[Message]:
        words = f"{observation.player_total} {observation.usable_ace} {observation.dealer_card}"
        return [{"role": "user", "content": words}]

    def parse(self, text: str) -> BlackjackAction | None:
        if text == "hit":
            return BlackjackAction(action="hit")
        return BlackjackAction(action="stand") if text == "stand" else None


class NotebookTask(Task):
    client_type = NotebookClient

    def messages(self, observation: Notes) -> list[Message]:
        return [{"role": "user", "content": " ".join(observation.words)}]

    def parse(self, text: str) -> Note | None:
        if text == "explode":
            raise ZeroDivisionError("the task is wrong")
        return None if text == "nonsense" else Note(text=text)


class BrokenTask(NotebookTask):
    def parse(self, text: str) -> Note | None:
        raise ZeroDivisionError("the task is wrong")


class FakeTokenizer:
    """A token a word, in the order in which words are met."""

    stop_token_ids = (0,)

    def __init__(self) -> None:
        self._words = ["<end>"]

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.token(word) for message in messages for word in message["content"].split())

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(self._words[token] for token in tokens if token not in self.stop_token_ids)

    def token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)


Script = Callable[[str], str]
"""From a prompt's text to an answer's."""


class FakeEngine:
    """Answers by a script, behind the seam where a generator's endpoint is called."""

    def __init__(self, tokenizer: FakeTokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self.script = script
        self.asked: list[SamplingSettings] = []
        self.seeds: list[int] = []
        self.before: Callable[[], Any] = lambda: None

    async def __call__(
        self,
        prompts: list[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        self.asked.append(sampling)
        self.seeds.extend(seeds or ())
        outcome = self.before()
        if asyncio.iscoroutine(outcome):
            await outcome
        return [self._answer(self.script(self._tokenizer.text(prompt))) for prompt in prompts]

    def _answer(self, text: str) -> Completion:
        tokens = [self._tokenizer.token(word) for word in text.split()]
        return Completion(
            tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[3] * len(tokens), stopped=False
        )


def stand_on_17(prompt: str) -> str:
    return "hit" if int(prompt.split()[0]) < 17 else "stand"
