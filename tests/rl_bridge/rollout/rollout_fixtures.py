"""Environments that misbehave on request and a scripted policy, for tests of rollouts.

Imported by the tests, and by the server that serves its apps.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

from openenv_core import Action, EnvClient, Environment, Observation, State
from rl_bridge.rollout import Task
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, SamplingSettings
from servers import create_app


class Note(Action):
    text: str


EARNED = 0.25
LENGTH = 3
GONE: dict[str, Any] = {"status": "sandbox_error", "reason": "the zygote is gone"}
"""One of the ways in which an observation says that the infrastructure failed."""


class Notes(Observation):
    """Everything said so far: it grows by a word a step."""

    words: list[str]
    status: str = "ok"
    reason: str | None = None


class Notebook(Environment[Note, Notes, State]):
    """Takes notes until it has `length`, each worth 0.25; what goes wrong is asked for with the reset.

    Steps raise at random (`flaky` is how often). Episodes of some seeds fail `times` times: after `at` steps their
    observation `says` so. The end of others has no reward, `because` of something.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True
    chance = Random(7)
    failed: ClassVar[Counter[tuple[str, int | None]]] = Counter()
    """Of the whole server: how often a test's seed has failed already."""

    def __init__(self) -> None:
        self._words: list[str] = []

    async def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        length: int = LENGTH,
        patience: int = 99,
        wait_s: float = 0.0,
        test: str = "",
        says: dict[str, Any] = GONE,
        at: int = 2,
        failing: Sequence[int] = (),
        times: int = 1,
        flaky: float = 0.0,
        unjudged: Sequence[int] = (),
        because: str | bool | None = "the judge took too long",
    ) -> Notes:
        await asyncio.sleep(wait_s)
        self._length, self._patience = length, patience
        self._words = [f"seed{seed}"]
        self._key = (test, seed)
        self._says, self._at = says, at
        self._fails = seed in failing and Notebook.failed[self._key] < times
        self._flaky = flaky
        self._unjudged, self._because = seed in unjudged, because
        return self._notes(None)

    async def step(self, action: Note) -> Notes:
        if Notebook.chance.random() < self._flaky:
            raise RuntimeError("the environment fails at random")
        self._words.append(action.text)
        return self._notes(EARNED)

    @property
    def state(self) -> State:
        return State(step_count=len(self._words))

    def _notes(self, reward: float | None) -> Notes:
        words, steps = list(self._words), len(self._words) - 1
        over = steps >= self._length
        if self._fails and steps == self._at:
            Notebook.failed[self._key] += 1
            # The worst that it could say: a reward that would be learnt from, and an end that would be believed.
            return Notes(words=words, reward=-100.0, done=over, **self._says)
        if over and self._unjudged:
            metadata = {} if self._because is None else {"unscored": self._because}
            return Notes(words=words, done=True, metadata=metadata)
        cut_off = not over and steps >= self._patience
        return Notes(words=words, reward=reward, done=over or cut_off, truncated=cut_off)


class NotebookClient(EnvClient[Note, Notes, State]):
    action_type = Note
    observation_type = Notes
    state_type = State


notebook_app = create_app(Notebook, Note, Notes, env_name="notebook", max_concurrent_envs=64)


@notebook_app.get("/active_sessions")
async def active_sessions() -> int:
    return int(notebook_app.state.sessions.active)


class NotebookTask(Task):
    client_type = NotebookClient

    def messages(self, observation: Notes) -> list[ChatMessage]:
        return [{"role": "user", "content": " ".join(observation.words)}]

    def parse(self, text: str) -> Note | None:
        if text == "explode":
            raise ZeroDivisionError("the task is wrong")
        return None if text == "nonsense" else Note(text=text)


class FakeTokenizer:
    """A token a word, in the order in which words are met."""

    stop_token_ids = (0,)

    def __init__(self) -> None:
        self._words = ["<end>"]

    def prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return tuple(self.token(word) for message in messages for word in message["content"].split())

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(self._words[token] for token in tokens if token not in self.stop_token_ids)

    def token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)


CUT = "…"

Script = Callable[[str], str]
"""From a prompt's text to an answer's."""


class FakeEngine:
    """Answers by a script, behind the seam where a generator's endpoint is called."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.asked: list[str] = []
        self.settings: list[SamplingSettings] = []
        self.seeds: list[int] = []
        self.before: Callable[[], Any] = lambda: None

    async def generate_many(
        self, prompts: list[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None, _: object
    ) -> list[Completion]:
        self.settings.append(sampling)
        self.seeds.extend(seeds or ())
        outcome = self.before()
        if asyncio.iscoroutine(outcome):
            await outcome
        return [self._answer(self._read(prompt)) for prompt in prompts]

    def _answer(self, prompt: str) -> Completion:
        self.asked.append(prompt)
        tokens, stopped = self._write(self.script(prompt))
        return Completion(
            tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[3] * len(tokens), stopped=stopped
        )

    def _read(self, prompt: Sequence[int]) -> str:
        return str(self.tokenizer.text(prompt))

    def _write(self, answer: str) -> tuple[list[int], bool]:
        """The tokens of an answer, and whether it ended by itself; one that ends with CUT was cut there."""
        words = answer.removesuffix(CUT).split()
        return [self.tokenizer.token(word) for word in words], not answer.endswith(CUT)


def word(prompt: str) -> str:
    return "word"
