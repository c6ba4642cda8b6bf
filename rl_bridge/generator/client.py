"""The caller's side of the generator: many callers of one prompt each, few calls of many prompts."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from rl_bridge.errors import GeneratorError
from rl_bridge.types import Completion, SamplingSettings

GenerateCall = Callable[[list[Sequence[int]], SamplingSettings], Awaitable[list[Completion]]]
"""Sends one batch to the engine, wherever that is."""

_CLOSED = "the generator is closed"


class GeneratorClient:
    """Gathers the prompts of concurrent callers into batches.

    While `max_calls` batches are under way, prompts gather; when one comes back, those that have gathered
    go out together. So a lone prompt is not delayed, and under load a call carries many.

    Args:
        call: Sends a batch; usually an actor's endpoint.
        max_batch: Prompts a call at most.
        max_calls: Calls under way at most: one being generated, one waiting at the engine.
        timeout_s: How long one call may take.
    """

    def __init__(
        self, call: GenerateCall, *, max_batch: int, max_calls: int = 2, timeout_s: float = 300.0
    ) -> None:
        self._call = call
        self._max_batch = max_batch
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[Sequence[int], SamplingSettings, asyncio.Future[Completion]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._closed = False

    async def complete(self, prompt: Sequence[int], sampling: SamplingSettings) -> Completion:
        """Answer one prompt.

        Args:
            prompt: Token ids.
            sampling: How to sample; prompts with equal settings travel together.

        Raises:
            GeneratorError: The engine failed, refused the prompt, or did not answer in time; or the client is
                closed.
        """
        if self._closed:
            raise GeneratorError(_CLOSED)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((prompt, sampling, future))
        if not self._scheduled and len(self._calls) < self._max_calls:
            # After everything that is ready to run now: those callers' prompts go along.
            self._scheduled = True
            loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < self._max_calls:
            sampling = self._waiting[0][1]
            batch: list[tuple[Sequence[int], asyncio.Future[Completion]]] = []
            while self._waiting and len(batch) < self._max_batch and self._waiting[0][1] == sampling:
                prompt, _, future = self._waiting.popleft()
                if not future.done():  # its caller has been cancelled
                    batch.append((prompt, future))
            if batch:
                task = asyncio.ensure_future(self._send(batch, sampling))
                self._calls.add(task)
                task.add_done_callback(partial(self._finished, batch))

    def _finished(
        self, batch: list[tuple[Sequence[int], asyncio.Future[Completion]]], task: "asyncio.Task[None]"
    ) -> None:
        self._calls.discard(task)
        for _, future in batch:  # a task that is cancelled before it begins has told nobody
            if not future.done():
                future.set_exception(GeneratorError(_CLOSED))
        self._flush()

    async def _send(
        self, batch: list[tuple[Sequence[int], asyncio.Future[Completion]]], sampling: SamplingSettings
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                completions = await self._call([prompt for prompt, _ in batch], sampling)
            if len(completions) != len(batch):
                raise GeneratorError(f"expected {len(batch)} completions, got {len(completions)}")
        except BaseException as error:
            failure: BaseException = error
            if self._closed and isinstance(error, asyncio.CancelledError):
                failure = GeneratorError(_CLOSED)
            elif isinstance(error, TimeoutError):
                failure = GeneratorError(
                    f"the engine did not answer {len(batch)} prompts in {self._timeout_s:g} s"
                )
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)

    async def close(self) -> None:
        """Cancel what is under way and fail whoever waits."""
        self._closed = True
        while self._waiting:  # first, so that a call that ends sends nothing more
            _, _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(GeneratorError(_CLOSED))
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
