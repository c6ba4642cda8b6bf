"""The base of engines: an event loop on a thread of its own, and futures for callers on other threads."""

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

    from rl_bridge.generator.vllm_api import EngineStatistics


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadMetrics:
    """What taking new weights cost, in seconds.

    Attributes:
        pause_s: In which no new prompt was begun.
        load_s: Of these, in which the weights were replaced and nothing was generated at all. In the rest what had been
            asked for before was answered.
        handover_s: Before the pause, in which they were copied to where the engine can read them; 0 of one in this
            process.
    """

    pause_s: float
    load_s: float
    handover_s: float = 0.0


GRACE_PERIOD_S = 5.0
"""What has been submitted ends by itself when the end is announced; for what does not there is a bound."""

T = TypeVar("T")


class Engine(ABC):
    """Answers prompts, and takes new weights.

    All of it is coroutines, begun in the order in which they are submitted, from whatever thread, in an event loop on a
    thread of the engine's own. At its end `_clean_up` is called there, when nothing else runs any more.

    Attributes:
        version: The weights that it samples from.
        ended: Done when it is no more: with None after `close`, otherwise with what it died of.
        statistics: What vLLM says of its cache and its tokens; None of an engine that is not ours.
    """

    statistics: "EngineStatistics | None"

    def __init__(self, name: str, *, stop_timeout_s: float) -> None:
        self.version: PolicyVersion = 0
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # or who does not wait any more would take it from the others
        self._stop_timeout_s = stop_timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._under_way: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> "Future[None]":
        """Begin loading; the future is done when it can answer, or has failed."""
        with self._lock:
            self._loop = asyncio.new_event_loop()
        self._thread.start()
        return self._submit(self._start())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> "Future[list[Completion]]":
        """Answer prompts, each a sequence of token ids; one completion a prompt, in order. Cancelling ends the work.

        Seeds, one a prompt, from 0, decide the answers, whatever else the engine works on. Without, they are drawn from
        the engine's own generator.

        Raises:
            GeneratorError: The engine has failed, or is closed. The future has one, too, where a prompt is refused, or
                the engine has sampled no token for `rollout.generate_timeout_s` while it waited.
        """
        return self._submit(self._generate(prompts, sampling, seeds))

    @abstractmethod
    def load(self, version: PolicyVersion, state: "Mapping[str, Tensor] | None") -> "Future[LoadMetrics]":
        """Take new weights, which tokens report from then on, and wake where it sleeps.

        With `rollout.weight_update` "drain", what was asked for before is answered first, under the old ones.

        With "keep_cache" answers under way go on with the keys and values that they have: the least is computed, and a
        token's distribution is that of its weights after a context that older ones have read. Its log-probability is of
        just that distribution, so ratios against it are right, and larger. Of other prompts' keys and values a prompt
        is given none that are of older weights than it was asked at (`prompt_of`).

        With "continue", answers under way go on under the new ones. The keys and values of their tokens so far are
        computed anew. So every token is sampled from the distribution that the weights it names have after the tokens
        before it, which is what the trainer computes. And vLLM can drop the cached prefixes of the old weights, which
        it cannot while requests hold some; new prompts would be answered from them.

        The state has tensors under their Hugging Face names; with `model.lora.push` of "adapter" those of the adapters
        under PEFT's, or none for the weights that the engine began with. They must not change until the future is done.
        None: the weights that it has are those. Where replacing the weights fails half-way the engine ends.
        """

    @abstractmethod
    def sleep(self) -> "Future[None]":
        """Answer nothing until the next `load`, and leave the GPU's memory to others; on a CPU all stays where it is.

        Answers under way are as for `load`: with `rollout.weight_update` "drain" they come first, with "continue" they
        go on when it wakes, their keys and values computed anew.
        """

    def check(self) -> None:
        """Raise GeneratorError where it has failed, or is closed."""
        with self._lock:
            if self._closed:
                raise self._error()

    def close(self) -> None:
        """Stop the engine and its thread. Requests in progress fail."""
        self._end()
        if self._thread.is_alive():
            self._thread.join(self._stop_timeout_s)

    @abstractmethod
    async def _start(self) -> None: ...

    @abstractmethod
    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None
    ) -> list[Completion]: ...

    @abstractmethod
    async def _clean_up(self) -> None: ...

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have a coroutine run; cancelling the future cancels it. GeneratorError once the engine has ended."""
        with self._lock:
            if self._closed or self._loop is None:
                work.close()
                raise self._error()
            future = asyncio.run_coroutine_threadsafe(self._await_or_fail(work), self._loop)
            self._under_way.add(future)  # before the end can be announced, which looks for it there
        future.add_done_callback(self._under_way.discard)
        return future

    def _end(self, failure: BaseException | None = None) -> None:
        """Reject new requests, and fail those in progress; returns at once. Only the first error counts."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._failure = True, failure
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._ending.set)

    def _error(self) -> GeneratorError:
        if self._failure is None:
            return GeneratorError("the engine is closed")
        return EngineFailedError(f"the engine has failed: {self._failure}")

    async def _await_or_fail(self, work: Coroutine[Any, Any, T]) -> T:
        working, ending = asyncio.ensure_future(work), asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise self._error() from self._failure
        finally:
            ending.cancel()
            working.cancel()
            await asyncio.wait({working})
        return working.result()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._until_ended())
        except BaseException as error:  # the thread's death must reach whoever waits
            self._end(error)
            self._failure = self._failure or error
        if self._failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._failure)

    async def _until_ended(self) -> None:
        await self._ending.wait()
        under_way = [asyncio.wrap_future(future) for future in list(self._under_way)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_PERIOD_S):
                await asyncio.gather(*under_way, return_exceptions=True)
        await self._clean_up()
