"""The policy for rollouts: chats in, completions and their text out."""

import asyncio
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rl_bridge.services.handle import StickySession
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.types import Completion, SamplingSettings, Turn


class Generator(Protocol):
    """The interface for completing prompts: that of a `GeneratorClient`."""

    def pin_replica(self, near: StickySession | None = None) -> AbstractContextManager[StickySession | None]:
        """Open a session for prompts that share a prefix, which go to one replica: that of `near`, if any."""

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        seed: int | None = None,
        session: StickySession | None = None,
    ) -> Completion:
        """Complete one prompt, by the replica of its session, if any."""


class ChatPolicy:
    """A generator behind a chat template.

    An answer has at most `max_new_tokens` tokens, prompt and answer together at most `max_length`: as the engine was
    started with the same limit, it ends an answer there.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, generator: Generator, *, max_new_tokens: int, max_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._generator = generator
        self._session: StickySession | None = None
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        self._max_prompt_length = max_length - 1

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int] | None:
        """Return the token ids of a chat; None if there is no room for an answer after them."""
        prompt = self._tokenizer.prompt(messages)
        return prompt if self.has_room(prompt) else None

    def has_room(self, prompt: Sequence[int]) -> bool:
        """Whether there is room for an answer after a prompt, be it of a single token."""
        return len(prompt) <= self._max_prompt_length

    def may_have_room(self, prompt: Sequence[int], messages: Sequence[ChatMessage]) -> bool:
        """Whether there could be room after a prompt and messages, by a bound that needs no tokenization.

        Tokenizing megabytes, such as a whole file that a tool returned, would block this process.
        """
        characters = sum(len(message["content"]) for message in messages)
        return characters <= (self._max_prompt_length - len(prompt)) * self._tokenizer.max_token_chars

    @contextmanager
    def pin_replica(self) -> Iterator["ChatPolicy"]:
        """Return the same policy for one conversation, or, nested, for those that share its prefix.

        Their prompts go to one replica of the generator, whose cache holds the keys and values of the prefix.
        """
        with self._generator.pin_replica(self._session) as session:
            policy = copy.copy(self)
            policy._session = session
            yield policy

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The checkpoint's tokenizer."""
        return self._tokenizer

    def converse(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """Begin a growing chat; see `Conversation`."""
        return Conversation(self._tokenizer, messages, functions)

    async def answer(
        self,
        prompt: Sequence[int],
        *,
        temperature: float,
        seed: int | None = None,
        max_new_tokens: int | None = None,
    ) -> tuple[Turn, str]:
        """Answer one prompt; returns the turn and the text of the answer.

        A temperature of 0 takes the most likely token. Without a seed the engine's own generator samples. With a
        `max_new_tokens` below the policy's own, the answer has at most so many.
        """
        sampling = SamplingSettings(
            temperature=temperature,
            max_new_tokens=min(max_new_tokens or self.max_new_tokens, self.max_new_tokens),
            stop_token_ids=self._tokenizer.stop_token_ids,
        )
        completion = await self._generator.complete(prompt, sampling, seed, self._session)
        return Turn(prompt=prompt, completion=completion), self._tokenizer.text(completion.tokens)

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Return the most likely answer to each chat, as text."""
        prompts = [self._tokenizer.prompt(chat) for chat in chats]
        answers = await asyncio.gather(*(self.answer(prompt, temperature=0.0) for prompt in prompts))
        return [text for _, text in answers]

    async def answer_probabilities(
        self, chats: Sequence[Sequence[ChatMessage]], *, samples: int
    ) -> list[dict[str, float]]:
        """Return the probabilities, at temperature 1, of the answers to each chat that were met in so many samples.

        They are exact for the answers met, as the engine returns them, and others are missing. The samples have seeds
        of their own, so that the same weights give the same result.
        """
        prompts = [self._tokenizer.prompt(chat) for chat in chats]
        asked = [(prompt, seed) for prompt in prompts for seed in range(samples)]
        answers = await asyncio.gather(
            *(self.answer(prompt, temperature=1.0, seed=seed) for prompt, seed in asked)
        )
        results: list[dict[str, float]] = []
        for first in range(0, len(answers), samples):
            # Several sequences of tokens may have one text.
            met = {
                tuple(turn.completion.tokens): (turn, text) for turn, text in answers[first : first + samples]
            }
            found: dict[str, float] = {}
            for turn, text in met.values():
                found[text] = found.get(text, 0.0) + math.exp(math.fsum(turn.completion.logprobs))
            results.append(found)
        return results
