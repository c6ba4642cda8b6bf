"""A policy that solves questions about databases in its own call format, whatever agent it is asked by."""

import asyncio
import json
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rollout_fixtures import FakeEngine
from tool_fixtures import END, MARKS, START, TEMPLATE, PieceTokenizer, calling

from envs.sqlite_env import SqliteEnv
from envs.sqlite_env.models import SqliteObservation
from examples.grpo_tools.solver import parse_question, solve
from rl_bridge.rollout import ToolTask
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion

FIRST_MARK = 0x110000
"""Above all characters."""


class CharacterTokenizer(PieceTokenizer):
    """What `ChatTokenizer` asks of one of transformers': a token a character, and marks. It takes any text."""

    def __init__(self) -> None:
        super().__init__(TEMPLATE)
        marks = [START, END, *MARKS]
        self.numbers = {mark: FIRST_MARK + index for index, mark in enumerate(marks)}
        self.marks = {number: mark for mark, number in self.numbers.items()}
        self.eos_token_id = self.numbers[END]
        self.added_tokens_decoder = {
            number: SimpleNamespace(content=mark, special=mark not in MARKS)
            for mark, number in self.numbers.items()
        }
        self._special = {self.numbers[START], self.numbers[END]}
        self._split = re.compile("(" + "|".join(map(re.escape, marks)) + ")")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = []
        for part in self._split.split(text):
            tokens += [self.numbers[part]] if part in self.numbers else map(ord, part)
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        left_out = self._special if skip_special_tokens else ()
        return "".join([self.marks.get(one) or chr(one) for one in tokens if one not in left_out])

    def spell(self, text: str, source: random.Random) -> list[int]:
        return self.encode(text, add_special_tokens=False)


class QuestionTask(ToolTask):
    """Shows the question alone."""

    client_type = SqliteEnv

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        return [{"role": "user", "content": observation.question}]


class SolvingEngine(FakeEngine):
    """Answers prompts that offer the environment's tools with the solver's calls, and others with a few words."""

    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        super().__init__(tokenizer, str)
        self.sampled: list[Completion] = []
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._solver: asyncio.Task[None] | None = None

    async def generate_many(self, prompts: list[Sequence[int]], *arguments: Any) -> list[Completion]:
        completions = []
        for prompt in prompts:
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            self.asked.append(text)
            offered = find_tools(text) if "Call by" in text else []
            solves = "bash" in offered or any("list_tables" in name for name in offered)
            said = await self._say(text) if solves else "A few words."
            completions.append(self.complete(said))
        return completions

    def complete(self, said: str) -> Completion:
        """Return what it says as sampled tokens, and record them."""
        tokens = self.tokenizer.encode(said + END, add_special_tokens=False)
        count = len(tokens)
        completion = Completion(tokens=tokens, logprobs=[-0.5] * count, versions=[3] * count, stopped=True)
        self.sampled.append(completion)
        return completion

    async def _say(self, prompt: str) -> str:
        if "<tool_response>" not in prompt:
            if self._solver is not None:
                self._solver.cancel()  # it still waits for the result of the last episode's last call
            self._solver = asyncio.ensure_future(self._solve(prompt))
        else:
            self._asked.put_nowait(prompt)
        assert self._solver is not None
        said = asyncio.ensure_future(self._said.get())
        await asyncio.wait({said, self._solver}, return_when=asyncio.FIRST_COMPLETED)
        if not said.done():
            said.cancel()
            self._solver.result()
            return "That was the answer."
        return said.result()

    async def _solve(self, prompt: str) -> None:
        names = find_tools(prompt)

        async def call(name: str, arguments: Mapping[str, Any]) -> Any:
            if "bash" in names:
                command = f"python3 tools.py {name} {shlex.quote(json.dumps(arguments))}"
                written = calling("bash", command=command)
            else:
                (full,) = [one for one in names if one.endswith(name)]
                written = calling(full, **arguments)
            self._said.put_nowait(f"I call {name}.\n{written}")
            response = (
                (await self._asked.get())
                .rpartition("<tool_response>\n")[2]
                .partition("\n</tool_response>")[0]
            )
            return parse_result(response)

        await solve(SimpleNamespace(question=find_question(prompt)), call)  # type: ignore[arg-type]


def find_tools(prompt: str) -> list[str]:
    listed = re.search(r"Call by <tool_call>\{\.\.\.\}</tool_call>:(.*?)<\|end\|>", prompt, re.DOTALL)
    assert listed is not None, prompt[:500]
    return listed[1].split()


def find_question(prompt: str) -> str:
    for part in re.split(r'\n|<\|end\|>|: |", "', prompt):  # of a text, or of JSON
        line = part.strip().strip('"}')
        try:
            parse_question(line)
        except ValueError:
            continue
        return line
    raise AssertionError(f"no question in {prompt[-2000:]}")


def parse_result(text: str) -> Any:
    """Return the JSON of a tool's result, around which agents may write more."""
    for match in re.finditer(r"[\[{]", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[match.start() :])
        except ValueError:
            continue
        if (
            isinstance(value, list)
            and value
            and isinstance(value[0], dict)
            and value[0].get("type") == "text"
        ):
            return parse_result(value[0]["text"])
        return parse_result(value["output"]) if isinstance(value, dict) and "output" in value else value
    return text
