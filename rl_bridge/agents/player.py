"""Plays one episode with an agent: it calls the policy at the gateway, and the environment's tools over MCP."""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from rl_bridge.agents.host import AgentHost
from rl_bridge.agents.tools import EnvironmentTools
from rl_bridge.config import Config
from rl_bridge.errors import ConfigError
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.messages import ModelRequest
from rl_bridge.gateway.sampled import SampledEpisode
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.assignment import EpisodeSettings, sampling_seed
from rl_bridge.rollout.episode import Judge, convert_task_errors, judge_episode, require_scored
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.tool_calls import CallStyle
from rl_bridge.types import Trajectory


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
        self._excluding = [re.compile(pattern) for pattern in agent.untrained]
        self._host = AgentHost(agent, task.folder / "agents" / name)
        self.close = self._host.close

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
        await self._host.start()
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
        call_settings = CallSettings(
            temperature=settings.temperature,
            max_calls=settings.num_turns,
            repair=self._config.model.repair_tool_calls,
            style=None if style == "auto" else CallStyle(style),
            seed_of=None if sampling_key is None else partial(sampling_seed, *sampling_key),
            is_excluded=self._is_excluded,
            wait_for_turn=wait_for_turn,
        )
        episode = SampledEpisode(policy, call_settings, tools)
        limits = [limit for limit in (self._agent.timeout_s, settings.timeout_s) if limit is not None]
        agent_exit = await self._host.run(episode, tools, messages, began + min(limits))
        if tools.failure is not None:
            raise tools.failure
        ending = tools.ending or agent_exit.find_ending(episode)
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

    def _is_excluded(self, request: ModelRequest) -> bool:
        if not self._agent.train_without_tools and not request.functions:
            return True
        first = request.messages[0]
        return first.role == "system" and any(one.search(first.content) for one in self._excluding)
