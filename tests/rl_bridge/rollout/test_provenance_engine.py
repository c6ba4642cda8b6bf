"""Episodes of many turns by a real engine that takes new weights meanwhile."""

import asyncio
import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_pairs import save_byte_pairs
from rollout_fixtures import Note, Notebook, NotebookTask, Notes
from tool_fixtures import (
    BREAK,
    END,
    MARKS,
    START,
    TEMPLATE,
    AnsweringDeskTask,
    Desk,
    DeskTask,
    calling,
    rows_of,
    task_of,
)

from openenv_core import StepResult
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout.assignment import EpisodeSettings
from rl_bridge.rollout.episode import play_episode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.types import Completion, SamplingSettings, Trajectory

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

AT_ONCE = 64
MAX_NEW, MAX_LENGTH = 16, 512
TEMPERATURE = 0.9
ENDS = 60
"""Of some 400 tokens so many end an answer, so that a random policy does end some."""


class RecitalTask(NotebookTask):
    """Shows the whole chat in every turn: a template spells it anew, and the policy otherwise."""

    def messages(self, observation: Notes) -> list[ChatMessage]:
        roles: Iterable[str] = itertools.cycle(["user", "assistant"])
        return [
            ChatMessage(role=role, content=word) for role, word in zip(roles, observation.words, strict=False)
        ]

    def parse(self, text: str) -> Note | None:
        return Note(text=text) if text else None


KINDS: tuple[type[Any], ...] = (DeskTask, AnsweringDeskTask, RecitalTask, NotebookTask, DeskTask)


class Direct:
    """A session of an environment in this process."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    async def reset(self, **options: Any) -> StepResult[Any]:
        return await self._result(self.environment.reset(**options))

    async def step(self, action: Any, /) -> StepResult[Any]:
        return await self._result(self.environment.step(action))

    async def _result(self, found: Any) -> StepResult[Any]:
        observation = await found if asyncio.iscoroutine(found) else found
        return StepResult(observation, observation.reward, observation.done, observation.metadata)


async def play_any_kind(seed: int, policy: ChatPolicy) -> Trajectory | None:
    """An episode in this process whose seed decides what it is."""
    kind = KINDS[seed % len(KINDS)]
    tools = issubclass(kind, DeskTask)
    number = seed // len(KINDS)
    settings = EpisodeSettings(
        temperature=TEMPERATURE,
        num_turns=(4, 8, 32)[seed % 3],
        illegal_reward=-1.0,
        reset_options={"words": number % 4} if tools else {"length": 1 + number % 8},
    )
    session = Direct(Desk() if tools else Notebook())
    return await play_episode(session, policy, task_of(kind), seed=seed, settings=settings)


def said_by(source: random.Random) -> str:
    """Anything that a policy might say, in the midst of an episode."""
    call = source.choice(
        [
            calling("add", a=source.randrange(99), b=source.randrange(99)),
            calling("echo", text="call the name" * source.randrange(3)),
            calling("fail"),
            calling("nobody", name="call"),
        ]
    )
    answers = {
        call: 50,
        "<think>a name to call</think>" + call: 10,
        call + "\n" + calling("add", a=1, b=1): 10,
        calling("finish"): 6,
        "42 is the name": 1,
        "I do not know": 1,
        "<tool_call>{'name'}</tool_call>": 3,
        call[: source.randrange(1, len(call))] + BREAK: 3,
    }
    return source.choices([*answers], weights=[*answers.values()])[0]


class Interpreted(ChatTokenizer):
    """What a random policy writes is given a meaning, decided by its tokens: a call, several, none, nonsense."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stop_token_ids = (*self.stop_token_ids, *range(100, 100 + ENDS - 1))

    def decode_written(self, tokens: Sequence[int]) -> str:
        return said_by(random.Random(zlib.crc32(repr(list(tokens)).encode())))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[[Path, int, int], Path]) -> Path:
    """A random checkpoint with a tokenizer of byte pairs."""
    folder = tmp_path_factory.mktemp("policy")
    known = save_byte_pairs(folder, TEMPLATE, special=(END, START, BREAK), plain=MARKS)
    return random_policy(folder, known, 3)


