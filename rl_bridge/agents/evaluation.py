"""An agent as the policy of `ropewalk eval --agent`, with a model on another server."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_core.adapters.episode import TextEpisode
from openenv_core.errors import ConfigurationError
from openenv_core.evaluation.policies import ChatModel, PolicyError, PolicyLostError
from openenv_core.evaluation.records import EpisodeRecord, EvaluationSettings
from rl_bridge.agents.host import AgentHost
from rl_bridge.agents.programs import PRESETS
from rl_bridge.config.agent import AgentConfig
from rl_bridge.errors import ConfigError, EpisodeLostError, RolloutError
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.relayed import RelayedEpisode
from rl_bridge.tokens.chat import ChatMessage


class EvaluatedAgent:
    """An `openenv_core.evaluation.policies.EpisodePolicy`.

    Args:
        settings: The evaluation's settings, with the agent's name.
        model: The agent's model.
        folder: The evaluation's folder; programs' outputs are kept in `agents/` in it.

    Raises:
        ConfigurationError: The agent cannot be found.
    """

    def __init__(self, settings: EvaluationSettings, model: ChatModel, folder: Path) -> None:
        name = settings.agent or ""
        if name not in PRESETS and ":" not in name:
            raise ConfigurationError(
                f"expected --agent as one of {', '.join(PRESETS)}, or module:function, got {name!r}"
            )
        who = {"preset": name} if name in PRESETS else {"function": name}
        try:
            agent = AgentConfig.model_validate({**who, "sandbox": settings.agent_sandbox})
            self._host = AgentHost(agent, folder / "agents")
        except (ConfigError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
        self._settings = settings
        self._model = model
        self.close = self._host.close

    async def play(self, game: TextEpisode, observation: str, record: EpisodeRecord, seed: int) -> None:
        """See `EpisodePolicy.play`."""
        try:
            await self._host.start()
        except ConfigError as error:
            raise ConfigurationError(str(error)) from error
        settings = self._settings
        messages: list[ChatMessage] = [{"role": "user", "content": observation}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        tools = TextTools(game, record)
        episode = RelayedEpisode(self._model, CallSettings(max_calls=settings.max_turns), tools, seed=seed)
        deadline = time.monotonic() + settings.agent_timeout_s
        agent_exit = await self._host.run(episode, tools, messages, deadline)
        record.turns = episode.turns
        if game.over:
            return
        if episode.failure is not None:
            raise episode.failure
        try:
            record.ending = agent_exit.find_ending(episode).value
        except EpisodeLostError as error:
            raise PolicyLostError(str(error)) from error
        except RolloutError as error:
            raise PolicyError(str(error)) from error


class TextTools:
    """The tools of an episode in text; see `rl_bridge.agents.host.AgentTools`. Calls are made one at a time."""

    def __init__(self, game: TextEpisode, record: EpisodeRecord) -> None:
        self.functions: Sequence[Mapping[str, Any]] = game.tools
        self.over = asyncio.Event()
        self._game = game
        self._record = record
        self._lock = asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; returns its result as text, and whether the call failed."""
        async with self._lock:
            if self.over.is_set():
                return "the episode is over", True
            self._record.tool_calls += 1
            text = await self._game.call(name, arguments)
            if self._game.over:
                self.over.set()
            return text, text.startswith("error: ")

    async def close(self) -> None:
        """See `AgentTools.close`."""
        self.over.set()
        async with self._lock:
            pass
