"""Adapter for TRL: `GRPOTrainer(environment_factory=...)`, or `rollout_func=...`, on any served environment.

    environments = TRLEnvironments("blackjack", prompt="Play blackjack with the tool.", unfinished_reward=-1)
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        train_dataset=environments.train_dataset,
        environment_factory=environments.environment_factory,
        reward_funcs=environments.reward_funcs,
    )

docs/trainers.md explains how each argument affects training, and when to use which of the two.
"""

import asyncio
import copy
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from openenv_core.adapters.episode import EpisodeSettings, TextEpisode, resolve
from openenv_core.client import SyncEnvClient
from openenv_core.errors import ConfigurationError
from openenv_core.loop_thread import shared_loop
from openenv_core.making import make

if TYPE_CHECKING:
    from datasets import Dataset


class TRLEnvironments:
    """Served environments for TRL's trainers.

    A server is started when it is first needed, and stopped by `close`, at the end of the `with` block, or with the
    process. Each rollout has its own session. If the environment fails, the reward is None, and TRL leaves the rollout
    out of its group: such a failure is never a reward of 0.

    Args:
        target: Target of `openenv_core.make`: a name, a folder, `module:attribute`, a URL or an image. A dict trains
            on several targets; its keys are the values of the data set's column `environment`.
        prompt: Text for the policy before an episode's first observation.
        episodes: The data set's rows, as options of a reset each; or a number of episodes, with seeds from 0.
        settings: Arguments of `TextEpisode`. By default an episode that the policy left before its end has the rewards
            so far: for a game that pays only at its end, set the price of leaving as `unfinished_reward`. A reset that
            is not answered within `reset_timeout_s` ends the training.

    Raises:
        ConfigurationError: There is no environment, or no episode.
    """

    def __init__(
        self,
        target: str | Mapping[str, str],
        *,
        prompt: str = "",
        episodes: int | Iterable[Mapping[str, Any]] = 1000,
        **settings: Unpack[EpisodeSettings],
    ) -> None:
        self._targets: dict[Any, str] = {None: target} if isinstance(target, str) else dict(target)
        self._prompt = prompt
        self._episodes = (
            [{"seed": seed} for seed in range(episodes)] if isinstance(episodes, int) else list(episodes)
        )
        if not all((self._targets, *self._targets.values(), self._episodes)):
            raise ConfigurationError("an environment and at least one episode are needed; one is empty")
        self._settings = settings
        self._servers: list[SyncEnvClient[Any, Any, Any]] = []
        self._sessions: dict[str | None, list[TextEpisode]] = {}

    @cached_property
    def _factories(self) -> "dict[Any, _Factory]":
        return {name: self._factory(target) for name, target in self._targets.items()}

    @property
    def environment_factory(self) -> "_Factory | dict[str, _Factory]":
        """Factory of an environment; a dict of them by name for several. Pickled copies use this process's servers."""
        return self._factories.get(None, self._factories)

    @cached_property
    def train_dataset(self) -> "Dataset":
        """Data set with a row for each episode: `prompt`, the options of its reset, and `environment` if several.

        The prompt's message carries the row's number as `episode`: `rollout_func` gets nothing else of the row.
        """
        from datasets import Dataset

        return Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": self._prompt, "episode": number}], **row}
                for number, row in enumerate(self._rows)
            ]
        )

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        names = [{} if name is None else {"environment": name} for name in self._targets]
        return [{**name, **options} for options in self._episodes for name in names]

    def rollout_func(self, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, Any]:
        """Play the episodes of a batch concurrently, for `GRPOTrainer(rollout_func=...)`.

        The policy answers in text, with one `<tool_call>` each turn; replies are user messages. The policy's tokens
        are kept as sampled. A rollout ends with the environment's episode, when it would exceed
        `max_completion_length`, or after `max_tool_calling_iterations` calls.

        Args:
            prompts: Prompts of `train_dataset`, one for each episode.
            trainer: The GRPOTrainer, whose model answers with its own settings.

        Returns:
            `prompt_ids`, `completion_ids`, `env_mask` (1: a token of the policy, 0: of the environment), `logprobs` if
            the engine returns them, and `environment_reward` for `reward_funcs`; each a list over episodes.
        """
        rollouts: list[_Rollout] = []
        free = {name: iter(sessions) for name, sessions in self._sessions.items()}
        for prompt in prompts:
            row = self._rows[prompt[-1]["episode"]]
            name = None if None in self._targets else row["environment"]
            if (episode := next(free.get(name, iter(())), None)) is None:
                episode = self._factories[name].episode()
                self._sessions.setdefault(name, []).append(episode)
            options = {key: value for key, value in row.items() if key != "environment"}
            rollouts.append(_Rollout(episode, prompt, options, trainer))
        shared_loop().run(_run_concurrently, [rollout.start for rollout in rollouts])
        turns = trainer.max_tool_calling_iterations
        while live := [
            rollout for rollout in rollouts if rollout.active and (not turns or rollout.turns < turns)
        ]:
            context = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in live]
            answers, logprobs = trainer._generate_single_turn(context, None, {}, 1)
            logprobs_by_rollout = logprobs or [None] * len(live)
            calls = [
                partial(rollout.execute, *inputs)
                for rollout, *inputs in zip(live, answers, logprobs_by_rollout, strict=True)
            ]
            shared_loop().run(_run_concurrently, calls)
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "env_mask": [rollout.mask for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts] if trainer.use_vllm else None,
            "environment_reward": [rollout.episode.reward for rollout in rollouts],
        }

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """A single function: the sum of an episode's rewards, or None if the episode is unscored."""
        return [environment_reward]

    def close(self) -> None:
        """End the sessions, and stop the servers that were started. Idempotent."""
        sessions = [episode for name in self._sessions for episode in self._sessions[name]]
        self._sessions.clear()
        if sessions:
            shared_loop().run(_run_concurrently, [episode.close for episode in sessions])
        while self._servers:
            self._servers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _factory(self, target: str) -> "_Factory":
        token = self._settings.get("token")
        server = make(target, token=token) if token else make(target)
        self._servers.append(server)
        options = frozenset(name for row in self._episodes for name in row)
        return _Factory(server.base_url, tuple(self._settings.items()), options)


