"""What the tests of episodes with tools play with: a world of tools, a tokenizer of pieces, an engine with a log.

Imported by the tests, and by the server that serves its app.
"""

import asyncio
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import Environment as Jinja

from openenv_core import Action, Environment, MCPToolClient, Observation, State, StepResult
from openenv_core.tools import (
    CallToolAction,
    ToolAction,
    ToolEnvironment,
    ToolFailedError,
    ToolObservation,
    tool,
)
from rl_bridge.config import Config
from rl_bridge.rollout import Task, ToolTask
from rl_bridge.rollout.assignment import EpisodeSettings
from rl_bridge.rollout.episode import play_episode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, SamplingSettings, TrainSample, Trajectory
from servers import create_app

TOLD = "\u00a7"
"""Everything that the world says has this in it, and nothing that a policy ever writes."""

START, END, BREAK = "<|start|>", "<|end|>", "<|break|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TEMPLATE = (
    "{% if tools %}<|start|>system\n"
    "Call by <tool_call>{...}</tool_call>:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>\n"
    "{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""In the layout of Qwen3's, which groups what several calls gave; of the tools it tells the names alone."""


class PieceTokenizer:
    """What `ChatTokenizer` asks of one of transformers': letters, and pieces of several.

    Most texts can be written in many ways, of which `encode` knows one, the longest pieces first.
    """

    eos_token = END

    def __init__(self, template: str = TEMPLATE) -> None:
        self.chat_template = template
        self._template = Jinja().from_string(template)
        letters = [chr(code) for code in range(32, 127)] + ["\n", TOLD]
        pieces = ["call", "al", '": "', '{"', "am", "name", "ar", "arguments", "to", "ool", "ne", "add", "  "]
        self.pieces = [START, END, BREAK, *MARKS, *letters, *pieces]
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.eos_token_id = self.numbers[END]
        self.added_tokens_decoder = {
            self.numbers[added]: SimpleNamespace(content=added, special=added not in MARKS)
            for added in (START, END, BREAK, *MARKS)
        }
        self._special = {token for token, added in self.added_tokens_decoder.items() if added.special}
        longest = sorted(self.pieces, key=len, reverse=True)
        self._best = re.compile("|".join(map(re.escape, longest)))
        self._by_letter = {letter: [p for p in longest if p[0] == letter] for letter in letters}

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def get_vocab(self) -> dict[str, int]:
        return self.numbers

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **variables: Any) -> str:
        assert not tokenize
        return self._template.render(messages=messages, **variables)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found = self._best.findall(text)
        assert "".join(found) == text
        return [self.numbers[piece] for piece in found]

    def spell(self, text: str, source: random.Random) -> list[int]:
        """The text in pieces that are drawn among those that fit."""
        tokens, place = [], 0
        while place < len(text):
            fitting = [piece for piece in self._by_letter[text[place]] if text.startswith(piece, place)]
            piece = source.choice(fitting)
            tokens.append(self.numbers[piece])
            place += len(piece)
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        left_out = self._special if skip_special_tokens else ()
        return "".join([self.pieces[token] for token in tokens if token not in left_out])


def chat_tokenizer(
    monkeypatch: pytest.MonkeyPatch, pieces: PieceTokenizer | None = None, *, thinking: bool = True
) -> ChatTokenizer:
    """Our own, over pieces instead of transformers'."""
    made = pieces or PieceTokenizer()
    auto = SimpleNamespace(from_pretrained=lambda path, **options: made)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    return ChatTokenizer("pieces", thinking=thinking)


