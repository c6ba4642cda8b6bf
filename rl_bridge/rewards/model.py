"""A learned reward model: a language model with a scalar head."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from rl_bridge.devices import own_device
from rl_bridge.errors import BridgeError, MissingDependencyError, ModelError, RewardError
from rl_bridge.metrics.spans import span
from rl_bridge.tokens.chat import ChatMessage

try:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error

logger = logging.getLogger(__name__)

MAX_BATCH = 16
"""Responses per forward pass."""

Prompt: TypeAlias = str | Sequence[ChatMessage]


class RewardModel:
    """Scores responses by a checkpoint for sequence classification with one label, in the Hugging Face layout.

    A response has no reward if it is longer than `max_length` tokens, the prompt included.

    Raises:
        ModelError: The checkpoint cannot be loaded, or does not have exactly one label.
    """

    def __init__(self, path: str, *, max_length: int) -> None:
        self._path = path
        self._max_length = max_length
        self._device = own_device()
        torch.set_num_threads(1)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._model = AutoModelForSequenceClassification.from_pretrained(
                path, local_files_only=True, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"expected a reward model in the Hugging Face layout at {path!r}: {error}"
            ) from error
        if self._model.config.num_labels != 1:
            raise ModelError(
                f"expected a reward model with one label at {path!r}, got {self._model.config.num_labels}; "
                "a reward is one number"
            )
        self._model.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """Score responses to prompts (texts or chats).

        Returns:
            The rewards, shape [B]; None for a response that is too long.

        Raises:
            RewardError: The model's output is not finite.
        """
        with span("score"):
            rows = [self._tokenize(prompt, response) for prompt, response in pairs]
            rewards: list[float | None] = [None] * len(rows)
            short_enough = [index for index, row in enumerate(rows) if 0 < len(row) <= self._max_length]
            for first in range(0, len(short_enough), MAX_BATCH):
                indices = short_enough[first : first + MAX_BATCH]
                values = self._forward([rows[index] for index in indices])
                for index, value in zip(indices, values, strict=True):
                    if not math.isfinite(value):
                        raise RewardError(
                            f"expected a finite reward of the model at {self._path!r}, got {value}; "
                            "look at its weights"
                        )
                    rewards[index] = value
        return rewards

    def _tokenize(self, prompt: Prompt, response: str) -> list[int]:
        if not self._tokenizer.chat_template:
            if not isinstance(prompt, str):
                prompt = "\n".join(message["content"] for message in prompt)
            return list(self._tokenizer.encode(f"{prompt}\n{response}"))
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = self._tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": response}], tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, rows))
        # The model reads its score at the last token that is not padding, which it finds by the padding id. Checkpoints
        # pad with their end token, which also ends texts; so we use an id that no text of the batch contains.
        padding = next(
            token for token in range(longest * len(rows) + 1) if not any(token in row for row in rows)
        )
        self._model.config.pad_token_id = padding
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return [float(value) for value in logits.float().squeeze(-1).cpu()]


class RewardBatches:
    """Batches concurrent calls and scores each batch in a thread, while the next one gathers."""

    def __init__(
        self, score: Callable[[Sequence[tuple[Prompt, str]]], list[float | None]], *, max_batch: int
    ) -> None:
        self._score = score
        self._max_batch = max_batch
        self._queue: deque[tuple[tuple[Prompt, str], asyncio.Future[float | None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def evaluate(self, prompt: Prompt, response: str) -> float | None:
        """Score one response; RewardError if the model fails."""
        future: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._queue.append(((prompt, response), future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._queue:
                count = min(self._max_batch, len(self._queue))
                batch = [self._queue.popleft() for _ in range(count)]
                await self._send([(pair, future) for pair, future in batch if not future.done()])
        finally:
            self._task = None

    async def _send(self, batch: Sequence[tuple[tuple[Prompt, str], "asyncio.Future[float | None]"]]) -> None:
        rewards: list[float | None] = []
        failure: BridgeError | None = None
        try:
            rewards = await asyncio.to_thread(self._score, [pair for pair, _ in batch])
        except BridgeError as error:
            failure = error
        except Exception as error:
            logger.exception("the reward model failed")
            failure = RewardError(f"expected rewards of the model, got {type(error).__name__}: {error}")
        for index, (_, future) in enumerate(batch):
            if future.done():  # the caller was cancelled
                continue
            if failure is None:
                future.set_result(rewards[index])
            else:
                future.set_exception(failure)