@dataclass(frozen=True)
class _Factory:
    base_url: str
    settings: tuple[tuple[str, Any], ...]
    options: frozenset[str]

    def __call__(self) -> "_TRLEnvironment":
        return _make_class(self)()

    def episode(self) -> TextEpisode:
        return TextEpisode(self.base_url, **dict(self.settings))


class _Group:
    """The instances of one factory, and their prefetched resets.

    TRL resets instances one after another, the siblings of a group in a row with the same options. So the first reset
    of a group starts those of its siblings, assuming the size of the previous group.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[_TRLEnvironment]] = []
        self._last: Mapping[str, Any] | None = None
        self._run_length = self._size = 1

    def prefetch_siblings(self, instance: "_TRLEnvironment", options: Mapping[str, Any]) -> None:
        """Prefetch the resets that are likely to follow this one."""
        if options == self._last:
            self._run_length += 1
            return
        self._last, self._size, self._run_length = options, self._run_length, 1
        start = instance._index + 1
        for member in self.members[start : start + self._size - 1]:
            if (sibling := member()) is not None and sibling._scored:
                sibling._prefetch(options)


class _TRLEnvironment:
    """An environment as TRL calls it. TRL takes every public method but `reset` for a tool; others are private."""

    _factory: _Factory
    _group: _Group
    _tools: Mapping[str, Mapping[str, Any]]  # by name, as TRL lists them

    def __init__(self) -> None:
        self._episode = self._factory.episode()
        self._loop = shared_loop()
        self._prefetched: tuple[Mapping[str, Any], Future[str]] | None = None
        self._scored = True  # no reset since the reward was read: the next one may be prefetched
        self._index = len(self._group.members)
        self._group.members.append(weakref.ref(self))
        # TRL never closes an instance.
        weakref.finalize(self, self._loop.call_detached, self._episode.close).atexit = False

    def reset(self, **row: Any) -> str:
        """Start the episode of a row of the data set and return its first observation."""
        options = {name: row[name] for name in self._factory.options if row.get(name) is not None}
        prefetched, self._prefetched = self._prefetched, None
        self._group.prefetch_siblings(self, options)
        self._scored = False
        if prefetched is not None:
            if prefetched[0] == options:
                return prefetched[1].result()
            with suppress(Exception):
                prefetched[1].result()
        return self._loop.run(self._begin, **options)

    def _prefetch(self, options: Mapping[str, Any]) -> None:
        self._prefetched = options, self._loop.submit(self._begin, **options)
        self._scored = False

    async def _begin(self, **options: Any) -> str:
        observation = await self._episode.reset(**options)
        tools = _by_name(self._episode.tools)
        if self._episode.over or tools == self._tools:
            return observation
        if unlisted := [name for name in tools if name not in self._tools]:
            raise ConfigurationError(
                f"TRL cannot offer the tools {', '.join(unlisted)} of the episode {options}: it listed the tools "
                f"before the first reset, when there were {', '.join(self._tools) or 'none'}; pass "
                "rollout_func=environments.rollout_func in place of environment_factory"
            )
        schemas = [json.dumps(function, ensure_ascii=False) for function in tools.values()]
        return "\n".join([observation, "", "In this episode there are only these tools:", *schemas])

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._loop.run(self._episode.call, name, arguments)

    def _reward(self) -> float | None:
        self._scored = True
        return self._episode.reward


async def _run_concurrently(calls: Sequence[Callable[[], Any]]) -> None:
    """Call coroutine functions concurrently; an exception in one cancels all."""
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(call())


@dataclass(slots=True)
class _Rollout:
    """A rollout of `rollout_func`: an episode and its tokens."""

    episode: TextEpisode
    prompt: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    trainer: Any
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    active: bool = True

    async def start(self) -> None:
        """Reset the environment, and append its tools and first observation to the prompt."""
        observation = await self.episode.reset(**self.options)
        *history, question = (
            {"role": message["role"], "content": message["content"]} for message in self.prompt
        )
        parts = (question["content"], self.episode.instructions, observation)
        text = "\n\n".join(section for section in parts if section)
        self.prompt_ids = self._tokenize([*history, {**question, "content": text}], answer=True)

    async def execute(self, answer: list[int], logprobs: list[float] | None) -> None:
        """Execute the policy's message and append the environment's reply."""
        max_tokens = self.trainer.max_completion_length - len(self.completion_ids)
        self._add(answer[:max_tokens], 1, logprobs)
        self.turns += 1
        if len(answer) >= max_tokens or answer[-1:] != [self.trainer._tokenizer.eos_token_id]:
            self.active = False  # the message was cut off, so its call is not known
            return
        reply = await self.episode.answer(self.trainer._tokenizer.decode(answer, skip_special_tokens=True))
        reply_ids = self._reply_tokens(reply)
        self.active = (
            not self.episode.done
            and self.episode.failure is None
            and len(answer) + len(reply_ids) < max_tokens
        )
        if self.active:
            self._add(reply_ids, 0)

    def _add(self, tokens: Sequence[int], mask: int, logprobs: Sequence[float] | None = None) -> None:
        self.completion_ids += tokens
        self.mask += [mask] * len(tokens)
        self.logprobs += (logprobs or [0.0] * len(tokens))[: len(tokens)]

    def _reply_tokens(self, text: str) -> list[int]:
        """Return the tokens between the end of an answer and the start of the next one."""
        question, end_id = {"role": "user", "content": "?"}, self.trainer._tokenizer.eos_token_id
        chat = [question, {"role": "assistant", "content": "!"}, {"role": "user", "content": text}]
        ids = self._tokenize(chat, answer=True)
        end_positions = [position for position, token in enumerate(ids) if token == end_id]
        answer = self._tokenize([question]).count(end_id)  # index of the answer's end among all ends
        if len(end_positions) <= answer:
            raise ConfigurationError(
                "the chat template does not end an answer with the tokenizer's eos_token"
            )
        return ids[end_positions[answer] + 1 :]

    def _tokenize(self, chat: Sequence[Mapping[str, Any]], *, answer: bool = False) -> list[int]:
        trainer = self.trainer
        ids: list[int] = trainer.processing_class.apply_chat_template(
            copy.deepcopy(chat), add_generation_prompt=answer, tokenize=True, return_dict=False,
            chat_template=trainer.chat_template, **trainer.chat_template_kwargs,
        )  # fmt: skip
        return ids


def environment_reward(
    environments: Iterable[_TRLEnvironment] | None = None,
    environment_reward: Sequence[float | None] = (),
    **_: Any,
) -> list[float | None]:
    """Return the reward of each rollout; None for an unscored one.

    Args:
        environments: Instances of `environment_factory`, if that is used.
        environment_reward: Rewards returned by `rollout_func` otherwise.
    """
    if environments is None:
        return list(environment_reward)
    return [environment._reward() for environment in environments]


@cache
def _make_class(factory: _Factory) -> type[_TRLEnvironment]:
    """Return the class of a factory's environments; each has its own, as TRL looks for tools on the class."""
    episode = factory.episode()

    async def fetch() -> list[dict[str, Any]]:
        try:
            await episode.open()
        finally:
            await episode.close()
        return episode.tools

    tools = _by_name(shared_loop().run(fetch))
    methods = {name: _to_method(function) for name, function in tools.items()}
    attributes = {"_factory": factory, "_group": _Group(), "_tools": tools, **methods}
    return type("ServedEnvironment", (_TRLEnvironment,), attributes)


