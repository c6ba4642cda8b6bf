"""Plays one episode with an agent: it calls the policy at the gateway, and the environment's tools over MCP."""

import asyncio
import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from openenv_core.tracebacks import format_traceback
from rl_bridge.agents.process import OUTPUT_FILE, ProgramExit, require_program, run_program
from rl_bridge.agents.programs import PRESETS, AgentProgram
from rl_bridge.agents.run import AgentRun
from rl_bridge.agents.tools import EnvironmentTools
from rl_bridge.config import Config, resolve
from rl_bridge.config.agent import AgentConfig
from rl_bridge.errors import ConfigError, EpisodeLostError, RolloutError
from rl_bridge.gateway.app import Gateway, GatewayServer
from rl_bridge.gateway.episode import CallSettings, GatewayEpisode
from rl_bridge.gateway.messages import ModelRequest
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.assignment import EpisodeSettings, sampling_seed
from rl_bridge.rollout.episode import Judge, convert_task_errors, judge_episode, require_scored
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.tool_calls import CallStyle
from rl_bridge.types import Ending, Trajectory

UNLIMITED: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)

AgentFunction = Callable[[AgentRun], Coroutine[Any, Any, Any]]

KEPT_OUTPUTS: Final = 64
"""The outputs of how many programs are kept, each worker's latest."""


class AgentPlayer:
    """Plays the episodes of one environment with the agent of `rollout.agent`. One gateway serves all of them.

    Args:
        config: The configuration of a run on one environment.
        task: The environment's task, whose tools the agent gets.
        name: Of the worker, for the folder of the programs' outputs.

    Raises:
        ConfigError: The task has no tools, or the agent cannot be found.
    """

    def __init__(self, config: Config, task: Any, *, name: str = "worker") -> None:
        agent = config.rollout.agent
        if agent is None or not isinstance(task, ToolTask):
            raise ConfigError(
                f"expected an environment of tools with rollout.agent, whose task is a ToolTask, got "
                f"{type(task).__name__}"
            )
        self._agent = agent
        self._config = config
        self._task = task
        self._function: AgentFunction | None = None
        self._program: AgentProgram | None = None
        if agent.function is not None:
            self._function = resolve(agent.function, key="rollout.agent.function")
        else:
            self._program = make_program(agent)
            require_program(self._program)
        self._excluding = [re.compile(pattern) for pattern in agent.untrained]
        self._gateway = Gateway()
        self._server = GatewayServer(self._gateway)
        self._started: asyncio.Task[None] | None = None
        self._http: Any = None
        self._outputs = task.folder / "agents" / name
        self._numbers = itertools.count()

    async def play(
        self,
        session: Session,
        policy: ChatPolicy,
        *,
        seed: int,
        settings: EpisodeSettings,
        sampling_key: tuple[int, int, int] | None = None,
        judge: Judge | None = None,
        on_progress: Callable[[], None] = lambda: None,
        wait_for_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Trajectory | None:
        """Play one episode; the arguments and what it returns and raises are those of `play_episode`.

        An agent that ends without having ended the episode has earned what it has. One that was killed, or that could
        not reach the policy, is lost like an environment, and so is one that never called it.
        """
        await self._start()
        with span("reset", waits_for="environment"):
            result = await session.reset(seed=seed, **settings.reset_options)
        on_progress()
        require_scored(result)
        if result.done:
            return None
        began, task = time.monotonic(), self._task
        with span("begin", waits_for="environment"), convert_task_errors():
            messages = task.messages(result.observation)
            functions = await task.functions(session, result.observation)
        tools = EnvironmentTools(
            task, session, functions, max_calls=settings.num_turns, on_progress=on_progress
        )
        tools.add_reward(result.reward)
        style = self._config.model.tool_calls
        episode = self._gateway.open(
            policy,
            CallSettings(
                temperature=settings.temperature,
                max_calls=settings.num_turns,
                repair=self._config.model.repair_tool_calls,
                style=None if style == "auto" else CallStyle(style),
                seed_of=None if sampling_key is None else partial(sampling_seed, *sampling_key),
                is_excluded=self._is_excluded,
                wait_for_turn=wait_for_turn,
            ),
            tools,
        )
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="ropewalk-agent-"))
        run = AgentRun(
            messages=messages,
            functions=functions,
            url=self._server.url,
            key=episode.key,
            folder=folder,
            tools=tools,
            http=self._http,
        )
        limits = [limit for limit in (self._agent.timeout_s, settings.timeout_s) if limit is not None]
        try:
            ended, in_time = await _run_until(self._run(run), (tools.over, episode.over), began + min(limits))
        finally:
            await self._gateway.close(episode)
            await tools.close()
            await asyncio.to_thread(self._keep_output, folder)
        ending = _find_ending(tools, episode, ended, in_time)
        turns = episode.turns()
        if not turns:
            return None
        if judge is not None:
            texts = [policy.tokenizer.text(turn.completion.tokens) for turn in turns]
            with span("judge", waits_for="reward"):
                tools.add_reward(await judge_episode(judge, task, result.observation, texts))
        return Trajectory(
            seed=seed,
            turns=turns,
            ending=ending,
            reward=tools.reward,
            tool_calls=tools.calls,
            scores=tools.scores,
        )

    async def close(self) -> None:
        """Stop the gateway."""
        if self._started is not None:
            await self._server.close()
        if self._http is not None:
            await self._http.aclose()

    async def _start(self) -> None:
        """Start the gateway once; all episodes wait for it."""
        if self._started is None:
            if self._function is not None:
                self._http = httpx.AsyncClient(timeout=None, limits=UNLIMITED)
            self._started = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._started)

    def _is_excluded(self, request: ModelRequest) -> bool:
        if not self._agent.train_without_tools and not request.functions:
            return True
        first = request.messages[0]
        return first.role == "system" and any(one.search(first.content) for one in self._excluding)

    async def _run(self, run: AgentRun) -> ProgramExit | None:
        if self._function is not None:
            await self._function(run)
            return None
        assert self._program is not None
        return await run_program(self._program.fill(run.values()), run.folder)

    def _keep_output(self, folder: Path) -> None:
        """Keep a program's output, and remove everything else that it wrote."""
        if (folder / OUTPUT_FILE).exists():
            self._outputs.mkdir(parents=True, exist_ok=True)
            kept = self._outputs / f"{next(self._numbers) % KEPT_OUTPUTS}.log"
            shutil.move(folder / OUTPUT_FILE, kept)
        shutil.rmtree(folder, ignore_errors=True)


