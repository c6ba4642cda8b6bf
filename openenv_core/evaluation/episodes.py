"""Plays episodes concurrently, repeats those that fail by no fault of the policy, and records each."""

import asyncio
import inspect
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import httpx
from pydantic import BaseModel

from openenv_core.adapters.episode import MAX_BACKOFF_S, MIN_BACKOFF_S, TextEpisode, fetch_schema, seats_of
from openenv_core.backoff import exponential_pause_s
from openenv_core.client import GenericEnvClient
from openenv_core.errors import (
    AuthenticationError,
    CapacityError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    OpenEnvError,
    ValidationFailedError,
)
from openenv_core.evaluation.policies import (
    ActionPolicy,
    AnyPolicy,
    ChatModel,
    EpisodePolicy,
    Json,
    PolicyError,
    PolicyLostError,
)
from openenv_core.evaluation.records import (
    FAILED_ENVIRONMENT,
    FAILED_POLICY,
    LOST,
    REASON_CHARS,
    UNSCORED,
    EpisodeRecord,
    EvaluationSettings,
    turn_record,
)
from openenv_core.protocol.http import http_url
from openenv_core.protocol.jsonio import dumps
from openenv_core.providers.base import has_died
from openenv_core.proxies import client_for
from openenv_core.tools.specs import is_of_tools
from openenv_core.tracebacks import format_traceback
from openenv_core.types import StepResult

ATTEMPTS: Final = 4
"""Attempts at an episode that fails although the server answers, before it counts as lost."""

SessionT = TypeVar("SessionT", GenericEnvClient, TextEpisode)

SEED_BITS: Final = 30
"""Bits of the seed of a chat's first answer; later answers count up from it, and servers take 31 bits at least."""


class EvaluationStoppedError(OpenEnvError):
    """Consecutive episodes were lost: the server or the policy is gone."""


class PlannedEpisode(NamedTuple):
    """An episode to play: the task's number, the repetition, the seed or index, and the options of reset."""

    group: int
    sibling: int
    seed: int
    options: Json


def plan_episodes(
    settings: EvaluationSettings, first_group: int, tasks: int, seat: str | None = None
) -> list[PlannedEpisode]:
    """Return the episodes of one environment, and seat: `tasks` tasks, each with the repetitions of the settings."""
    reset = settings.reset if seat is None else settings.reset | {"seat": seat}
    return [
        PlannedEpisode(first_group + task, sibling, number, reset | options)
        for task in range(tasks)
        for sibling in range(settings.repetitions)
        for number, options in [_task(settings, task, sibling)]
    ]


