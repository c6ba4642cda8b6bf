"""The environment: each step lists or calls tools of third-party MCP servers."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from openenv_core import Environment
from openenv_core.errors import EpisodeOverError
from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.tools import (
    SILENT,
    ListToolsAction,
    ListToolsObservation,
    ToolAction,
    ToolContext,
    ToolObservation,
    ToolResult,
    ToolSpec,
)

from ..models import McpToolsState
from .episode import Episode
from .options import read_options
from .shared import SharedState, shared_state
from .upstream.errors import ServerFailedError

logger = logging.getLogger(__name__)


class McpToolsEnvironment(Environment[ToolAction, ToolObservation, McpToolsState]):
    """Tools of third-party MCP servers, with separate tool servers or connections for each session.

    A reset is optional: a step before the first reset starts an episode with all configured servers. An episode ends
    when its calls or its time are used up, or when a server dies that is not restarted. There are no rewards.

    Failures of tools never raise; the observation's error reports them. A failure of the infrastructure, for which no
    policy should be blamed, also sets `metadata["infrastructure_error"]`. The same tools are offered over MCP, where a
    call is a step of the same episode. Resources and prompts of the tool servers are not forwarded.

    Args:
        shared: The state that the sessions of this process share; by default configured by environment variables.
    """

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, shared: SharedState | None = None) -> None:
        self._shared = shared or shared_state()
        self._episode: Episode | None = None
        self._start_lock = asyncio.Lock()
        self._state = McpToolsState(episode_id=str(uuid4()))

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> ListToolsObservation:
        """Start an episode with fresh tool servers, closing those of the previous one.

        Args:
            seed: Ignored: the tools' behaviour does not depend on it.
            episode_id: The caller's name for the episode; None generates a uuid4.
            **options: `servers`: names of the servers to use. `allow`, `deny`: patterns of the tool names to offer or
                not. `calls`, `time_s`: the budget, at most that of the settings. `transcript`: false disables the
                transcript.

        Returns:
            The tools; `metadata["servers"]` describes the servers.

        Raises:
            InvalidResetOptionError: An option is unknown or has an invalid value. The previous episode continues.
        """
        choice = read_options(options, self._shared.settings)
        await self._end()
        self._state = McpToolsState(episode_id=str(uuid4()) if episode_id is None else episode_id)
        episode = Episode(self._shared, choice)
        try:
            await episode.start()
        except ServerFailedError as error:
            logger.warning("a tool server failed: %s", error)
            self._episode = episode
            return ListToolsObservation(tools=[], done=True, metadata={INFRASTRUCTURE_ERROR: str(error)})
        self._episode = episode
        return ListToolsObservation(
            tools=[spec.wire() for spec in episode.specs],
            metadata={
                "servers": [
                    info.model_dump(exclude={"calls", "restarts", "dead"}) for info in episode.server_infos
                ]
            },
        )

    async def step_async(self, action: ToolAction) -> ToolObservation:
        """List the tools, or call one.

        Raises:
            EpisodeOverError: The episode has ended.
        """
        if isinstance(action, ListToolsAction):
            tools = [spec.wire() for spec in await self.list_tools()]
            self._state.step_count += 1
            return ListToolsObservation(tools=tools)
        return (await self.call_tool(action.tool_name, action.arguments, SILENT)).observation(
            action.tool_name
        )

    async def list_tools(self) -> Sequence[ToolSpec]:
        """Return the tools currently offered.

        Raises:
            EpisodeOverError: The episode has ended.
        """
        return await (await self._current_episode()).list_tools()

    async def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Call a tool. Its failures are reported in the result.

        Raises:
            EpisodeOverError: The episode has ended.
        """
        episode = await self._current_episode()
        self._state.step_count += 1
        return await episode.call_tool(name, arguments, context)

    @property
    def state(self) -> McpToolsState:
        """The episode's state, with its servers, budget and transcript."""
        if self._episode is not None:
            self._episode.describe(self._state)
        return self._state

    async def close_async(self) -> None:
        """Close the tool servers."""
        await self._end()

    async def _current_episode(self) -> Episode:
        """Return the current episode; if there is none, start one with all servers.

        Raises:
            EpisodeOverError: The episode has ended, or its servers did not start.
        """
        async with self._start_lock:
            if self._episode is None:
                observation = await self.reset_async(episode_id=self._state.episode_id)
                if observation.done:
                    raise EpisodeOverError(
                        f"expected tool servers that start, got: {observation.metadata[INFRASTRUCTURE_ERROR]}"
                    )
        assert self._episode is not None
        if self._episode.ended is not None:
            raise EpisodeOverError
        return self._episode

    async def _end(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()
