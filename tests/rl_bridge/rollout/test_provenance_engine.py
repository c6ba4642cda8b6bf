"""Episodes of many turns by a real engine, logged at its sampler, that takes new weights meanwhile."""

import asyncio
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.types import Completion, SamplingSettings, TrainSample, Trajectory

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


@dataclass
class EngineLog:
    """What the engine's sampler gave out: version, token, log-probability."""

    engine: Any = None
    sampled: Counter[tuple[int, int, float]] = field(default_factory=Counter)

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        """Hear what the sampler gives out from now on, of whichever of vLLM's runners it is."""
        (sampler,) = self.engine._llm._engine.collective_rpc(lambda worker: worker.model_runner.sampler)
        kind = type(sampler)
        name = "forward" if hasattr(kind, "forward") else "__call__"
        sample = getattr(kind, name)

        def logged(*arguments: Any, **options: Any) -> Any:
            output = sample(*arguments, **options)
            self.add(output)
            return output

        patch.setattr(kind, name, logged)

    def add(self, output: Any) -> None:
        tokens = output.sampled_token_ids[:, 0].tolist()
        reported = output.logprobs_tensors
        assert reported.logprob_token_ids[:, 0].tolist() == tokens
        for token, logprob in zip(tokens, reported.logprobs[:, 0].tolist(), strict=True):
            self.sampled[self.engine.version, token, logprob] += 1


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[[Path, int, int], Path]) -> Path:
    """A random checkpoint with a tokenizer of byte pairs."""
    folder = tmp_path_factory.mktemp("policy")
    known = save_byte_pairs(folder, TEMPLATE, special=(END, START, BREAK), plain=MARKS)
    return random_policy(folder, known, 3)


@pytest.fixture(scope="module")
def log() -> EngineLog:
    return EngineLog()


@pytest.fixture(scope="module")
def engine(policy: Path, log: EngineLog, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.config import Config, RolloutConfig
    from rl_bridge.generator.engine import VllmEngine

    log.engine = one = VllmEngine(
        Config(
            rollout=RolloutConfig(
                max_length=MAX_LENGTH, max_num_seqs=AT_ONCE, kv_cache_mb=64, weight_update="continue"
            )
        ),
        str(policy),
        seed=0,
    )
    one.start().result(200)
    with pytest.MonkeyPatch.context() as patch:
        log.listen(patch)
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


@dataclass
class Played:
    episodes: int
    trajectories: list[Trajectory] = field(default_factory=list)
    versions: int = 0


@pytest.fixture(scope="module", params=[200, pytest.param(1000, marks=pytest.mark.soak)])
def played(engine: Any, policy: Path, request: pytest.FixtureRequest) -> Played:
    return asyncio.run(_play(engine, policy, request.param))


async def _play(engine: Any, policy: Path, episodes: int) -> Played:
    played, loading = Played(episodes), asyncio.Lock()
    await asyncio.wrap_future(engine.load(0, weights(policy, 0)))
    answers = 0

    async def generate(
        prompts: list[Sequence[int]], sampling: SamplingSettings, seeds: list[int] | None
    ) -> list[Completion]:
        nonlocal answers
        answers += len(prompts)
        if answers > (played.versions + 1) * 0.3 * episodes and not loading.locked():
            async with loading:  # while these prompts, and all others, are at work
                answering = engine.generate(prompts, sampling, seeds)
                await asyncio.sleep(0.01)
                played.versions += 1
                await asyncio.wrap_future(engine.load(played.versions, weights(policy, played.versions)))
                return await asyncio.wrap_future(answering)
        return await asyncio.wrap_future(engine.generate(prompts, sampling, seeds))

    client = GeneratorClient(generate, max_batch=AT_ONCE)
    chat = ChatPolicy(Interpreted(policy), client, max_new_tokens=MAX_NEW, max_length=MAX_LENGTH)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> Trajectory | None:
        async with places:
            return await play_any_kind(seed, chat)

    trajectories = await asyncio.gather(*map(one, range(episodes)))
    played.trajectories = [trajectory for trajectory in trajectories if trajectory is not None]
    await client.close()
    return played


@pytest.fixture(scope="module")
def rows(played: Played) -> list[TrainSample]:
    return rows_of(played.trajectories)


def loss_tokens(row: TrainSample) -> Iterator[tuple[int, int, int, float]]:
    """Place, version, token and log-probability of each token that the row's loss is about."""
    for place, is_loss in enumerate(row.loss_mask):
        if is_loss:
            yield place, row.versions[place], row.tokens[place], row.logprobs[place]


def test_every_trained_token_came_out_of_the_sampler(
    rows: list[TrainSample], log: EngineLog, played: Played
) -> None:
    trained_tokens = Counter(
        (version, token, logprob) for row in rows for _, version, token, logprob in loss_tokens(row)
    )
    assert trained_tokens.total() > 10 * played.episodes
    assert not trained_tokens - log.sampled


def test_every_trained_token_has_the_log_probability_of_its_weights(
    rows: list[TrainSample], policy: Path, played: Played
) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    worst = 0.0
    for version in range(played.versions + 1):
        model = Qwen3ForCausalLM.from_pretrained(str(policy), dtype=torch.float32).eval()
        model.load_state_dict(weights(policy, version), strict=False)
        for row in rows:
            of_it = [
                (place, token, logprob) for place, at, token, logprob in loss_tokens(row) if at == version
            ]
            if not of_it:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([list(row.tokens)])).logits[0] / TEMPERATURE
            log_probabilities = torch.log_softmax(logits, -1)
            worst = max(
                worst, *(abs(float(log_probabilities[place - 1, token]) - lp) for place, token, lp in of_it)
            )
    assert worst < 1e-4
