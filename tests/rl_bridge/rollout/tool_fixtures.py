"""For tests of episodes with tools: a world of tools, a tokenizer of pieces, an engine that spells at random.

Imported by the tests, and by the server that serves its app.
"""

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from jinja2 import Environment as Jinja
from rollout_fixtures import FakeEngine, Script

from openenv_core import MCPToolClient, Observation, State
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
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import TrainSample, Trajectory
from servers import create_app

TaskT = TypeVar("TaskT", bound=Task)

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


class DeskStart(Observation):
    task: str


class Desk(ToolEnvironment[State]):
    """Adds numbers; earns 0.25 by a sum, 1 by the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    BLOCKING = False

    def __init__(self) -> None:
        self._calls = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, words: int = 3) -> DeskStart:
        self._calls = 0
        return DeskStart(task=f"{TOLD}task {seed} " + "and so on " * words)

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


desk_app = create_app(
    Desk,
    ToolAction,
    ToolObservation,
    env_name="desk",
    max_concurrent_envs=64,
    reset_observation_cls=DeskStart,
)


class DeskTask(ToolTask):
    client_type = MCPToolClient


class AnsweringDeskTask(DeskTask):
    """An answer that begins with a number and calls nothing ends the episode too."""

    def parse(self, text: str) -> Any | None:
        return CallToolAction(tool_name="finish") if text[:1].isdigit() else None


class LoggingEngine(FakeEngine):
    """Answers by a script, spelled at random; an answer that ends with BREAK is cut off there."""

    def __init__(self, pieces: PieceTokenizer, script: Script) -> None:
        super().__init__(pieces, script)
        self._random = random.Random(0)

    def _read(self, prompt: Sequence[int]) -> str:
        return str(self.tokenizer.decode(prompt, skip_special_tokens=False))

    def _write(self, answer: str) -> tuple[list[int], bool]:
        tokens = self.tokenizer.spell(answer.removesuffix(BREAK), self._random)
        stopped = not answer.endswith(BREAK)
        return tokens + [self.tokenizer.eos_token_id] * stopped, stopped


def task_of(kind: Callable[[Config, Path], TaskT]) -> TaskT:
    return kind(Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}}), Path())


def rows_of(trajectories: Sequence[Trajectory]) -> list[TrainSample]:
    return [
        row
        for index, trajectory in enumerate(trajectories)
        for row in training_rows(trajectory, advantage=1.0, index=index)
    ]
