"""A gateway in front of a policy that answers by a script, in pieces of text that it draws."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest
from tool_fixtures import END, PieceTokenizer, calling, chat_tokenizer

from rl_bridge.gateway.app import Gateway, GatewayServer
from rl_bridge.gateway.episode import CallSettings, ToolPort
from rl_bridge.gateway.sampled import SampledEpisode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.arrays import TrajectoryTokens
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, Ending, SamplingSettings, TrainSample, Trajectory

ADD = calling("add", a=1, b=2)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]

Script = Callable[[str], str]


class ScriptedPolicy:
    """Completes prompts by a script; see `rl_bridge.rollout.policy.Generator`.

    Every token has a log-probability of its own, so that rows can be told from one another.
    """

    def __init__(self, pieces: Any, script: Script) -> None:
        self.pieces = pieces
        self.script = script
        self.asked: list[str] = []
        self.sampled: list[Completion] = []
        self.settings: list[SamplingSettings] = []
        self.aborted = 0
        self.before: Callable[[], Any] = lambda: None
        self._random = random.Random(5)

    @contextmanager
    def pin_replica(self, near: object = None) -> Iterator[None]:
        yield None

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        seed: int | None = None,
        session: object = None,
    ) -> Completion:
        text = self.pieces.decode(prompt, skip_special_tokens=False)
        self.asked.append(text)
        self.settings.append(sampling)
        try:
            if asyncio.iscoroutine(waiting := self.before()):
                await waiting
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        answer = self.script(text)
        stopped = not answer.endswith("…")
        tokens = self.pieces.spell(answer.removesuffix("…"), self._random)
        tokens += [self.pieces.eos_token_id] if stopped else []
        completion = Completion(
            tokens=tokens,
            logprobs=[-0.001 * (len(self.sampled) + 1)] * len(tokens),
            versions=[3] * len(tokens),
            stopped=stopped,
        )
        self.sampled.append(completion)
        return completion


class Stage:
    """A served gateway, and the policy behind it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stack: AsyncExitStack,
        script: Script | Sequence[str],
        *,
        pieces: Any = None,
        thinking: bool = True,
        max_length: int = 8000,
        keep_alive_s: float = 10.0,
    ) -> None:
        self.pieces = pieces or PieceTokenizer()
        answers = None if callable(script) else iter(script)
        self.generator = ScriptedPolicy(
            self.pieces,
            script if callable(script) else lambda prompt: next(answers),  # type: ignore[arg-type]
        )
        self.tokenizer = chat_tokenizer(monkeypatch, self.pieces, thinking=thinking)
        self.policy = ChatPolicy(self.tokenizer, self.generator, max_new_tokens=400, max_length=max_length)
        self.gateway = Gateway(keep_alive_s=keep_alive_s)
        self._server = GatewayServer(self.gateway)
        self._stack = stack

    async def serve(self) -> str:
        """Start the server; returns its URL."""
        await self._server.start()
        self._stack.push_async_callback(self._server.close)
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self._server.url, timeout=60)
        )
        return self._server.url

    def open(self, tools: ToolPort | None = None, **settings: Any) -> SampledEpisode:
        episode = SampledEpisode(self.policy, CallSettings(**settings), tools)
        self.gateway.open(episode)
        return episode

    async def post(self, episode: SampledEpisode, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(
            path, json=body, headers={"authorization": f"Bearer {episode.key}", **headers}
        )

    async def chat(self, episode: SampledEpisode, messages: Any, **options: Any) -> Any:
        """Return the message that a chat is answered with."""
        response = await self.post(
            episode, "/v1/chat/completions", {"model": "m", "messages": messages, **options}
        )
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    def texts(self, episode: SampledEpisode) -> list[str]:
        """Return each training row as text, with everything that is trained in brackets."""
        return [self._mark(row) for row in rows_of(episode)]

    def _mark(self, row: TrainSample) -> str:
        out, inside = "", False
        for token, trained in zip(row.tokens, row.loss_mask, strict=True):
            out += ("[" if trained else "]") * (trained != inside) + self.pieces.pieces[token]
            inside = trained
        return out + "]" * inside


def rows_of(episode: SampledEpisode) -> list[TrainSample]:
    """Return the training rows, which are the same as those that a worker hands to the trainer as arrays."""
    trajectory = Trajectory(seed=0, turns=episode.turns(), ending=Ending.COMPLETED, reward=0.0)
    rows = training_rows(trajectory, advantage=1.0, index=0)
    if rows:
        handed = TrajectoryTokens.of(trajectory.turns).samples(advantage=1.0, index=0, group=0, reward=0.0)
        assert [(list(one.tokens), list(one.loss_mask)) for one in handed] == [
            (list(one.tokens), list(one.loss_mask)) for one in rows
        ]
    return rows


def trained(episode: SampledEpisode) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each trained answer with their log-probabilities, sorted by these."""
    found: list[tuple[list[int], list[float]]] = []
    for row in rows_of(episode):
        before = 0.0
        for token, mask, logprob in zip(row.tokens, row.loss_mask, row.logprobs, strict=True):
            if mask and logprob != before:
                found.append(([], []))
            if mask:
                found[-1][0].append(token)
                found[-1][1].append(logprob)
            before = logprob if mask else 0.0
    return sorted(found, key=lambda one: one[1], reverse=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


__all__ = ["ADD", "END", "TOOLS", "ScriptedPolicy", "Stage", "calling", "rows_of", "trained", "user"]