@pytest.fixture(scope="module")
def engine(policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.config import Config, RolloutConfig
    from rl_bridge.generator.engine import VllmEngine

    rollout = RolloutConfig(
        max_length=MAX_LENGTH, max_num_seqs=AT_ONCE, kv_cache_mb=64, weight_update="continue"
    )
    one = VllmEngine(Config(rollout=rollout), str(policy), seed=0)
    one.start().result(200)
    yield one
    one.close()


def weights(policy: Path, version: int) -> Mapping[str, Any]:
    import torch

    from rl_bridge.generator.replica import Checkpoint

    source = torch.Generator().manual_seed(version)
    return {
        name: tensor + (0.05 * torch.randn(tensor.shape, generator=source) if version else 0.0)
        for name, tensor in Checkpoint(policy).tensors().items()
    }


class Updating:
    """Completes prompts by an engine, which gets new weights after every share of the episodes."""

    def __init__(self, engine: Any, policy: Path, episodes: int) -> None:
        self.version = self._answers = 0
        self._engine, self._policy, self._episodes = engine, policy, episodes
        self._loading = asyncio.Lock()

    async def generate_many(
        self, prompts: list[Sequence[int]], sampling: SamplingSettings, seeds: list[int] | None, _: list[str]
    ) -> list[Completion]:
        engine = self._engine
        self._answers += len(prompts)
        if self._answers > (self.version + 1) * 0.3 * self._episodes and not self._loading.locked():
            async with self._loading:  # while these prompts, and all others, are at work
                answering = engine.generate(prompts, sampling, seeds)
                await asyncio.sleep(0.01)
                self.version += 1
                new = weights(self._policy, self.version)
                await asyncio.wrap_future(engine.load(self.version, new))
                return await asyncio.wrap_future(answering)
        return await asyncio.wrap_future(engine.generate(prompts, sampling, seeds))


async def play_all(engine: Any, policy: Path, episodes: int) -> tuple[list[Trajectory], int]:
    """The trajectories, and the newest version of the weights that they come from."""
    await asyncio.wrap_future(engine.load(0, weights(policy, 0)))
    updating = Updating(engine, policy, episodes)
    client = GeneratorClient(LocalService(updating), max_batch=AT_ONCE)
    chat = ChatPolicy(Interpreted(policy), client, max_new_tokens=MAX_NEW, max_length=MAX_LENGTH)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> Trajectory | None:
        async with places:
            return await play_any_kind(seed, chat)

    trajectories = await asyncio.gather(*map(one, range(episodes)))
    await client.close()
    return [trajectory for trajectory in trajectories if trajectory is not None], updating.version


@pytest.mark.parametrize("episodes", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_trained_token_has_the_log_probability_of_its_weights(
    engine: Any, policy: Path, episodes: int
) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    trajectories, newest = asyncio.run(play_all(engine, policy, episodes))
    rows = rows_of(trajectories)
    trained = sum(sum(row.loss_mask) for row in rows)
    assert trained == sum(len(turn.completion.tokens) for one in trajectories for turn in one.turns)
    assert trained > 10 * episodes
    assert newest > 2
    for version in range(newest + 1):
        model = Qwen3ForCausalLM.from_pretrained(str(policy), dtype=torch.float32).eval()
        model.load_state_dict(weights(policy, version), strict=False)
        for row in rows:
            places = [
                place
                for place, is_loss in enumerate(row.loss_mask)
                if is_loss and row.versions[place] == version
            ]
            if not places:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([list(row.tokens)])).logits[0] / TEMPERATURE
            log_probabilities = torch.log_softmax(logits, -1)
            expected = [float(log_probabilities[place - 1, row.tokens[place]]) for place in places]
            assert [row.logprobs[place] for place in places] == pytest.approx(expected, abs=1e-4)
