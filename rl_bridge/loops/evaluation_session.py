"""A policy is looked at and not trained: held-out episodes, played greedily, without Monarch and all in this process.

It is what a server behind `generator.url` is good for, and a quick look at a checkpoint of one's own.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from openenv_core import EnvClient
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config, EnvConfig
from rl_bridge.environments.leases import SessionLeases
from rl_bridge.environments.servers import EnvironmentServers, read_token
from rl_bridge.errors import ConfigError, GeneratorError, PromptRefusedError, RolloutError
from rl_bridge.generator.client import FINAL_REPLY_TIMEOUT_S, GeneratorClient
from rl_bridge.generator.openai_api import plain
from rl_bridge.generator.settings import engine_environment
from rl_bridge.loops.evaluation import evaluate
from rl_bridge.loops.settings import (
    dispatch_settings,
    engine_settings,
    environment_servers,
    session_deadlines,
)
from rl_bridge.metrics.intervals import mean_interval, wilson_interval
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import EvaluationResult, load_task
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.types import Completion, SamplingSettings

REPORT = "evaluation.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class _Look:
    """What `evaluate` needs of a run."""

    config: Config
    console: Console
    dispatcher: Dispatcher
    train_seconds: float = 0.0


def evaluate_run(config: Config, folder: Path) -> None:
    """Play the held-out episodes of `evaluation.episodes`; print what came out, and write it.

    Args:
        config: Its `env`, `rollout.task`, `generator` and `model.path` count.
        folder: For the report; made where it is missing, and not left behind empty.

    Raises:
        ConfigError: Something is missing, or asks for what only a run has.
        rl_bridge.errors.BridgeError: The policy or the environment failed.
        KeyboardInterrupt: Somebody ended it: Ctrl-C, SIGTERM.
    """
    env, model_path = _require_env(config), _model_path(config)
    here = str(Path.cwd())
    if here not in sys.path:  # tasks are named by dotted paths, usually relative to where one stands
        sys.path.insert(0, here)
    if config.generator.engine != "openai":
        os.environ.update(engine_environment(on_gpu=config.monarch.roles.policy.gpus > 0))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {str(folder)!r}: {error.strerror}; --name chooses another"
        ) from error
    try:
        asyncio.run(_until_told(_session(config, env, model_path, folder, Console())))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            folder.rmdir()


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """A polite kill ends it as orderly as Ctrl-C, at which asyncio cancels its main task."""
    current = asyncio.current_task()
    assert current is not None
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    await work


def _require_env(config: Config) -> EnvConfig:
    if config.env is None or config.rollout.task is None:
        raise ConfigError("expected env.* and rollout.task to evaluate on, got neither or one alone")
    if config.evaluation.episodes == 0:
        raise ConfigError("expected evaluation.episodes of at least 1 in an evaluation, got 0")
    if config.reward.function or config.reward.model or config.monarch.roles.coder is not None:
        raise ConfigError(
            "expected the environment's own rewards alone in an evaluation, got reward.function, reward.model or "
            "monarch.roles.coder, which are roles of a run; leave them out, or set them to null"
        )
    return config.env


async def _session(config: Config, env: EnvConfig, model_path: Path, folder: Path, console: Console) -> None:
    # Not before it is known that there is something to evaluate: torch is loaded with it.
    from rl_bridge.generator.replica import PolicyReplica

    task = load_task(str(config.rollout.task), config, folder)
    rollout, deadlines = config.rollout, session_deadlines(config)
    token = read_token(env.token_file)

    def connect(url: str) -> EnvClient[Any, Any, Any]:
        longest = max(deadlines.reset_s, deadlines.step_s)
        return task.client_type(url, token=token, message_timeout_s=longest + 1.0)

    tokenizer = ChatTokenizer(model_path, thinking=config.model.thinking)
    async with AsyncExitStack() as stack:
        _say(
            console, f"{rollout.task}: {config.evaluation.episodes:,} held-out episodes of {_policy(config)}"
        )
        replica = PolicyReplica(engine_settings(config, model_path))
        stack.push_async_callback(replica.close)
        await replica.setup()
        client = GeneratorClient(
            replica.generate_many,
            max_batch=rollout.max_num_seqs,
            # What it waited for the engine can tell; so the engine is the first to give up.
            timeout_s=rollout.generate_timeout_s + FINAL_REPLY_TIMEOUT_S,
        )
        stack.push_async_callback(client.close)
        policy = ChatPolicy(
            tokenizer,
            _OnlyPolicy(client),
            max_new_tokens=rollout.max_new_tokens,
            max_length=rollout.max_length,
        )
        sessions = SessionLeases(connect, sessions=env.sessions, deadlines=deadlines)
        stack.push_async_callback(sessions.close)

        async def changed(urls: tuple[str, ...]) -> None:
            sessions.replace(urls)

        servers = await stack.enter_async_context(environment_servers(config, env, changed))
        sessions.replace(servers.urls)
        worker = RolloutWorker(sessions, task=task, policy=policy, max_attempts=rollout.max_attempts)
        dispatcher = Dispatcher(
            LocalService(worker), _nothing_to_train(), dispatch_settings(config), explain=servers.traceback
        )
        looking = evaluate(_Look(config=config, console=console, dispatcher=dispatcher))
        result = await _while_served(servers, looking)
        if not result.rewards:
            raise RolloutError(
                f"none of {config.evaluation.episodes} held-out episodes could be played, the last one because: "
                f"{result.last_absence}"
            )
        report = summary(result) | {"probe": dict(await task.probe(policy))}
    console.print_json(data=report)
    if result.last_absence is not None:
        _say(console, missing(result))
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _say(console, f"written to {folder / REPORT}")


class _OnlyPolicy:
    """No other replica is there to ask, and a mean over what it answered before would say nothing of it."""

    def __init__(self, client: GeneratorClient) -> None:
        self._client = client

    async def complete(
        self, prompt: Sequence[int], sampling: SamplingSettings, seed: int | None = None
    ) -> Completion:
        """Answer one prompt; what fails ends the evaluation, where a run would try again."""
        try:
            return await self._client.complete(prompt, sampling, seed)
        except PromptRefusedError:
            raise
        except GeneratorError as error:
            raise RolloutError(
                f"the policy failed, which ends the evaluation: {error} "
                "(rollout.generate_timeout_s is how long an answer may take)"
            ) from error


async def _while_served(
    servers: EnvironmentServers, looking: Coroutine[Any, Any, EvaluationResult]
) -> EvaluationResult:
    """Wait for the evaluation, or for the end of a server that cannot be started again."""
    working, watching = asyncio.ensure_future(looking), asyncio.ensure_future(servers.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _policy(config: Config) -> str:
    generator = config.generator
    if generator.engine == "openai":
        return f"{generator.model} at {generator.url}"
    return f"{config.model.path} by {generator.engine}, which is loaded first"


def _say(console: Console, text: str) -> None:
    console.print(plain(text, 1000), markup=False, highlight=False, soft_wrap=True)


def _model_path(config: Config) -> Path:
    if config.model.path is None:
        raise ConfigError(
            "expected model.path, the checkpoint to evaluate in the Hugging Face layout; where a server has it "
            "(generator.url), a folder with its tokenizer, since chats are made into tokens here"
        )
    path = Path(config.model.path).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"expected model.path to be a folder of this machine, there is none at {str(path)!r}"
        )
    return path


def _nothing_to_train() -> ReplayBuffer:
    return ReplayBuffer(
        Ledger(max_losses=None),
        Admission(groups_per_batch=1, max_staleness=0, iterations=0),
        timeout_s=1.0,
        straggler_timeout_s=1.0,
    )


def summary(result: EvaluationResult) -> dict[str, Any]:
    """An evaluation in figures.

    The mean and its interval are of the episodes that have a reward, none of which was dropped or unscored.
    """
    count = len(result.rewards)
    interval = _interval(result.rewards)
    return {
        "episodes": count,
        "mean_reward": statistics.fmean(result.rewards) if count else None,
        "ci95": None if interval is None else list(interval),
        "endings": dict(sorted(Counter(str(ending) for ending in result.endings).items())),
        "dropped": result.dropped,
        "unscored": result.unscored,
        "last_absence": result.last_absence,
    }


def _interval(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Wilson's where all rewards are 0 or 1, Student's otherwise; see `mean_interval` for where it is None."""
    if rewards and set(rewards) <= {0.0, 1.0}:
        return wilson_interval(round(sum(rewards)), len(rewards))
    return mean_interval(rewards)


def missing(result: EvaluationResult) -> str:
    """What is said of the episodes that have no reward."""
    return (
        f"{result.dropped + result.unscored} episodes are no part of the mean, {result.dropped} dropped and "
        f"{result.unscored} unscored, the last one because: {result.last_absence}"
    )
