"""A checkpoint, served by vLLM's engine, as a policy of `ropewalk eval`."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openenv_core.errors import ConfigurationError
from openenv_core.evaluation.policies import ChatAnswer, PolicyError, RequestedCall
from openenv_core.evaluation.records import EvaluationSettings
from rl_bridge.config import Config
from rl_bridge.errors import BridgeError, ConfigError, MissingDependencyError
from rl_bridge.generator.base import Engine
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.tokens.tool_calls import CallStyle, UnparsableCall, parse_tool_calls
from rl_bridge.types import Completion, SamplingSettings

MAX_LENGTH = 32_768
"""The most tokens of prompt and answer together, even if the checkpoint allows more: the cache has to fit."""


class CheckpointModel:
    """A `ChatModel` (`openenv_core.evaluation.policies`); prompt and answer have at most `max_length` tokens."""

    def __init__(self, settings: EvaluationSettings, engine: Engine, max_length: int) -> None:
        self.tokenizer = ChatTokenizer(Path(os.path.expanduser(settings.policy)))
        self.engine = engine
        self.max_prompt_length = max_length - 1
        self.sampling = SamplingSettings(
            temperature=settings.temperature,
            max_new_tokens=settings.max_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
        )

    @classmethod
    async def open(cls, settings: EvaluationSettings) -> "CheckpointModel":
        """Start the engine; ConfigurationError if there is no checkpoint, or a package or a setting is missing."""
        with _convert_errors():
            engine, max_length = await asyncio.to_thread(_make_engine, settings)
            try:
                await asyncio.wrap_future(engine.start())
                return cls(settings, engine, max_length)
            except BaseException:
                await asyncio.to_thread(engine.close)
                raise

    def begin(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], seed: int
    ) -> "CheckpointChat":
        """See `ChatModel.begin`."""
        with _convert_errors():
            chat = Conversation(self.tokenizer, [_to_chat_message(message) for message in messages], tools)
        if tools and self.tokenizer.call_style is None:
            raise PolicyError(
                "expected a chat template that defines how tool calls are written, got one that does not; "
                "--mode text has them written as text"
            )
        return CheckpointChat(self, chat, seed, calls=bool(tools))

    async def close(self) -> None:
        """Close the engine."""
        await asyncio.to_thread(self.engine.close)


class CheckpointChat:
    """A `Chat` (`openenv_core.evaluation.policies`). Nothing is tokenized twice."""

    def __init__(self, model: CheckpointModel, chat: Conversation, seed: int, *, calls: bool) -> None:
        self._model = model
        self._chat = chat
        self._seed = seed
        self._calls = calls
        self._answer: Completion | None = None

    async def answer(self) -> ChatAnswer | None:
        """See `Chat.answer`. As in training, an answer that was cut counts if it can be read."""
        model, prompt = self._model, self._chat.prompt
        if len(prompt) > model.max_prompt_length:
            return None
        seeds = [self._seed] if model.sampling.temperature > 0 else None
        with _convert_errors():
            (completion,) = await asyncio.wrap_future(model.engine.generate([prompt], model.sampling, seeds))
        self._seed += 1
        self._answer = completion
        if not self._calls:
            return ChatAnswer(model.tokenizer.text(completion.tokens))
        parsed = parse_tool_calls(
            model.tokenizer.decode_written(completion.tokens),
            style=model.tokenizer.call_style or CallStyle.HERMES,
            functions=self._chat.functions,
            repair=False,
            in_thought=model.tokenizer.opens_thought(prompt),
        )
        text = model.tokenizer.text(completion.tokens)
        if isinstance(parsed, UnparsableCall):  # the caller then tells the model what was expected
            return ChatAnswer(text)
        calls = tuple(RequestedCall("", call.name, dict(call.arguments)) for call in parsed)
        return ChatAnswer(text, calls)

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """See `Chat.add_messages`."""
        assert self._answer is not None
        with _convert_errors():
            self._chat.append_turn(
                self._answer.tokens,
                [_to_chat_message(message) for message in messages],
                stopped=self._answer.stopped,
            )


def _make_engine(settings: EvaluationSettings) -> tuple[Engine, int]:
    """Make an engine of a checkpoint; returns it and its greatest length of prompt and answer, in tokens."""
    folder = Path(os.path.expanduser(settings.policy)).absolute()
    try:
        hf_config = json.loads((folder / "config.json").read_bytes())
        max_length = min(int(hf_config.get("max_position_embeddings", MAX_LENGTH)), MAX_LENGTH)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"expected a checkpoint in the Hugging Face layout at {str(folder)!r}: {error}"
        ) from error
    if settings.max_tokens >= max_length:
        raise ConfigError(
            f"expected --max-tokens below {max_length}, which is all that the checkpoint takes, got "
            f"{settings.max_tokens}"
        )
    try:
        from rl_bridge.devices import own_device
        from rl_bridge.generator.replica import make_engine
    except ImportError as error:
        raise MissingDependencyError.of_import(error) from error
    rollout = {
        "max_length": max_length,
        "max_new_tokens": settings.max_tokens,
        "max_num_seqs": min(settings.sessions, 256),
        "generate_timeout_s": settings.policy_timeout_s,
    }
    roles = {"policy": {"gpus": int(own_device().type == "cuda")}}  # determines the dtype, as in a run
    config = Config.model_validate({"rollout": rollout, "monarch": {"roles": roles}})
    return make_engine(config, folder, seed=settings.seed), max_length


def _to_chat_message(message: Mapping[str, Any]) -> ChatMessage:
    return {key: message[key] for key in ("role", "content", "name") if key in message}  # type: ignore[return-value]


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Translate the bridge's errors into the core's."""
    try:
        yield
    except (ConfigError, MissingDependencyError) as error:
        raise ConfigurationError(str(error)) from error
    except BridgeError as error:
        raise PolicyError(str(error)) from error