def _task(settings: EvaluationSettings, task: int, sibling: int) -> tuple[int, Json]:
    if settings.split is None:
        return settings.seed + task, {"seed": settings.seed + task}
    # The seed is for anything that the environment draws besides the task.
    return task, {"split": settings.split, "index": task, "seed": settings.seed + sibling}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """The server, its provider if it is ours, the policy and the settings with which episodes are played."""

    environment: str
    url: str
    token: str | None
    policy: AnyPolicy
    settings: EvaluationSettings
    provider: Any = None

    async def count_tasks(self, seat: str | None = None) -> int:
        """Return the number of tasks to play: `settings.episodes`, or fewer if the split has fewer.

        Raises:
            ConfigurationError: The environment has no such seat, no such split, or no tasks at all.
        """
        if seat is not None and seat not in (seats := seats_of(await self._fetch_schema())):
            raise ConfigurationError(f"expected seats among {', '.join(seats)}, got {seat}")
        split = self.settings.split
        if split is None:
            return self.settings.episodes
        try:
            return min(self.settings.episodes, await asyncio.to_thread(self._fetch_count, split))
        except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigurationError):  # which is a ValueError
                raise
            raise ConfigurationError(
                f"expected a server that counts the tasks of --split {split}, got {error!r}; leave --split out to "
                "play seeds"
            ) from error

    def _fetch_count(self, split: str) -> int:
        base = http_url(self.url)
        with client_for(base, self.token) as http:
            (name, *_) = http.get(f"{base}/list_environments").raise_for_status().json()
            url, timeout_s = f"{base}/{name}/num_tasks", self.settings.timeout_s
            reply = http.post(url, json={"split": split}, timeout=timeout_s)
        if reply.status_code != httpx.codes.OK:
            raise ConfigurationError(f"expected an environment with a split {split!r}: {reply.text:.300}")
        return int(reply.json()["num_tasks"])

    async def _fetch_schema(self) -> Json:
        return await fetch_schema(self.url, token=self.token, timeout_s=self.settings.timeout_s)

    async def play(self, episodes: Iterable[PlannedEpisode], done: Callable[[EpisodeRecord], None]) -> None:
        """Play episodes, in any order, in at most `settings.sessions` concurrent sessions.

        Args:
            episodes: The episodes to play.
            done: Called with the record of each episode when it has ended.

        Raises:
            EvaluationStoppedError: The server has ended, or as many consecutive episodes were lost as there are
                sessions.
            PolicyError: The policy is broken.
            ClientError: The server cannot be reached, or refuses access.
        """
        todo = deque(episodes)
        schema = (await self._fetch_schema())["action"]
        sessions = min(self.settings.sessions, len(todo))
        lost = connected_count = 0
        remaining = len(todo)
        workers: list[asyncio.Task[None]] = []

        async def play_next() -> None:
            nonlocal lost, remaining, connected_count
            player = self._player(schema)
            try:
                try:
                    await player.open()  # before taking an episode, which a full server would hold up
                except CapacityError:
                    if not connected_count:
                        raise
                    return  # the other sessions play all episodes
                connected_count += 1
                while todo:
                    record = await self._play_until_done(player, todo.popleft())
                    done(record)
                    remaining -= 1
                    lost = lost + 1 if record.ending in LOST else 0
                    if lost >= sessions and remaining:
                        raise EvaluationStoppedError(
                            f"{lost} episodes in a row were lost, the last one because: {record.reason}"
                        )
                    if not remaining:
                        for worker in workers:  # some may still be waiting for a session
                            if worker is not asyncio.current_task():
                                worker.cancel()
            finally:
                await player.close()

        try:
            async with asyncio.TaskGroup() as group:
                workers += [group.create_task(play_next()) for _ in range(sessions)]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def _player(self, schema: Json) -> "ActionPlayer | ChatPlayer":
        if hasattr(self.policy, "close"):
            return ChatPlayer(self, cast(ChatModel | EpisodePolicy, self.policy))
        return ActionPlayer(self, self.policy, schema)

    async def _play_until_done(
        self, player: "ActionPlayer | ChatPlayer", episode: PlannedEpisode
    ) -> EpisodeRecord:
        """Play an episode, and repeat it if it fails by no fault of the policy."""
        loop = asyncio.get_running_loop()
        deadline = 0.0
        for attempt in count(1):
            record = player.record(episode)
            is_unreachable = False
            try:
                await player.play(episode, record)
            except (ClientError, PolicyLostError) as error:
                if isinstance(error, AuthenticationError):
                    raise
                is_unreachable = isinstance(
                    error, ConnectionFailedError | ConnectionLostError | CapacityError
                )
                failed = FAILED_POLICY if isinstance(error, PolicyLostError) else FAILED_ENVIRONMENT
                record.fail(failed, f"{type(error).__name__}: {error}")
                await player.leave()
            if record.ending not in LOST:
                return record
            if attempt == 1:  # from the first failure on: the episode itself may take longer
                deadline = loop.time() + self.settings.patience_s
            if is_unreachable and await asyncio.to_thread(has_died, self.provider):
                raise EvaluationStoppedError(f"the server has ended: {record.reason}")
            pause_s = exponential_pause_s(attempt, MIN_BACKOFF_S, MAX_BACKOFF_S)
            is_last = loop.time() + pause_s > deadline or (not is_unreachable and attempt >= ATTEMPTS)
            if is_last or record.ending == FAILED_POLICY:
                return record
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the loop has no end")


class _Player(Generic[SessionT]):
    """Plays episodes in a session, which `make` makes anew once a call in it has failed."""

    def __init__(self, arena: Arena, make: Callable[[], SessionT]) -> None:
        self._arena = arena
        self._make: Callable[[], SessionT] = make
        self._session: SessionT = make()

    async def open(self) -> None:
        """Open the session; a failed connection is ignored here, and raised by the first episode."""
        with suppress(ConnectionFailedError):
            await self._session.connect()

    async def leave(self) -> None:
        """End a session in which a call has failed."""
        with suppress(ClientError):
            await self._session.close()
        self._session = self._make()

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    def record(self, episode: PlannedEpisode) -> EpisodeRecord:
        """Return the record of an episode before it is played."""
        return EpisodeRecord(
            environment=self._arena.environment,
            group=episode.group,
            sibling=episode.sibling,
            seed=episode.seed,
            ending=FAILED_ENVIRONMENT,
            reward=None,
        )

    def _key(self, episode: PlannedEpisode) -> str:
        """Return the seed of the policy's random numbers: no two episodes of an evaluation share one."""
        return f"{self._arena.settings.seed}/{self._arena.environment}/{episode.seed}/{episode.sibling}"

    def _end(self, record: EpisodeRecord, result: StepResult[Any]) -> bool:
        """Record a result; return whether it ends the episode."""
        record.reward = (record.reward or 0.0) + float(result.reward or 0.0)
        if (failure := result.infrastructure_error) is not None:
            record.fail(FAILED_ENVIRONMENT, failure)
        elif result.unscored is not None or not math.isfinite(record.reward):
            record.fail(UNSCORED, result.unscored or f"a reward of {result.reward}")
        if record.reward is None:
            return True
        record.ending = "truncated_environment" if result.truncated else "completed"
        return bool(result.done)


