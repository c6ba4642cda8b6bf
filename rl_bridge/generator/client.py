"""The generator's client: it batches single prompts of many callers into few calls."""

import asyncio
import math
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.services.handle import BalancedEndpoints, StickySession
from rl_bridge.types import Completion, SamplingSettings

ABORT_REPLY_TIMEOUT_S = 2.0
"""How long replies to an abort are waited for. The request itself has been sent by then."""

MAX_TOKENS_PER_CALL = 512
"""The most new tokens that a call may request, over all of its prompts: short answers wait for the call's longest."""

_CLOSED = "the generator is closed"


@dataclass(slots=True, eq=False)
class _PendingPrompt:
    prompt: Sequence[int]
    sampling: SamplingSettings
    seed: int | None
    session: StickySession | None
    id: str
    future: "asyncio.Future[Completion]" = field(default_factory=asyncio.Future)

    def can_batch_with(self, other: "_PendingPrompt") -> bool:
        return self.sampling == other.sampling and (self.seed is None) == (other.seed is None)


@dataclass(slots=True)
class _PromptQueue:
    """The prompts that wait for one replica, or for any, and the calls in flight with the capacity of each."""

    waiting: deque[_PendingPrompt] = field(default_factory=deque)
    calls: "dict[asyncio.Task[None], int]" = field(default_factory=dict)
    scheduled: bool = False


