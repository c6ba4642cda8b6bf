"""Checks a run's model, environment and task before anything heavy is loaded."""

import asyncio
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from openenv_core import ClientError, EnvClient, LocalProcessProvider, OpenEnvError
from openenv_core.errors import ConfigurationError
from openenv_core.targets import find_module
from openenv_core.tracebacks import format_traceback
from rl_bridge.config import Config, EnvConfig
from rl_bridge.config.environment import env_key
from rl_bridge.environments.servers import read_token
from rl_bridge.errors import BridgeError, ConfigError
from rl_bridge.rollout.task import Task, load_task, task_type
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.titan.architecture import read_architecture, require_layout

TRIAL_ANSWERS: Final = ("", "1", "yes", "{}", "a word, and more")
"""Texts that `parse` is tried on, beside the prompt itself: a policy may write anything."""


def run_preflight(config: Config) -> None:
    """Check the model and its layout on ranks, and try each task on an episode's first observation and a few answers.

    Leaves nothing behind. Environments in containers are not started.

    Raises:
        ModelError: The model's architecture is not supported.
        ConfigError: The model is missing or cannot be laid out, the environment's server does not start, or the task
            cannot be made or raises.
    """
    if config.model.path is None:
        _require_policy_maker(config)
    else:
        folder = _require_model(config.model.path)
        ranks = config.monarch.roles.trainer.ranks
        require_layout(read_architecture(folder), config.trainer.parallel, ranks, config.model.lora)
    for name in config.environments:
        _check_environment(config.of(name), env_key(name, "app"))


def _check_environment(config: Config, app_key: str) -> None:
    env, reference = config.environment, str(config.rollout.task)
    if env.app is not None:
        _require_module(env.app, app_key)
    with tempfile.TemporaryDirectory() as folder:
        with _convert_task_errors(reference, "making the task"):
            task = load_task(reference, config, Path(folder))
        if config.rollout.agent is not None:
            from rl_bridge.agents.player import AgentPlayer

            AgentPlayer(config, task)
        if env.app is not None:
            try:
                with LocalProcessProvider(env.app) as server:
                    asyncio.run(_try_task(config, env, task, server.start()))
            except OpenEnvError as error:
                raise ConfigError(f"{app_key}: {error}") from error
        elif env.url is not None:
            # The server is not ours: what it lacks now, for example a free session, it may have when the run begins.
            with suppress(ClientError):
                asyncio.run(_try_task(config, env, task, env.urls[0]))


def _require_policy_maker(config: Config) -> None:
    """Check that a task overrides `Task.make_policy`. It is not called: that needs torch, and leaves a checkpoint."""
    views = [config.of(name) for name in config.environments] or [config]
    references = dict.fromkeys(view.rollout.task for view in views if view.rollout.task is not None)
    if any(task_type(reference).make_policy is not Task.make_policy for reference in references):
        return
    makers = (
        f"{' and '.join(references)} makes none" if references else "without rollout.task nothing makes one"
    )
    raise ConfigError(
        f"model.path: expected a folder with a checkpoint in the Hugging Face layout, got none, and {makers}; "
        "set model.path=FOLDER"
    )


def _require_model(model_path: str) -> Path:
    folder = Path(os.path.expanduser(model_path))
    if (folder / "config.json").is_file():
        return folder
    remedy = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model_path) and not folder.exists():
        remedy = f"; for a model of that name: hf download {model_path} --local-dir {folder.name}"
    raise ConfigError(
        f"model.path: expected a folder with a checkpoint in the Hugging Face layout, got {model_path!r}, "
        f"{'which has no config.json' if folder.is_dir() else 'which is no folder'}{remedy}"
    )


def _require_module(app: str, key: str) -> None:
    module = app.partition(":")[0]
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ConfigError(f"{key}: there is no file at {module}; check the path")
        return
    try:
        spec = find_module(module)
    except ConfigurationError as error:
        raise ConfigError(f"{key}: {error}") from error
    if spec is None:
        raise ConfigError(
            f"{key}: expected a module that can be imported, got {module!r}; start from the folder that contains "
            f"{module.partition('.')[0]!r}, or install it"
        )


async def _try_task(config: Config, env: EnvConfig, task: Task, url: str) -> None:
    name = str(config.rollout.task)
    client: EnvClient[Any, Any, Any]
    async with task.client_type(
        url, token=read_token(env.token_file), message_timeout_s=env.reset_timeout_s
    ) as client:
        first_observation = (await client.reset(seed=config.seed, **env.reset)).observation
        with _convert_task_errors(name, "messages() of the first observation"):
            chat = task.messages(first_observation)
        if isinstance(task, ToolTask):
            with _convert_task_errors(name, "functions() of the first observation"):
                await task.functions(client, first_observation)
        for text in (*TRIAL_ANSWERS, chat[-1]["content"]):
            # A ValueError or LookupError means that an answer is no action.
            with _convert_task_errors(name, f"parse({text!r:.80})"), suppress(ValueError, LookupError):
                task.parse(text)
        with _convert_task_errors(name, "target() of the first observation"):
            task.target(first_observation)


@contextmanager
def _convert_task_errors(task: str, activity: str) -> Iterator[None]:
    try:
        yield
    except (BridgeError, OpenEnvError):
        raise
    except Exception as error:
        raise ConfigError(f"rollout.task {task}: {activity} raised\n{format_traceback(error)}") from error