class ActionPlayer(_Player[GenericEnvClient]):
    """A session in which an `ActionPolicy` plays."""

    def __init__(self, arena: Arena, policy: ActionPolicy, schema: Json) -> None:
        timeout_s = arena.settings.timeout_s
        super().__init__(
            arena, lambda: GenericEnvClient(arena.url, token=arena.token, message_timeout_s=timeout_s)
        )
        self._policy = policy
        self._schema = schema

    async def play(self, episode: PlannedEpisode, record: EpisodeRecord) -> None:
        """Play an episode; ClientError if it fails by no fault of the policy."""
        result = await self._session.reset(**episode.options)
        tools: list[Json] = []
        if is_of_tools(self._schema):
            listed = (await self._session.step({"type": "list_tools"})).observation.get("tools")
            tools = [tool for tool in listed or () if isinstance(tool, dict)]
        act = self._policy.begin(self._key(episode), self._schema, tools)
        while not self._end(record, result):
            if len(record.turns) == self._arena.settings.max_turns:
                record.ending = "truncated_turns"
                return
            shown = _text_of(result.observation)  # before the policy, which may change what it gets
            action = await _ask_action(act, result.observation)
            record.turns.append(turn_record(shown, json.dumps(action, default=str), fresh=not record.turns))
            record.tool_calls += "tool_name" in action
            try:
                result = await self._session.step(action)
            except ValidationFailedError as error:
                record.ending, record.reason = "refused_action", str(error)[:REASON_CHARS]
                return


async def _ask_action(act: Any, observation: Json) -> Json:
    try:
        action = act(observation)
        if inspect.isawaitable(action):
            action = await action
    except OpenEnvError:
        raise
    except Exception as error:
        raise PolicyError(f"the policy raised\n{format_traceback(error)}") from error
    if isinstance(action, BaseModel):
        return action.model_dump(mode="json")
    if not isinstance(action, Mapping):
        raise PolicyError(f"expected the policy to return an action's fields as a dict, got {action!r:.200}")
    try:
        dumps(action)
    except ValueError as error:  # no value of JSON, or half of a surrogate pair
        raise PolicyError(
            f"expected the policy to return an action that JSON can hold, got {action!r:.200}: {error}"
        ) from None
    return dict(action)


def _text_of(observation: Json) -> str:
    text = observation.get("text")
    return text if isinstance(text, str) else json.dumps(observation, ensure_ascii=False, default=str)


class ChatPlayer(_Player[TextEpisode]):
    """A session in which a chat model plays, by tool calls or in text, or an agent that has one."""

    def __init__(self, arena: Arena, policy: ChatModel | EpisodePolicy) -> None:
        limits = dict.fromkeys(("step_timeout_s", "reset_timeout_s"), arena.settings.timeout_s)
        super().__init__(arena, lambda: TextEpisode(arena.url, token=arena.token, **limits))
        self._policy = policy

    async def play(self, episode: PlannedEpisode, record: EpisodeRecord) -> None:
        """See `ActionPlayer.play`; PolicyLostError if the model does not answer."""
        game = self._session
        observation = await game.reset(**episode.options)
        seed = random.Random(self._key(episode)).getrandbits(SEED_BITS)
        record.ending = "completed"
        if hasattr(self._policy, "play"):
            await self._policy.play(game, observation, record, seed)
        else:
            await self._chat(self._policy, observation, record, seed)
        if game.truncated:
            record.ending = "truncated_environment"
        record.reward = game.reward
        if game.failure is not None:
            record.fail(FAILED_ENVIRONMENT, game.failure)
            await self.leave()
        elif record.reward is None or not math.isfinite(record.reward):
            record.fail(UNSCORED, game.unscored or "it has no finite reward")

    async def _chat(self, model: ChatModel, observation: str, record: EpisodeRecord, seed: int) -> None:
        settings, game = self._arena.settings, self._session
        is_text_mode = settings.mode == "text"
        system = "\n\n".join(filter(None, [settings.system, game.instructions if is_text_mode else None]))
        messages: list[Json] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": observation})
        chat = model.begin(messages, [] if is_text_mode else game.tools, seed)
        while not game.over:
            if len(record.turns) == settings.max_turns:
                record.ending = "truncated_turns"
                break
            answer = await chat.answer()
            if answer is None:
                record.ending = "truncated_length"
                break
            text = "\n\n".join(f"[{message['role']}] {message['content']}" for message in messages)
            record.turns.append(turn_record(text, answer.shown, fresh=not record.turns))
            messages = []
            for call in answer.calls:
                record.tool_calls += 1
                if isinstance(call.arguments, dict):
                    result = await game.call(call.name, call.arguments)
                else:
                    result = f"error: the arguments are no JSON object: {call.arguments[:200]}"
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
                )
            if not answer.calls:
                messages.append({"role": "user", "content": await game.answer(answer.text)})
            chat.add_messages(messages)
