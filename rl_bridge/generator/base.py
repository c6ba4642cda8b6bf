"""The base class of engines: an event loop on its own thread, with futures for callers on other threads."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rl_bridge.errors import EngineFailedError, GeneratorError
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateMetrics:
    """The durations of a weight update, in seconds.

    Attributes:
        transport_s: The time until the tensors had arrived where the engine can read them, during which generation went
            on.
        pause_s: The time in which no new prompt was started.
        load_s: The part of the pause in which the weights were replaced and nothing was generated. In the rest, earlier
            requests were completed.
    """

    version: PolicyVersion
    transport_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0


GRACE_PERIOD_S = 5.0
"""The longest wait for submitted work when the engine ends; such work normally ends by itself."""

ABORTED = Completion(tokens=(), logprobs=(), versions=(), stopped=False)
"""The completion of an aborted prompt; every other one has a token."""

T = TypeVar("T")


class Engine(ABC):
    """Completes prompts and takes new weights.

    All work is coroutines on an event loop on the engine's own thread; they can be submitted from any thread and start
    in the order of submission. At the end `_clean_up` is called there, after all other work.

    Attributes:
        version: The version of the weights that it samples from.
        ended: Done when the engine has ended: with None after `close`, otherwise with its error.
    """

    def __init__(self, name: str, *, stop_timeout_s: float) -> None:
        self.version: PolicyVersion = 0
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # otherwise one cancelled waiter would cancel it for all
        self._stop_timeout_s = stop_timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_requested = asyncio.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> "Future[None]":
        """Start loading; the future is done when the engine can generate, or has failed."""
        with self._lock:
            self._loop = asyncio.new_event_loop()
        self._thread.start()
        return self._submit(self._start())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None = None,
        ids: Sequence[str] = (),
    ) -> "Future[list[Completion]]":
        """Complete prompts, each a sequence of token ids; one completion per prompt, in order.

        Cancelling the future ends the work. Seeds, one per prompt and not negative, determine the completions whatever
        else the engine works on; without them the engine's own generator samples. Ids, one per prompt, are for `abort`.

        Raises:
            GeneratorError: The engine has failed or is closed. The future, too, gets one if a prompt is refused or the
                engine has sampled no token for `rollout.generate_timeout_s` while it waited.
        """
        return self._submit(self._generate(prompts, sampling, seeds, ids))

    def abort(self, ids: Sequence[str]) -> "Future[None]":
        """End the work on prompts, whose completions become `ABORTED`; those of the same call are completed.

        Ids of no prompt in progress are ignored. Raises as `generate` does.
        """
        return self._submit(self._abort_prompts(ids))

    @abstractmethod
    def load(self, version: PolicyVersion, state: "Mapping[str, Tensor] | None") -> "Future[UpdateMetrics]":
        """Load new weights, whose version tokens report from then on; wakes a sleeping engine.

        With `rollout.weight_update` "drain", earlier requests are completed first, under the old weights.

        With "keep_cache", completions in progress continue with their cached keys and values. That costs the least
        computation; a token's distribution is that of its weights given a context computed by older ones. Its
        log-probability is of exactly that distribution, so ratios against it are right, and larger. A prompt never
        reuses other prompts' keys and values of older weights than those at the time of its request (`prompt_of`).

        With "continue", completions in progress continue under the new weights, with the keys and values of their
        tokens so far recomputed. So every token is sampled from the distribution of the weights that it reports given
        the tokens before it, which is what the trainer computes. vLLM can then also drop the cached prefixes of the
        old weights, which it cannot do while requests hold some, and which new prompts would otherwise reuse.

        `state` has tensors under their Hugging Face names. With `model.lora.push` of "adapter" it has those of the
        adapters under PEFT's names, or none for the weights that the engine started with. With "continue", completions
        in progress then finish with the adapter that they began with, whose version their tokens report. The tensors
        must not change until the future is done. A `state` of None means that the engine has these weights already. If
        replacing the weights fails half-way, the engine ends.
        """

    @abstractmethod
    def sleep(self) -> "Future[None]":
        """Generate nothing until the next `load`, and free the GPU's memory; on a CPU everything stays in memory.

        Completions in progress are handled as in `load`: with `rollout.weight_update` "drain" they are finished first,
        with "continue" they go on when the engine wakes, with their keys and values recomputed.
        """

    def check(self) -> None:
        """Raise GeneratorError if the engine has failed or is closed."""
        with self._lock:
            if self._closed:
                raise self._make_error()

    def close(self) -> None:
        """Stop the engine and its thread. Requests in progress fail."""
        self._end()
        if self._thread.is_alive():
            self._thread.join(self._stop_timeout_s)

    @abstractmethod
    async def _start(self) -> None: ...

    @abstractmethod
    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        ids: Sequence[str],
    ) -> list[Completion]: ...

    @abstractmethod
    async def _abort_prompts(self, ids: Sequence[str]) -> None: ...

    @abstractmethod
    async def _clean_up(self) -> None: ...

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine; cancelling the future cancels it. Raises GeneratorError once the engine has ended."""
        with self._lock:
            if self._closed or self._loop is None:
                work.close()
                raise self._make_error()
            future = asyncio.run_coroutine_threadsafe(self._await_or_fail(work), self._loop)
            self._futures.add(future)  # under the lock, so that the engine's end waits for it
        future.add_done_callback(self._futures.discard)
        return future

    def _end(self, failure: BaseException | None = None) -> None:
        """Reject new requests, and fail those in progress; returns at once. Only the first error counts."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._failure = True, failure
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_requested.set)

    def _make_error(self) -> GeneratorError:
        if self._failure is None:
            return GeneratorError("the engine is closed")
        return EngineFailedError(f"the engine has failed: {self._failure}")

    async def _await_or_fail(self, work: Coroutine[Any, Any, T]) -> T:
        task, end_wait = asyncio.ensure_future(work), asyncio.ensure_future(self._end_requested.wait())
        try:
            await asyncio.wait({task, end_wait}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._make_error() from self._failure
        finally:
            end_wait.cancel()
            task.cancel()
            await asyncio.wait({task})
        return task.result()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._run_until_ended())
        except BaseException as error:  # waiters must learn that the thread has died
            self._end(error)
            self._failure = self._failure or error
        if self._failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._failure)

    async def _run_until_ended(self) -> None:
        await self._end_requested.wait()
        futures = [asyncio.wrap_future(future) for future in list(self._futures)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_PERIOD_S):
                await asyncio.gather(*futures, return_exceptions=True)
        await self._clean_up()