async def _run_until(
    work: Awaitable[ProgramExit | None], events: Sequence[asyncio.Event], deadline: float
) -> tuple[ProgramExit | Exception | None, bool]:
    """Run an agent until it ends, one of the events happens, or the deadline passes.

    Returns:
        How it ended by itself, or None; and whether something happened before the deadline.
    """
    task = asyncio.ensure_future(work)
    waits: set[asyncio.Future[Any]] = {task, *(asyncio.ensure_future(event.wait()) for event in events)}
    try:
        done, _ = await asyncio.wait(
            waits, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
        )
        if task not in done:
            return None, bool(done)
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return error or task.result(), True
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _find_ending(
    tools: EnvironmentTools,
    episode: GatewayEpisode,
    ended: ProgramExit | Exception | None,
    in_time: bool,
) -> Ending:
    """Return how an episode ended; raises if something failed that is neither the agent nor the policy."""
    if tools.failure is not None:
        raise tools.failure
    if tools.ending is not None:
        return tools.ending
    if episode.over.is_set():
        return Ending.TRUNCATED_TURNS
    if episode.failure is not None:
        raise episode.failure
    if isinstance(ended, Exception) and not episode.was_full:
        raise RolloutError(f"the agent raised\n{format_traceback(ended)}") from ended
    if isinstance(ended, ProgramExit) and (ended.code < 0 or not episode.calls):
        raise EpisodeLostError(ended.describe())
    if not in_time:
        if not episode.calls:
            raise EpisodeLostError("the agent did not call the policy before rollout.agent.timeout_s")
        return Ending.TRUNCATED_TIME
    return Ending.TRUNCATED_LENGTH if episode.was_full else Ending.COMPLETED


def make_program(agent: AgentConfig) -> AgentProgram:
    """Return the program that a configuration names."""
    if agent.command is not None:
        return AgentProgram(command=agent.command, env=agent.env, files=agent.files)
    preset = PRESETS[str(agent.preset)]
    command = (agent.program or preset.command[0], *preset.command[1:])
    env, files = {**preset.env, **agent.env}, {**preset.files, **agent.files}
    return replace(preset, command=command, env=env, files=files)
