"""Everything a loop works with, started together and stopped together."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from openenv_core import LocalProcessProvider
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.config import Config, resolve
from rl_bridge.errors import ConfigError, RoleFailed
from rl_bridge.generator.actor import GeneratorActor
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.metrics import JsonlSink, MetricsLog, TensorBoardSink
from rl_bridge.metrics.console import ProgressBar, iteration_line
from rl_bridge.reference.actor import ReferenceActor
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.groups import held_out_seeds
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import EvaluationResult, Task
from rl_bridge.rollout.workers import RolloutWorkers
from rl_bridge.services.fleet import Fleet
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.trainer.actor import TrainerActor
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import Ending, PolicyVersion, Trajectory

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""For loading models: large checkpoints take their time."""
EVALUATION_CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A training run in progress.

    Attributes:
        config: What was asked for.
        folder: Where everything about the run is written.
        model_path: The checkpoint that the run began with.
        task: What ties the run to its environment.
        policy: The generator behind a chat template.
        workers: Play episodes.
        buffer: Groups between workers and trainer.
        trainer: Mesh of the `TrainerActor`.
        generator: Mesh of the `GeneratorActor`.
        reference: Mesh of the `ReferenceActor`; None where the KL coefficient is 0.
        metrics: Sinks.
        console: What a person watches.
        version: Iterations trained so far, equal to the version that the generator serves.
    """

    config: Config
    folder: Path
    model_path: Path
    task: Task
    policy: ChatPolicy
    workers: RolloutWorkers
    buffer: ReplayBuffer
    trainer: Any
    generator: Any
    reference: Any | None
    metrics: MetricsLog
    console: Console
    version: PolicyVersion = 0
    _began: float = field(default_factory=time.perf_counter)
    _first_version: PolicyVersion = 0

    async def play(self, seeds: Sequence[int]) -> list[Trajectory | None]:
        """Play one training episode a seed; None for those lost to failures."""
        return await self.workers.play(
            seeds, self._episode(self.config.rollout.temperature), timeout_s=self.config.rollout.timeout_s
        )

    async def log(self, figures: Mapping[str, float]) -> None:
        """Write the figures of the iteration just trained, with a probe of the policy where one is due."""
        iterations, every = self.config.trainer.iterations, self.config.evaluation.interval
        complete = dict(figures)
        if self.version == iterations or (every and self.version % every == 0):
            complete.update(await self.probe())
        self.metrics.write(self.version, complete)
        trained = self.version - self._first_version
        remaining = (time.perf_counter() - self._began) / trained * (iterations - self.version)
        self.console.print(
            iteration_line(self.version, iterations, complete, remaining_s=remaining),
            highlight=False,
            soft_wrap=True,
        )

    async def probe(self) -> dict[str, float]:
        """Have the task look at the greedy policy."""
        return {f"probe/{name}": value for name, value in (await self.task.probe(self.policy)).items()}

    async def evaluate(self) -> EvaluationResult:
        """Play the held-out episodes greedily."""
        train_seconds = time.perf_counter() - self._began
        total = self.config.evaluation.episodes
        rewards: list[float] = []
        endings: list[Ending] = []
        with ProgressBar("held-out episodes", max(total, 1), self.console) as bar:
            for first in range(0, total, EVALUATION_CHUNK):
                seeds = held_out_seeds(first, min(EVALUATION_CHUNK, total - first))
                played = await self.workers.play(
                    seeds,
                    self._episode(0.0),
                    timeout_s=self.config.rollout.timeout_s,
                    progress=lambda done, first=first: bar.update(first + done),  # type: ignore[misc]
                )
                rewards.extend(t.reward for t in played if t is not None)
                endings.extend(t.ending for t in played if t is not None)
        return EvaluationResult(
            rewards=rewards, endings=endings, dropped=total - len(rewards), train_seconds=train_seconds
        )

    def _episode(self, temperature: float) -> EpisodeSettings:
        return EpisodeSettings(
            temperature=temperature,
            num_turns=self.config.rollout.num_turns,
            illegal_reward=self.config.reward.illegal_answer,
            reset_options=self.config.env.reset,
        )


@asynccontextmanager
async def open_run(
    config: Config, folder: Path, *, console: Console, resume: bool = False
) -> AsyncIterator[tuple[Run, Fleet]]:
    """Start everything that a run needs; stop it all again, whatever happens.

    Args:
        config: The run.
        folder: Where it writes.
        console: What a person watches.
        resume: Go on from the newest checkpoint in the folder.

    Raises:
        rl_bridge.errors.BridgeError: A part could not be started.
        openenv_core.ProviderError: The environment's server could not be started.
    """
    task_type = resolve(config.rollout.task, key="rollout.task")
    if not (isinstance(task_type, type) and issubclass(task_type, Task)):
        raise ConfigError(
            f"expected rollout.task to name a subclass of rl_bridge.rollout.Task, got {task_type!r}"
        )
    task = task_type(config, folder)
    model_path = _model_path(config, task)
    tokenizer = ChatTokenizer(model_path, thinking=config.model.thinking)
    settings = _trainer_settings(config, folder, model_path)

    async with AsyncExitStack() as stack:
        url = config.env.url or await _serve(stack, str(config.env.app))
        fleet = await stack.enter_async_context(Fleet(folder / "logs"))
        generator = fleet.spawn(
            "generator",
            GeneratorActor,
            _engine_settings(config, model_path),
            environment=_GENERATOR_ENVIRONMENT,
        )
        trainer = fleet.spawn("trainer", TrainerActor, settings, environment=_ONE_THREAD)
        reference = None
        if config.algorithm.kl_coef:
            reference = fleet.spawn("reference", ReferenceActor, settings, environment=_ONE_THREAD)
        starting = [generator.start.call_one(), trainer.start.call_one(resume)]
        if reference is not None:
            starting.append(reference.start.call_one())
        console.print("starting the inference engine, the trainer and the environment's server …")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                _, version, *_ = await fleet.guard(_gather(starting))
        except TimeoutError:
            raise RoleFailed(
                f"expected the engine and the trainer to be ready within {START_TIMEOUT_S:g} s, they are not; "
                f"see the logs in {folder / 'logs'}"
            ) from None
        stack.push_async_callback(_finish, trainer, generator)

        client = GeneratorClient(generator.generate.call_one, max_batch=config.rollout.max_num_seqs)
        stack.push_async_callback(client.close)
        policy = ChatPolicy(
            tokenizer,
            client,
            max_new_tokens=config.rollout.max_new_tokens,
            max_length=config.rollout.max_length,
        )
        workers = RolloutWorkers(
            lambda: task.client_type(url, message_timeout_s=config.env.message_timeout_s),
            sessions=config.env.sessions,
            task=task,
            policy=policy,
            max_attempts=config.rollout.max_attempts,
        )
        stack.push_async_callback(workers.close)
        metrics = stack.enter_context(
            MetricsLog([JsonlSink(folder / "metrics.jsonl"), TensorBoardSink(folder / "tensorboard")])
        )
        if version:
            console.print(f"resuming after iteration {version}")
            await fleet.guard(_serve_weights(trainer, generator))
        yield (
            Run(
                config=config,
                folder=folder,
                model_path=model_path,
                task=task,
                policy=policy,
                workers=workers,
                buffer=ReplayBuffer(
                    capacity=config.rollout.batch_size // config.rollout.group_size,
                    max_staleness=config.rollout.max_staleness,
                ),
                trainer=trainer,
                generator=generator,
                reference=reference,
                metrics=metrics,
                console=console,
                version=version,
                _first_version=version,
            ),
            fleet,
        )


# One thread each: the roles take turns, and idle OpenMP threads that spin cost more than they compute.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_GENERATOR_ENVIRONMENT = {
    **_ONE_THREAD,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Compilation takes longer than it saves on models that fit a CPU; CUDA ignores it with CUDA graphs off.
    "TORCHDYNAMO_DISABLE": "1",
}


async def _gather(calls: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))


async def _serve(stack: AsyncExitStack, app: str) -> str:
    provider = LocalProcessProvider(app)
    stack.push_async_callback(asyncio.to_thread, provider.stop)
    return await asyncio.to_thread(provider.start)


async def _serve_weights(trainer: Any, generator: Any) -> None:
    await generator.load.call_one(await trainer.publish.call_one())


async def _finish(*roles: Any) -> None:
    """Let the roles close by themselves; those that are gone cannot, and their processes end anyway."""
    async with asyncio.timeout(30.0):
        await asyncio.gather(*(role.close.call_one() for role in roles), return_exceptions=True)


def _model_path(config: Config, task: Task) -> Path:
    if config.model.path is not None:
        return Path(config.model.path).expanduser().absolute()
    try:
        return task.make_policy().absolute()
    except NotImplementedError:
        raise ConfigError(
            "expected model.path, a checkpoint in the Hugging Face layout; this task makes no policy of its own"
        ) from None


def _engine_settings(config: Config, model_path: Path) -> EngineSettings:
    rollout = config.rollout
    return EngineSettings(
        model_path=str(model_path),
        dtype=config.model.dtype,
        max_length=rollout.max_length,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=rollout.kv_cache_mb << 20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=config.seed,
    )


def _trainer_settings(config: Config, folder: Path, model_path: Path) -> TrainerSettings:
    return TrainerSettings(
        model_path=str(model_path),
        dtype=config.model.dtype,
        folder=str(folder.absolute()),
        max_length=config.rollout.max_length,
        max_loss_tokens=config.rollout.num_turns * config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        seed=config.seed,
        trainer=config.trainer,
        algorithm=config.algorithm,
    )
