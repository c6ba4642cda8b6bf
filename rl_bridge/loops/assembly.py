"""Starts everything that a run needs, and stops it all again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from openenv_core import LocalProcessProvider
from rl_bridge.buffer.bounded import ReplayBuffer
from rl_bridge.config import Config, resolve
from rl_bridge.errors import ConfigError, RoleFailed
from rl_bridge.generator.actor import GeneratorActor
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.generator.settings import ONE_THREAD, EngineSettings, engine_environment
from rl_bridge.loops.run import ELAPSED, Run
from rl_bridge.metrics import JsonlSink, MetricsLog, TensorBoardSink, rewind
from rl_bridge.reference.actor import ReferenceActor
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.rollout.workers import RolloutWorkers
from rl_bridge.services.fleet import Fleet
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.trainer.actor import TrainerActor
from rl_bridge.trainer.settings import TrainerSettings

START_TIMEOUT_S = 600.0
"""For loading models: large checkpoints take their time."""
FINISH_TIMEOUT_S = 30.0
LOGS = "logs"
"""In a run's folder: one log a role. It is there from the moment that the first role is started."""


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
        fleet = await stack.enter_async_context(Fleet(folder / LOGS))
        generator = fleet.spawn(
            "generator",
            GeneratorActor,
            _engine_settings(config, model_path),
            environment=engine_environment(on_gpu=torch.cuda.is_available()),
        )
        trainer = fleet.spawn("trainer", TrainerActor, settings, environment=ONE_THREAD)
        reference = None
        if config.algorithm.kl_coef:
            reference = fleet.spawn("reference", ReferenceActor, settings, environment=ONE_THREAD)
        starting = [generator.start.call_one(), trainer.start.call_one(resume)]
        if reference is not None:
            starting.append(reference.start.call_one())
        console.print("starting the inference engine, the trainer and the environment's server …")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                _, version, *_ = await fleet.guard(_gather(starting))
                if version:
                    await fleet.guard(_serve_weights(trainer, generator))
        except TimeoutError:
            raise RoleFailed(
                f"expected the engine and the trainer to be ready within {START_TIMEOUT_S:g} s, they are not; "
                f"see the logs in {folder / LOGS}"
            ) from None
        stack.push_async_callback(_finish, trainer, generator)
        if resume:
            console.print(
                f"resuming after iteration {version}" if version else "no checkpoint: starting anew"
            )

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
        # Iterations after the checkpoint are trained again, so what was logged of them goes.
        last = rewind(folder / "metrics.jsonl", version)
        metrics = stack.enter_context(
            MetricsLog(
                [
                    JsonlSink(folder / "metrics.jsonl"),
                    TensorBoardSink(folder / "tensorboard", purge_from=version + 1 if resume else None),
                ]
            )
        )
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
                seconds_before=last.get(ELAPSED, 0.0),
            ),
            fleet,
        )


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
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINISH_TIMEOUT_S):
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
