"""Runs agents against one gateway: a Python function in this process, or a program for each episode."""

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from openenv_core.tracebacks import format_traceback
from rl_bridge.agents.confine import FOLDER as CONFINED_FOLDER
from rl_bridge.agents.process import (
    FOLDER_THERE,
    OUTPUT_FILE,
    ProgramExit,
    require_program,
    run_program,
    run_there,
)
from rl_bridge.agents.programs import PRESETS, AgentProgram
from rl_bridge.agents.run import AgentRun
from rl_bridge.agents.sandbox import AgentSandbox
from rl_bridge.config import resolve
from rl_bridge.config.agent import AgentConfig
from rl_bridge.errors import ConfigError, EpisodeLostError, RolloutError
from rl_bridge.gateway.app import Gateway, GatewayServer
from rl_bridge.gateway.episode import GatewayEpisode, ToolPort
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending

logger = logging.getLogger(__name__)

UNLIMITED: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)

AgentFunction = Callable[[AgentRun], Coroutine[Any, Any, Any]]

UNCONFINED: Final = "programs cannot be confined here; use a machine on which this user may make namespaces"
KEPT_OUTPUTS: Final = 64
"""The outputs of how many programs are kept, the latest."""


class AgentTools(ToolPort, Protocol):
    """The tools of an episode, which end it."""

    over: asyncio.Event
    """Set when the environment ends the episode, or fails."""

    async def close(self) -> None:
        """Take no more calls; returns when none is in progress."""
        ...


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent ended by itself, None if it did not; and whether something ended its run before the deadline."""

    how: ProgramExit | Exception | None
    in_time: bool

    def find_ending(self, episode: GatewayEpisode) -> Ending:
        """Return how an episode ended that the environment has not.

        Raises:
            EpisodeLostError: Something killed the agent, or it never called the policy.
            RolloutError: The agent raised an exception.
            Exception: The policy failed, as the episode's `failure` says.
        """
        if episode.failure is not None:  # also where calls that failed have used up the limit on calls
            raise episode.failure
        if episode.over.is_set():
            return Ending.TRUNCATED_TURNS
        if isinstance(self.how, Exception) and not episode.was_full:
            raise RolloutError(f"the agent raised\n{format_traceback(self.how)}") from self.how
        if isinstance(self.how, ProgramExit) and (self.how.code < 0 or not episode.calls):
            raise EpisodeLostError(self.how.describe())
        if not self.in_time:
            if not episode.calls:
                raise EpisodeLostError("the agent did not call the policy before its timeout")
            return Ending.TRUNCATED_TIME
        return Ending.TRUNCATED_LENGTH if episode.was_full else Ending.COMPLETED


class AgentHost:
    """Runs the agents of many episodes, and the gateway that they call.

    Args:
        agent: Who plays.
        outputs: A folder for the output of programs.

    Attributes:
        gateway: The gateway. It listens from `start` on.

    Raises:
        ConfigError: The agent cannot be found.
    """

    def __init__(self, agent: AgentConfig, outputs: Path) -> None:
        self.gateway = Gateway()
        self._function: AgentFunction | None = None
        self._program: AgentProgram | None = None
        if agent.function is not None:
            self._function = resolve(agent.function, key="rollout.agent.function")
        else:
            self._program = make_program(agent)
            if not agent.in_environment:
                require_program(self._program)
        self._server = GatewayServer(self.gateway, host=agent.gateway_host)
        self._sandbox: AgentSandbox | None = None
        self._agent = agent
        self._started: asyncio.Task[None] | None = None
        self._http: httpx.AsyncClient | None = None
        self._outputs = outputs
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the gateway once; all episodes wait for it."""
        if self._started is None:
            if self._function is not None:
                self._http = httpx.AsyncClient(timeout=None, limits=UNLIMITED)
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        await self._server.start()
        agent = self._agent
        if self._program is None or agent.sandbox is False or agent.in_environment:
            return
        sandbox = AgentSandbox(
            self._program.command[0],
            agent.readable,
            self._server.address,
            memory_bytes=agent.memory_mb << 20,
            processes=agent.processes,
        )
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="ropewalk-agent-"))
        try:
            trial = await run_program(AgentProgram(command=("true",)), folder, sandbox)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if trial.code == 0:
            self._sandbox = sandbox
        elif agent.sandbox:
            raise ConfigError(f"rollout.agent.sandbox: {UNCONFINED}, or set it to false\n{trial.output}")
        else:
            logger.warning(
                "agents run as plain processes of this user: %s; rollout.agent.sandbox=false omits this\n%s",
                UNCONFINED,
                trial.output,
            )

    async def close(self) -> None:
        """Stop the gateway."""
        if self._started is not None:
            self._started.cancel()  # its trial of the sandbox, too, if it is still in progress
            await asyncio.gather(self._started, return_exceptions=True)
            await self._server.close()
        if self._http is not None:
            await self._http.aclose()

    async def run(
        self, episode: GatewayEpisode, tools: AgentTools, messages: Sequence[ChatMessage], deadline: float
    ) -> AgentExit:
        """Run an agent until it ends, the environment or the gateway ends its episode, or the deadline passes.

        Args:
            episode: The episode, which is open at the gateway only meanwhile.
            tools: Its tools; closed afterwards.
            messages: The chat that states the task.
            deadline: The deadline, as of `time.monotonic`.
        """
        folder = Path(
            tempfile.mkdtemp(prefix="ropewalk-agent-")
        )  # here, so that no cancellation leaves it behind
        self.gateway.open(episode)
        run = AgentRun(
            messages=messages,
            functions=tools.functions,
            url=self._server.url,
            key=episode.key,
            folder=folder,
            tools=tools,
            http=self._http,
        )
        try:
            return await _run_until(self._run(run), (tools.over, episode.over), deadline)
        finally:
            await self.gateway.close(episode)
            await tools.close()
            await asyncio.to_thread(self._keep_output, folder)

    async def _run(self, run: AgentRun) -> ProgramExit | None:
        if self._function is not None:
            await self._function(run)
            return None
        assert self._program is not None
        if self._agent.in_environment:
            program = self._program.fill(run.values() | {"folder": FOLDER_THERE})
            return await run_there(program, run, self._agent.timeout_s)
        values = run.values() | ({} if self._sandbox is None else {"folder": CONFINED_FOLDER})
        return await run_program(self._program.fill(values), run.folder, self._sandbox)

    def _keep_output(self, folder: Path) -> None:
        """Keep a program's output, and remove everything else that it wrote."""
        if (folder / OUTPUT_FILE).exists():
            self._outputs.mkdir(parents=True, exist_ok=True)
            kept = self._outputs / f"{next(self._numbers) % KEPT_OUTPUTS}.log"
            shutil.move(folder / OUTPUT_FILE, kept)
        shutil.rmtree(folder, ignore_errors=True)


async def _run_until(
    work: Awaitable[ProgramExit | None], events: Sequence[asyncio.Event], deadline: float
) -> AgentExit:
    task = asyncio.ensure_future(work)
    waits: set[asyncio.Future[Any]] = {task, *(asyncio.ensure_future(event.wait()) for event in events)}
    try:
        done, _ = await asyncio.wait(
            waits, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
        )
        if task not in done:
            return AgentExit(None, bool(done))
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return AgentExit(error or task.result(), True)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def make_program(agent: AgentConfig) -> AgentProgram:
    """Return the program that a configuration names."""
    if agent.command is not None:
        return AgentProgram(command=agent.command, env=agent.env, files=agent.files)
    preset = PRESETS[str(agent.preset)]
    command = (agent.program or preset.command[0], *preset.command[1:])
    env, files = {**preset.env, **agent.env}, {**preset.files, **agent.files}
    return replace(preset, command=command, env=env, files=files)
