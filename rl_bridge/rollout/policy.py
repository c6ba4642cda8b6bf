"""The policy as rollouts see it: chats in, completions and their text out."""

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.types import Completion, SamplingSettings, Turn


class Generator(Protocol):
    """The interface of clients that complete prompts: a `GeneratorClient`, or a settled one."""

    def settled(self) -> "AbstractContextManager[Generator]":
        """The same generator, for prompts that begin alike."""

    async def complete(
        self, prompt: Sequence[int], sampling: SamplingSettings, seed: int | None = None
    ) -> Completion:
        """Answer one prompt."""


class ChatPolicy:
    """A generator behind a chat template: answers of `max_new_tokens`, prompt and answer of `max_length` at most."""

    def __init__(
        self, tokenizer: ChatTokenizer, generator: Generator, *, max_new_tokens: int, max_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._generator = generator
        self._max_new_tokens = max_new_tokens
        self._longest_prompt = max_length - max_new_tokens

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int] | None:
        """The token ids of a chat; None where an answer would not fit behind them."""
        prompt = self._tokenizer.prompt(messages)
        return prompt if self.has_room(prompt) else None

    def has_room(self, prompt: Sequence[int]) -> bool:
        """Whether an answer fits behind a prompt."""
        return len(prompt) <= self._longest_prompt

    def may_have_room(self, prompt: Sequence[int], messages: Sequence[ChatMessage]) -> bool:
        """False where no answer can fit behind a prompt and messages, however they are tokenised.

        To tokenise megabytes, of a tool that gave a whole file, would hold up all that this process does.
        """
        characters = sum(len(message["content"]) for message in messages)
        return characters <= (self._longest_prompt - len(prompt)) * self._tokenizer.longest_token

    @contextmanager
    def settled(self) -> Iterator["ChatPolicy"]:
        """The same policy for one conversation, or from within that for those that begin like it.

        Their prompts go to one replica of the generator, which has the keys and values of what they begin with.
        """
        with self._generator.settled() as generator:
            policy = copy.copy(self)
            policy._generator = generator
            yield policy

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The checkpoint's."""
        return self._tokenizer

    def converse(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """Begin a chat that will grow; see `Conversation`."""
        return Conversation(self._tokenizer, messages, functions)

    async def answer(
        self, prompt: Sequence[int], *, temperature: float, seed: int | None = None
    ) -> tuple[Turn, str]:
        """Answer one prompt; returns the exchange, and the text of the answer.

        A temperature of 0 takes the most likely token. Without a seed the engine's own generator draws.
        """
        sampling = SamplingSettings(
            temperature=temperature,
            max_new_tokens=self._max_new_tokens,
            stop_token_ids=self._tokenizer.stop_token_ids,
        )
        completion = await self._generator.complete(prompt, sampling, seed)
        return Turn(prompt=prompt, completion=completion), self._tokenizer.text(completion.tokens)

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """The most likely answer to each chat, as text."""
        prompts = [self._tokenizer.prompt(chat) for chat in chats]
        answers = await asyncio.gather(*(self.answer(prompt, temperature=0.0) for prompt in prompts))
        return [text for _, text in answers]