def _by_name(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def _to_method(function: Mapping[str, Any]) -> Callable[..., str]:
    """Return a method for a function schema; TRL derives the schema again from its annotations and docstring."""
    name, schema = function["name"], function["parameters"]
    definitions = schema.get("$defs", {})
    properties = {
        key: resolve(subschema, definitions) for key, subschema in schema.get("properties", {}).items()
    }
    required = schema.get("required", ())
    if not all(key.isidentifier() for key in (name, *properties)):
        raise ConfigurationError(
            f"the tool {name!r} or a parameter of it ({', '.join(properties)}) is not a Python name, and TRL "
            "calls tools as Python functions; rename it in the environment"
        )

    def call(self: _TRLEnvironment, **arguments: Any) -> str:
        return self._call(name, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    annotations = {key: _python_type(subschema) for key, subschema in properties.items()}
    defaults = {key: subschema.get("default") for key, subschema in properties.items()}
    defaults |= dict.fromkeys(required, inspect.Parameter.empty)
    parameters = [
        inspect.Parameter(key, kind, default=defaults[key], annotation=annotations[key])
        for key in sorted(properties, key=lambda key: key not in required)
    ]
    call.__name__ = call.__qualname__ = name
    call.__annotations__ = {**annotations, "return": str}
    signature = inspect.Signature([inspect.Parameter("self", kind), *parameters], return_annotation=str)
    call.__signature__ = signature  # type: ignore[attr-defined]
    arguments_doc = "".join(
        f"    {key}: {_one_line(subschema.get('description') or key)}\n"
        for key, subschema in properties.items()
    )
    arguments_doc = arguments_doc and f"\nArgs:\n{arguments_doc}"
    call.__doc__ = f"{_one_line(function['description'] or name)}\n{arguments_doc}"
    return call


_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


def _python_type(schema: Mapping[str, Any]) -> Any:
    """Return the Python type of a JSON schema; `str` if there is none."""
    if choices := schema.get("enum"):
        return Literal[tuple(choices)]
    if "const" in schema:
        return Literal[schema["const"]]
    kinds = schema.get("anyOf") or [schema]
    types = [_TYPES[option["type"]] for option in kinds if option.get("type") in _TYPES]
    annotation = types[0] if types else str
    return annotation | None if any(option.get("type") == "null" for option in kinds) else annotation


def _one_line(text: str) -> str:
    return " ".join(text.split())