def calling(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said_by(source: random.Random, prompt: str) -> str:
    """Anything that a policy might say, in the midst of an episode."""
    if "<tool_call>" not in prompt[:100]:
        return source.choice(
            ["call me", "a name", "al am ar", "tool", "" if source.random() < 0.1 else "add"]
        )
    call = source.choice(
        [
            calling("add", a=source.randrange(99), b=source.randrange(99)),
            calling("echo", text="call the name" * source.randrange(3)),
            calling("fail"),
            calling("nobody", name="call"),
        ]
    )
    if "0 and so on" in prompt:  # one in ten goes on for as long as it may
        return calling("fail")
    return source.choices(
        [
            call,
            "<think>a name to call</think>" + call,
            call + "\n" + calling("add", a=1, b=1),
            calling("finish"),
            "42 is the name",
            "I do not know",
            "<tool_call>{'name'}</tool_call>",
            call[: source.randrange(1, len(call))] + BREAK,
        ],
        weights=[50, 10, 10, 6, 1, 1, 3, 3],
    )[0]


class Told(Observation):
    task: str


class Desk(ToolEnvironment[State]):
    """Adds numbers; earns 0.25 by a sum, 1 by the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    BLOCKING = False
    FORKABLE = True

    def __init__(self) -> None:
        self._calls = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, words: int = 3) -> Told:
        self._calls = 0
        return Told(task=f"{TOLD}task {seed} " + "and so on " * words)

    @property
    def state(self) -> State:
        return State(step_count=self._calls)

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"{TOLD}{a} and {b} are {a + b}"

    @tool
    def echo(self, text: str) -> dict[str, str]:
        """Say it again."""
        return {f"{TOLD}said": text}

    @tool
    def fail(self) -> str:
        """Fail."""
        raise ToolFailedError(f"{TOLD}no")

    @tool
    async def hang(self, seconds: float) -> str:
        """Take long."""
        await asyncio.sleep(seconds)
        return f"{TOLD}at last"

    @tool
    def finish(self) -> str:
        """End it."""
        return f"{TOLD}the end"

    def after_call(self, name: str, arguments: Mapping[str, Any], result: Any) -> Any:
        self._calls += 1
        earned = {"add": 0.25, "finish": 1.0}.get(name, 0.0) if not result.is_error else 0.0
        return replace(result, reward=earned, done=name == "finish")


class DeskClient(MCPToolClient):
    state_type = State

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        if "task" in payload["observation"]:
            return StepResult(Told.model_validate(payload["observation"]), None, False, None)
        return super()._parse_result(payload)


desk_app = create_app(
    Desk, ToolAction, ToolObservation, env_name="desk", max_concurrent_envs=64, reset_observation_cls=Told
)


class DeskTask(ToolTask):
    client_type = DeskClient


class AnsweringDeskTask(DeskTask):
    """An answer that begins with a number and calls nothing ends the episode too."""

    def parse(self, text: str) -> Any | None:
        return CallToolAction(tool_name="finish") if text[:1].isdigit() else None


@dataclass(frozen=True)
class Sampled:
    """One token, as the engine knows it.

    Attributes:
        prompt: What the answer was sampled after.
        tokens: The answer.
        place: Of this token in it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    place: int
    version: int

    @property
    def token(self) -> int:
        return self.tokens[self.place]


Script = Callable[[str], str]
"""From a prompt's text to an answer's. One that ends with BREAK is cut off there."""


class LoggingEngine:
    """Answers by a script, spelled at random, and keeps what it has sampled: where a generator's endpoint is called."""

    def __init__(self, pieces: PieceTokenizer, script: Script, *, seed: int = 0) -> None:
        self._iterate_json_parts = pieces
        self._random = random.Random(seed)
        self.script = script
        self.version = 0
        self.renewal = 0.0
        """How likely new weights come before a token."""
        self.log: dict[float, Sampled] = {}
        """By log-probability: no two are alike."""
        self.asked: list[str] = []
        self.before: Callable[[], Any] = lambda: None

    async def __call__(
        self, prompts: list[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        self.before()
        return [self._answer(tuple(prompt)) for prompt in prompts]

    def _answer(self, prompt: tuple[int, ...]) -> Completion:
        text = self._iterate_json_parts.decode(prompt, skip_special_tokens=False)
        self.asked.append(text)
        said = self.script(text)
        stopped = not said.endswith(BREAK)
        tokens = self._iterate_json_parts.spell(said.removesuffix(BREAK), self._random)
        if stopped:
            tokens.append(self._iterate_json_parts.eos_token_id)
        logprobs, versions = [], []
        for place in range(len(tokens)):
            self.version += self._random.random() < self.renewal
            logprobs.append(-(len(self.log) + 1) / 2**18)  # of which float32 loses nothing
            versions.append(self.version)
            self.log[logprobs[-1]] = Sampled(prompt, tuple(tokens), place, self.version)
        return Completion(tokens=tokens, logprobs=logprobs, versions=versions, stopped=stopped)


class Direct:
    """A session of an environment in this process."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    async def reset(self, **options: Any) -> StepResult[Any]:
        return self._result(self.environment.reset(**options))

    async def step(self, action: Any, /) -> StepResult[Any]:
        observation = self.environment.step(action)
        return self._result(await observation if asyncio.iscoroutine(observation) else observation)

    @staticmethod
    def _result(observation: Any) -> StepResult[Any]:
        return StepResult(observation, observation.reward, observation.done, observation.metadata)


def task_of(kind: Callable[[Config, Path], Task]) -> Task:
    return kind(Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}}), Path())


class Line(Action):
    text: str


class Recital(Environment[Line, "Lines", State]):
    """Answers each line with another, until there are `length`."""

    def reset(self, *, seed: int, length: int) -> "Lines":
        self._length = length
        self._lines = [f"{TOLD}line {seed}"]
        return Lines(lines=list(self._lines))

    def step(self, action: Line) -> "Lines":
        self._lines += [action.text, f"{TOLD}well"]
        return Lines(lines=list(self._lines), reward=0.5, done=len(self._lines) > 2 * self._length)

    @property
    def state(self) -> State:
        return State()


class Lines(Observation):
    """What both have said, in turn."""

    lines: list[str]


class RecitalTask(Task):
    """Shows the whole chat in every turn, or its end alone: a template spells it anew, and the policy otherwise."""

    whole = True

    def messages(self, observation: Lines) -> list[ChatMessage]:
        roles: Iterable[str] = itertools.cycle(["user", "assistant"])
        chat = [
            ChatMessage(role=role, content=line) for role, line in zip(roles, observation.lines, strict=False)
        ]
        return chat if self.whole else chat[-1:]

    def parse(self, text: str) -> Line | None:
        return Line(text=text) if text else None


class LastLineTask(RecitalTask):
    whole = False


KINDS: tuple[type[Any], ...] = (DeskTask, AnsweringDeskTask, RecitalTask, LastLineTask, DeskTask)


async def play_any_kind(
    seed: int, policy: ChatPolicy, *, words: Sequence[int], temperature: float = 1.0
) -> Trajectory | None:
    """An episode in this process whose seed decides what it is; `words` are lengths of what tasks ask."""
    kind = KINDS[seed % len(KINDS)]
    tools = issubclass(kind, DeskTask)
    number = seed // len(KINDS)
    return await play_episode(
        Direct(Desk() if tools else Recital()),
        policy,
        task_of(kind),
        seed=seed,
        settings=EpisodeSettings(
            temperature=temperature,
            num_turns=(4, 8, 32)[seed % 3],
            illegal_reward=-1.0,
            reset_options={"words": words[number % len(words)]} if tools else {"length": 1 + number % 8},
        ),
    )


def rows_of(trajectories: Sequence[Trajectory]) -> list[TrainSample]:
    return [
        row
        for index, trajectory in enumerate(trajectories)
        for row in training_rows(trajectory, advantage=1.0, index=index)
    ]