class GeneratorClient:
    """Batches the prompts of concurrent callers.

    While the replicas have as many calls in flight as they should, prompts queue; when a call returns, the queued
    prompts are sent together. So a lone prompt is not delayed, and under load a call carries many prompts: fewer if
    their answers are long, and not more than leaves every replica its share.

    A cancelled coroutine ends no call in another process. So the prompts of callers that are cancelled, and of calls
    that took too long, are aborted by their ids; the others of a call are completed.

    Args:
        policy: The service of `PolicyActor`, or any other with `generate_many` and `abort`.
        max_batch: The most prompts of a call.
        max_calls: The most full calls in flight per replica: one being generated, one waiting at the engine.
        timeout_s: The deadline of one call, including the wait for a replica to serve.
    """

    def __init__(
        self, policy: BalancedEndpoints, *, max_batch: int, max_calls: int = 2, timeout_s: float = 300.0
    ) -> None:
        self._policy = policy
        self._name, self._numbers = uuid.uuid4().hex, count()
        self._to_abort: list[str] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._max_batch = max_batch
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._queues: defaultdict[int | None, _PromptQueue] = defaultdict(_PromptQueue)
        """By replica; the lane of None is for prompts that any replica may complete."""
        self._closed = False

    @contextmanager
    def pin_replica(self, near: StickySession | None = None) -> Iterator[StickySession]:
        """Open a session for one conversation, bound to a replica: that of `near`, which shares its prefix, if any."""
        session = self._policy.session(near=near, max_sessions=self._max_batch)
        try:
            yield session
        finally:
            session.close()

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        seed: int | None = None,
        session: StickySession | None = None,
    ) -> Completion:
        """Complete one prompt, batched with others of equal settings. A seed determines the answer."""
        if self._closed:
            raise GeneratorError(_CLOSED)
        pending = _PendingPrompt(prompt, sampling, seed, session, f"{self._name}-{next(self._numbers)}")
        replica = None if session is None else session.replica
        queue = self._queues[replica]
        queue.waiting.append(pending)
        if not queue.scheduled and self._has_capacity(replica, self._batch_size(sampling)):
            # After everything that is ready to run now, so that those callers' prompts join the batch.
            queue.scheduled = True
            asyncio.get_running_loop().call_soon(self._flush, replica)
        return await pending.future

    def _batch_size(self, sampling: SamplingSettings) -> int:
        """Return how many prompts a call may carry."""
        return max(1, min(self._max_batch, MAX_TOKENS_PER_CALL // max(1, sampling.max_new_tokens)))

    def _has_capacity(self, replica: int | None, size: int) -> bool:
        """Whether one more call of this size may be sent."""
        replicas = max(1, self._policy.serving) if replica is None else 1
        return (
            sum(self._queues[replica].calls.values()) + size <= self._max_calls * self._max_batch * replicas
        )

    def _flush(self, replica: int | None) -> None:
        queue = self._queues[replica]
        queue.scheduled = False
        idle = max(1, self._policy.serving - len(queue.calls)) if replica is None else 1
        share = math.ceil(len(queue.waiting) / idle)
        while queue.waiting and self._has_capacity(replica, self._batch_size(queue.waiting[0].sampling)):
            first = queue.waiting[0]
            size = self._batch_size(first.sampling)
            batch: list[_PendingPrompt] = []
            while queue.waiting and len(batch) < min(size, share) and queue.waiting[0].can_batch_with(first):
                pending = queue.waiting.popleft()
                if not pending.future.done():  # its caller was cancelled
                    batch.append(pending)
            if batch:
                task = asyncio.ensure_future(self._send(batch))
                queue.calls[task] = size
                task.add_done_callback(partial(self._on_batch_done, replica, batch))
                for pending in batch:
                    pending.future.add_done_callback(partial(self._on_prompt_done, pending, batch, task))

    def _on_prompt_done(
        self,
        pending: _PendingPrompt,
        batch: list[_PendingPrompt],
        task: "asyncio.Task[None]",
        future: "asyncio.Future[Completion]",
    ) -> None:
        """Abort a prompt whose caller was cancelled, or the whole call if nobody waits for it."""
        if not future.cancelled() or task.done() or task.cancelling():
            return
        if all(other.future.done() for other in batch):
            task.cancel()  # which aborts its prompts
        else:
            self._abort([pending])

    def _abort(self, prompts: Sequence[_PendingPrompt]) -> None:
        self._to_abort += [pending.id for pending in prompts]
        task = asyncio.ensure_future(self._send_aborts())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_aborts(self) -> None:
        """Abort all prompts that are to be aborted by now, at every replica: one may have taken over another's."""
        ids, self._to_abort = self._to_abort, []
        if ids:
            await self._policy.query_replicas("abort", ids, timeout_s=ABORT_REPLY_TIMEOUT_S)

    def _on_batch_done(
        self, replica: int | None, batch: list[_PendingPrompt], task: "asyncio.Task[None]"
    ) -> None:
        del self._queues[replica].calls[task]
        for pending in batch:  # a task that is cancelled before it starts has not resolved the futures
            if not pending.future.done():
                pending.future.set_exception(GeneratorError(_CLOSED))
        self._flush(replica)

    async def _send(self, batch: list[_PendingPrompt]) -> None:
        completions: list[Completion] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                # Without those of cancelled callers.
                while batch := [pending for pending in batch if not pending.future.done()]:
                    try:
                        # Prompts of sessions whose replica was lost meanwhile follow the first one's, this once.
                        owner = batch[0].session or self._policy
                        seeds = [pending.seed for pending in batch if pending.seed is not None] or None
                        prompts, ids = (
                            [pending.prompt for pending in batch],
                            [pending.id for pending in batch],
                        )
                        completions = await owner.generate_many.route(prompts, batch[0].sampling, seeds, ids)
                        if len(completions) != len(batch):
                            raise GeneratorError(f"expected {len(batch)} completions, got {len(completions)}")
                        break
                    except PromptRefusedError as refusal:
                        # Only that prompt's caller made a mistake: send the others again.
                        _fail([batch[refusal.prompt]], refusal)
        except BaseException as error:
            failure: BaseException = error
            if self._closed and isinstance(error, asyncio.CancelledError):
                failure = GeneratorError(_CLOSED)
            elif isinstance(error, TimeoutError):
                failure = GeneratorError(
                    f"the engine did not answer {len(batch)} prompts in {self._timeout_s:g} s"
                )
            # After other errors the engine has ended the work.
            if isinstance(error, TimeoutError | asyncio.CancelledError):
                self._abort(batch)
            _fail(batch, failure)
            if not isinstance(error, Exception):
                raise
            return
        for pending, completion in zip(batch, completions, strict=True):
            if not pending.future.done() and completion.tokens:
                pending.future.set_result(completion)
        _fail(batch, GeneratorError("the engine aborted the prompt"))

    async def close(self) -> None:
        """Cancel requests in progress and fail all waiters."""
        self._closed = True
        calls = [call for queue in self._queues.values() for call in queue.calls]
        for queue in self._queues.values():
            waiting = list(queue.waiting)  # emptied first, so that a call that ends sends nothing more
            queue.waiting.clear()
            _fail(waiting, GeneratorError(_CLOSED))
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*self._aborts, return_exceptions=True)


def _fail(pending_prompts: Sequence[_PendingPrompt], error: BaseException) -> None:
    for pending in pending_prompts:
        if not pending.future.done():
            pending.future.set_exception(error)
