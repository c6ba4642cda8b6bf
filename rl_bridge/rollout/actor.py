"""The rollout worker as a Monarch actor."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from monarch.actor import concurrent_endpoint

from openenv_core import EnvClient, tracing
from openenv_core.garbage import tune_garbage_collector
from rl_bridge.config import Config
from rl_bridge.data.examples import Example
from rl_bridge.environments.leases import SessionDeadlines, SessionLeases
from rl_bridge.environments.servers import read_token
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.rollout.assignment import Assignment, AssignmentResult
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.single_turn import SingleTurn
from rl_bridge.rollout.task import Task, load_tasks
from rl_bridge.rollout.worker import RolloutWorker, on_termination
from rl_bridge.services.actor import ServiceActor
from rl_bridge.services.handle import Roster, ServiceHandle
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer

if TYPE_CHECKING:
    from rl_bridge.agents.player import AgentPlayer

GRACE_PERIOD_S = 10.0
"""The longest that a preempted worker takes to hand back its assignments."""
REPLY_FLUSH_S = 0.5
"""Time for the last replies to be sent before the process exits."""

_log = logging.getLogger(__name__)


def _make_sessions(config: Config, task: Task) -> SessionLeases:
    """Make one worker's share of the sessions of the environment that `config` describes."""
    env, deadlines = config.environment, SessionDeadlines.of(config)
    token, max_deadline_s = read_token(env.token_file), max(deadlines.reset_s, deadlines.step_s)

    def connect(url: str) -> EnvClient[Any, Any, Any]:
        # The client does not queue at a full server: the leases know the other servers and how much room each has.
        return task.client_type(url, token=token, message_timeout_s=max_deadline_s + 1.0, queue_timeout_s=0.0)

    sessions = max(1, env.sessions // config.rollout.min_workers)
    return SessionLeases(connect, sessions=sessions, deadlines=deadlines)


def _make_agents(config: Config, tasks: Mapping[str, Task]) -> "dict[str, AgentPlayer]":
    """Make the player of each environment's agent. Starlette and uvicorn are imported only for these."""
    from rl_bridge.agents.player import AgentPlayer

    return {name: AgentPlayer(config.of(name), task, name=str(os.getpid())) for name, task in tasks.items()}


USED_SERVICES = ("policy", "opponent", "reward", "dataset", "trainer")
"""The services that workers call, as far as a run has them."""


class RolloutActor(ServiceActor):
    """A thin shell around `RolloutWorker` or, with a dataset, `SingleTurn`.

    It calls the replicas of other services directly, wherever they run, and hands tokens to the trainer.
    """

    REPLAYED: ClassVar[tuple[str, ...]] = ("take_servers", *(f"take_{name}" for name in USED_SERVICES))

    def __init__(self, config: Config, folder: Path, model_path: Path) -> None:
        self._config = config
        self._folder = folder.absolute()
        self._model_path = model_path
        self._services = {name: ServiceHandle(Roster(name)) for name in USED_SERVICES}
        self._clients: list[GeneratorClient] = []

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the task and the tokenizer."""
        config = self._config
        policy, opponent = (self._make_policy(service) for service in ("policy", "opponent"))
        tasks = load_tasks(config, self._folder)
        self._sessions = {name: _make_sessions(config.of(name), task) for name, task in tasks.items()}
        self._agents = {} if config.rollout.agent is None else _make_agents(config, tasks)
        attempts = config.rollout.max_attempts
        self._workers: dict[str, RolloutWorker | SingleTurn] = {
            name: RolloutWorker(
                self._sessions[name],
                task=task,
                policy=policy,
                max_attempts=attempts,
                judge=self._evaluate if config.reward.function or config.reward.model else None,
                agents=self._agents.get(name),
                keep_tokens=self._keep_tokens,
                opponent=opponent if config.has_opponent else None,
            )
            for name, task in tasks.items()
        }
        if config.data is not None:
            self._workers[""] = SingleTurn(
                self._get_example,
                policy,
                self._evaluate,
                max_attempts=attempts,
                keep_tokens=self._keep_tokens,
            )
        tune_garbage_collector()
        PROCESS_SPANS.rest("assignments")
        if config.rollout.checkpoint_on_preemption:
            await on_termination(self._preempt)

    def _make_policy(self, service: str) -> ChatPolicy:
        rollout = self._config.rollout
        client = GeneratorClient(
            self._services[service], max_batch=rollout.max_num_seqs, timeout_s=self._config.call_timeout_s
        )
        self._clients.append(client)
        tokenizer = ChatTokenizer(self._model_path, thinking=self._config.model.thinking)
        return ChatPolicy(
            tokenizer, client, max_new_tokens=rollout.max_new_tokens, max_length=rollout.max_length
        )

    # The services have sent their rosters before the first assignment.

    async def _evaluate(self, prompt: Sequence[ChatMessage], response: str, target: Any) -> float | None:
        reward: float | None = await self._services["reward"].evaluate_response.route(
            prompt=prompt, response=response, target=target
        )
        return reward

    async def _get_example(self, index: int) -> Example:
        example: Example = await self._services["dataset"].get_example.route(index)
        return example

    async def _keep_tokens(self, tokens: dict[TokenKey, TrajectoryTokens]) -> None:
        await self._services["trainer"].put_tokens.route(tokens)

    @concurrent_endpoint
    async def take_policy(self, roster: Roster) -> None:
        """Use these replicas of the policy from now on."""
        self._services["policy"].update(roster)

    @concurrent_endpoint
    async def take_opponent(self, roster: Roster) -> None:
        """Use these replicas of the opponents' generator from now on."""
        self._services["opponent"].update(roster)

    @concurrent_endpoint
    async def take_reward(self, roster: Roster) -> None:
        """Use these replicas of the reward service from now on."""
        self._services["reward"].update(roster)

    @concurrent_endpoint
    async def take_dataset(self, roster: Roster) -> None:
        """Use this replica of the dataset from now on."""
        self._services["dataset"].update(roster)

    @concurrent_endpoint
    async def take_trainer(self, roster: Roster) -> None:
        """Hand tokens to this start of the trainer's first rank from now on."""
        self._services["trainer"].update(roster)

    @concurrent_endpoint
    async def take_servers(self, urls: Mapping[str, Sequence[str]]) -> None:
        """Use these servers of each environment from now on."""
        for name, environment_urls in urls.items():
            self._sessions[name].replace(environment_urls)

    @concurrent_endpoint
    async def play(self, assignment: Assignment) -> AssignmentResult:
        """See `RolloutWorker.play`."""
        with PROCESS_SPANS.call():
            return await self._workers[assignment.environment].play(assignment)

    @concurrent_endpoint
    async def playing(self) -> dict[int, float]:
        """See `RolloutWorker.playing`."""
        return {
            lease: silent_s
            for worker in self._workers.values()
            for lease, silent_s in worker.playing().items()
        }

    @concurrent_endpoint
    async def cancel(self, leases: tuple[int, ...]) -> None:
        """See `RolloutWorker.cancel`."""
        for worker in self._workers.values():
            worker.cancel(leases)

    @concurrent_endpoint
    async def close(self) -> None:
        """Close the gateways of agents, the sessions and the generators' clients, and flush traces."""
        await asyncio.gather(*(agents.close() for agents in self._agents.values()))
        await asyncio.gather(*(sessions.close() for sessions in self._sessions.values()))
        await asyncio.gather(*(client.close() for client in self._clients))
        await tracing.flush()

    @concurrent_endpoint
    async def drain(self) -> None:
        """Hand back all assignments, each with what is finished; no further one is played."""
        await asyncio.gather(*(worker.preempt() for worker in self._workers.values()))

    def _preempt(self) -> None:
        self._exit_task = asyncio.ensure_future(self._hand_back_and_exit())

    async def _hand_back_and_exit(self) -> None:
        try:
            async with asyncio.timeout(GRACE_PERIOD_S):
                await asyncio.gather(*(worker.preempt() for worker in self._workers.values()))
        except TimeoutError:
            _log.warning("the worker is being preempted, and could not hand back all of its assignments")
        await asyncio.gather(asyncio.sleep(REPLY_FLUSH_S), tracing.flush())
        sys.stderr.flush()
        os._exit(0)
