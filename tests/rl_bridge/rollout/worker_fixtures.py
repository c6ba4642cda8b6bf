"""A rollout worker with all its parts in this process, and queries to its servers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rollout_fixtures import FakeEngine, FakeTokenizer, Script

from rl_bridge.config import Config
from rl_bridge.config.self_play import TRAINED
from rl_bridge.environments.leases import SessionDeadlines, SessionLeases
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout import Task
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, EpisodeSettings, NoTrajectory
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Trajectory

HERE = str(Path(__file__).parent)


def active_sessions(url: str) -> int:
    with urlopen(f"{url}/active_sessions", timeout=60) as reply:
        return int(json.load(reply))


async def until_no_session_is_left(url: str) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(active_sessions, url):  # noqa: ASYNC110 - it is the server's
            await asyncio.sleep(0.01)


def trajectories(result: AssignmentResult) -> list[Trajectory]:
    return [outcome for outcome in result.outcomes if isinstance(outcome, Trajectory)]


def absences(result: AssignmentResult) -> list[Absence | None]:
    """Why each episode has no trajectory; None where it has one."""
    return [outcome.absence if isinstance(outcome, NoTrajectory) else None for outcome in result.outcomes]


class Play:
    """A worker, its sessions, and a scripted policy."""

    def __init__(
        self,
        urls: Sequence[str],
        task: type[Task],
        script: Script,
        *,
        tokenizer: Any = None,
        engine: Any = None,
        sessions: int = 8,
        max_new_tokens: int = 4,
        max_length: int = 64,
        max_attempts: int = 3,
        deadlines: SessionDeadlines | None = None,
        opponent: Script | None = None,
    ) -> None:
        tokenizer = tokenizer or FakeTokenizer()
        self.engine: Any = engine or FakeEngine(tokenizer, script)
        self.generator = GeneratorClient(LocalService(self.engine), max_batch=64)
        config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}})
        policy = ChatPolicy(tokenizer, self.generator, max_new_tokens=max_new_tokens, max_length=max_length)
        self.task = task(config, Path())
        deadlines = deadlines or SessionDeadlines(connect_s=10.0, step_s=10.0)
        timeout_s = max(10.0, deadlines.step_s)
        self.sessions = SessionLeases(
            lambda url: task.client_type(url, message_timeout_s=timeout_s, queue_timeout_s=0.0),
            sessions=sessions,
            deadlines=deadlines,
            urls=urls,
        )
        self.opponent = FakeEngine(tokenizer, opponent or script)
        self.generators = [self.generator, GeneratorClient(LocalService(self.opponent), max_batch=64)]
        limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
        self.worker = RolloutWorker(
            self.sessions,
            task=self.task,
            policy=policy,
            max_attempts=max_attempts,
            opponent=None if opponent is None else ChatPolicy(tokenizer, self.generators[1], **limits),
        )
        self._lease = 0

    async def __call__(
        self,
        seeds: Sequence[int],
        *,
        temperature: float = 1.0,
        num_turns: int = 32,
        timeout_s: float | None = None,
        sampling_key: tuple[int, int] | None = None,
        seats: tuple[str, ...] = (),
        seatings: tuple[Mapping[str, str], ...] = (),
        **reset_options: Any,
    ) -> AssignmentResult:
        self._lease += 1
        assignment = Assignment(
            lease=self._lease,
            seeds=tuple(seeds),
            siblings=tuple(range(len(seeds))),
            settings=EpisodeSettings(
                temperature=temperature,
                num_turns=num_turns,
                illegal_reward=-1.5,
                reset_options=reset_options,
                timeout_s=timeout_s,
            ),
            sampling_key=sampling_key,
            seatings=seatings or ((dict.fromkeys(seats, TRAINED),) if seats else ()),
        )
        return await self.worker.play(assignment)


def poker_decision(prompt: str) -> tuple[str, str]:
    """Return the card and the moves so far that a prompt of the example's poker shows."""
    found = re.search(r"kuhn ([JQK])([pb]*)", prompt)
    assert found is not None, prompt
    return found[1], found[2]


@asynccontextmanager
async def playing(*arguments: Any, **options: Any) -> AsyncIterator[Play]:
    play = Play(*arguments, **options)
    async with AsyncExitStack() as stack:
        for generator in play.generators:
            stack.push_async_callback(generator.close)
        stack.push_async_callback(play.sessions.close)
        yield play
        assert play.sessions.leased == 0
