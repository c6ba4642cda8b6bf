"""vLLM's engine, in this process or in its own; its requests are handled on a thread of this process.

In this process the engine has no child that could be orphaned when its actor is killed, and on a CPU it starts several
times faster. A process of its own costs a longer start and a copy of the weights, but its steps never wait for the GIL
while the actor's process encodes and sends messages.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from rl_bridge.config import Config, LoraConfig
from rl_bridge.errors import EngineFailedError, GeneratorError, PromptRefusedError
from rl_bridge.generator.base import ABORTED, Engine, UpdateMetrics
from rl_bridge.generator.vllm_api import (
    EngineStatistics,
    adapter_request,
    build_engine,
    cache_version,
    completion_of,
    end_engine,
    max_adapters,
    prompt_of,
    request_error_types,
    sampling_params,
)
from rl_bridge.generator.vllm_worker import WeightSender
from rl_bridge.metrics.spans import REST, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

POLL_INTERVAL_S = 1.0
"""How often it is checked that the engine's process is alive."""
LOAD_FACTOR = 2.0
"""The timeout of a weight update, as a multiple of how long an engine may go without a token."""
ABORT_TIMEOUT_S = 30.0
"""The longest that aborting requests may take."""
STOP_TIMEOUT_S = 30.0
SLEEP: Final[Mapping[str, Any]] = MappingProxyType({"level": 1, "mode": "keep"})
"""vLLM moves the weights to the host's memory, drops keys and values, and keeps requests in progress."""


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter in the engine, with the calls that it answers; without a request to vLLM, the base model alone."""

    version: PolicyVersion
    request: Any = None
    calls: int = 0


@dataclass(slots=True)
class _Request:
    """A prompt's request; the engine has it once there is a collector of its output."""

    collector: Any = None
    aborted: bool = False


class VllmEngine(Engine):
    """vLLM's engine, in this process or, with `own_process`, in its own. `seed` seeds its random number generator.

    Attributes:
        statistics: vLLM's statistics of its cache and tokens.
    """

    def __init__(self, config: Config, model_path: str, *, seed: int, own_process: bool = False) -> None:
        super().__init__("vllm-engine", stop_timeout_s=STOP_TIMEOUT_S)
        self.statistics = EngineStatistics()
        self.holds_weights = not own_process and config.generator.tensor_parallel == 1
        """Whether its weights are in this process, so that new ones can be passed to it directly."""
        self._own_process = own_process
        self._config = config
        self._rollout = config.rollout
        self._model_path = model_path
        self._seed = seed
        self._llm: Any = None
        self._adapters = [_Adapter(0)]
        """Those that answers in progress began with, and the newest, with which new ones begin."""
        self._adapter_ids = itertools.count(1)
        self._sender = WeightSender()
        self._request_lock = asyncio.Lock()
        """Held while something is passed to the engine; granted in the order of requests."""
        self._weights_lock = asyncio.Lock()
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}
        """The requests in progress that can be aborted, by their prompts' ids."""
        self._activity_counts = {"load weights": 0, "sleep": 0, "generate": 0}
        """The number of tasks in each activity; the first activity with any counts as the engine's."""
        self._last_slow_end = 0.0
        """When it last finished loading weights or falling asleep, in seconds of `time.monotonic`."""
        self._changed = asyncio.Event()
        self._call_ended = asyncio.Event()
        self._probe: Future[bool] | None = None
        """The latest liveness probe that `check` sent to the engine."""
        self._probe_sent_at = 0.0

    def load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> "Future[UpdateMetrics]":
        """See `Engine.load`. While new weights are copied, requests are completed under the old ones.

        vLLM's own pause stops the engine between two steps and drops all keys and values except with `weight_update`
        "keep_cache"; with "continue" it recomputes those of completions in progress when it resumes. An engine that has
        not done this within twice `rollout.generate_timeout_s`, after any requests to be drained first, has failed and
        ends.
        """
        return self._submit(self._load(version, state))

    def sleep(self) -> "Future[None]":
        """See `Engine.sleep`."""
        return self._submit(self._sleep())

    def check(self) -> None:
        """See `Engine.check`; also raises if the engine answers no probe for longer than its activity may take."""
        super().check()
        is_slow = self._activity_counts["load weights"] or self._activity_counts["sleep"]
        limit_s = self._rollout.generate_timeout_s * (LOAD_FACTOR if is_slow else 1.0)
        if self._probe is None or self._probe.done():
            self._probe_sent_at, self._probe = time.monotonic(), self._submit(self._llm.is_paused())
        elif (silent_s := time.monotonic() - max(self._probe_sent_at, self._last_slow_end)) > limit_s:
            raise GeneratorError(
                f"expected the engine to make a step within {limit_s:g} s, it has been at one for {silent_s:.0f} s"
            )

    # The rest runs on the engine's event loop.

    async def _start(self) -> None:
        try:
            with span("start"):
                self._llm = build_engine(
                    self._config,
                    self._model_path,
                    seed=self._seed,
                    statistics=self.statistics,
                    own_process=self._own_process,
                )
            await self._llm.update_weight_version(str(self.version))
        except Exception as error:
            self._end(error)
            raise
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._submit(self._record_spans())
        self._submit(self._watch_health())

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        ids: Sequence[str],
    ) -> list[Completion]:
        requests = [_Request() for _ in prompts]
        self._requests.update(zip(ids, requests, strict=False))
        answered = False
        try:
            async with self._require_progress():
                await self._request_lock.acquire()
                adapter = self._adapters[-1]
                with self._count_call(adapter), self._count_activity("generate"):
                    try:
                        logprobs_from = cache_version(self._rollout, self.version)
                        await self._add_requests(prompts, sampling, seeds, requests, adapter)
                    finally:
                        self._request_lock.release()
                    outputs: list[Any] = [
                        None if request.collector is None else await request.collector.get()
                        for request in requests
                    ]
                    answers = [
                        ABORTED
                        if request.aborted
                        else completion_of(
                            output.outputs[0],
                            cache_version=logprobs_from,
                            adapter_version=None if self._config.pushed_adapter is None else adapter.version,
                        )
                        for request, output in zip(requests, outputs, strict=True)
                    ]
                answered = True
                return answers
        except TimeoutError:
            raise GeneratorError(
                f"the engine has sampled no token for {self._rollout.generate_timeout_s:g} s "
                f"(rollout.generate_timeout_s); not all of {len(prompts)} prompts were answered"
            ) from None
        except GeneratorError:
            raise
        except Exception as error:
            self._end(error)
            raise EngineFailedError(f"the engine has failed: {error}") from error
        finally:
            for prompt_id in ids:
                self._requests.pop(prompt_id, None)
            if not answered:
                await self._abort(requests)

    async def _abort_prompts(self, ids: Sequence[str]) -> None:
        requests = [self._requests[prompt_id] for prompt_id in ids if prompt_id in self._requests]
        for request in requests:
            request.aborted = True  # one that the engine does not have yet never gets there
        await self._abort(requests)

    @contextlib.asynccontextmanager
    async def _require_progress(self) -> AsyncIterator[None]:
        """Raise TimeoutError once the engine has sampled no token of any request for too long.

        Time spent loading weights does not count: that has a timeout of its own.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            since = (
                time.monotonic() if self._activity_counts["load weights"] else max(began, self._last_slow_end)
            )
            remaining_s = self._rollout.generate_timeout_s - self.statistics.seconds_without_token(since)
            if remaining_s <= 0.0:
                deadline.reschedule(loop.time())
            else:
                timer = loop.call_later(remaining_s, check)

        async with asyncio.timeout(None) as deadline:
            timer = loop.call_later(self._rollout.generate_timeout_s, check)
            try:
                yield
            finally:
                timer.cancel()

    async def _abort(self, requests: Sequence[_Request]) -> None:
        ids = [request.collector.request_id for request in requests if request.collector is not None]
        if not ids:
            return
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._llm.abort(ids, internal=True)
        except TimeoutError:
            self._end(GeneratorError(f"expected the engine to abort requests within {ABORT_TIMEOUT_S:g} s"))
        except Exception as error:  # the caller gets the error that led to the abort instead
            self._end(error)

    async def _add_requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        requests: Sequence[_Request],
        adapter: _Adapter,
    ) -> None:
        """Pass prompts to the engine one by one, except those aborted meanwhile, and set each request's collector."""
        try:
            params = sampling_params(sampling, seeds, prompts=len(prompts))
        except request_error_types() as error:
            raise GeneratorError(f"the engine refused settings: {error}") from error
        for index, (prompt, request, engine_sampling) in enumerate(
            zip(prompts, requests, params, strict=True)
        ):
            if request.aborted:
                continue
            try:
                require_tokens(prompt, self._vocabulary)
                engine_prompt = prompt_of(prompt, cache_version(self._rollout, self.version))
                request.collector = await self._llm.add_request(
                    str(next(self._ids)), engine_prompt, engine_sampling, lora_request=adapter.request
                )
            except request_error_types() as error:
                raise PromptRefusedError(index, str(error)) from error
        await self._abort([request for request in requests if request.aborted])  # on their way there

    async def _load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> UpdateMetrics:
        # Shielded from cancellation: an engine left in the middle of it would be paused for good.
        return await asyncio.shield(self._replace_weights(version, state))

    async def _replace_weights(
        self, version: PolicyVersion, state: Mapping[str, Tensor] | None
    ) -> UpdateMetrics:
        async with self._weights_lock:
            received = time.monotonic()
            lora, load, handover = self._config.pushed_adapter, "load_policy", None
            if state is not None and lora is None and not self.holds_weights:
                load, handover = "load_handover", await asyncio.to_thread(self._sender.write, state)
            requested = time.monotonic()
            is_ready = self._is_drained if lora is None else partial(self._has_room, state)
            async with self._hold_requests(f"load version {version}", is_ready, wakes=lora is not None):
                asleep = self.statistics.asleep
                # An adapter is added between two steps; answers in progress keep theirs, and their keys and values.
                pauses = state is not None and lora is None and not asleep
                if asleep:  # the weights alone first: vLLM resumes requests once everything is awake
                    with self._count_activity("load weights"):
                        await self._llm.wake_up(["weights"])
                elif pauses:
                    keep = self._rollout.weight_update == "keep_cache"
                    await self._llm.pause_generation(mode="keep", clear_cache=not keep)
                began = time.monotonic()
                with self._count_activity("load weights"):
                    if state is not None and lora is not None:
                        await self._add_adapter(version, state, lora)
                    elif state is not None:
                        await self._llm.collective_rpc(load, args=(state if handover is None else handover,))
                    await self._llm.update_weight_version(str(version))
                    self.version = version
                    if asleep:
                        await self._llm.wake_up(["kv_cache"])
                    elif pauses:
                        await self._llm.resume_generation()
            now = time.monotonic()
            return UpdateMetrics(
                version=version,
                transport_s=requested - received,
                pause_s=now - requested,
                load_s=now - began,
            )

    async def _sleep(self) -> None:
        await asyncio.shield(self._put_to_sleep())

    async def _put_to_sleep(self) -> None:
        async with self._weights_lock:
            if not self.statistics.asleep:
                async with self._hold_requests("go to sleep", self._is_drained):
                    with self._count_activity("sleep"):
                        await self._llm.sleep(**SLEEP)

    @contextlib.asynccontextmanager
    async def _hold_requests(
        self, action: str, is_ready: Callable[[], bool], *, wakes: bool = False
    ) -> AsyncIterator[None]:
        """Pass no requests to the engine within the block; if the block fails or takes too long, the engine ends.

        Before that, requests in progress are waited for until it is ready; `wakes` wakes a sleeping engine for them.
        """
        limit_s = LOAD_FACTOR * self._rollout.generate_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with self._request_lock:
                if wakes and self.statistics.asleep:
                    with self._count_activity("load weights"):
                        async with asyncio.timeout(limit_s):
                            await self._llm.wake_up(["weights"])
                            await self._llm.wake_up(["kv_cache"])
                # The wait ends in any case, because requests that get no token are aborted.
                while not is_ready():
                    self._call_ended.clear()
                    await self._call_ended.wait()
                async with deadline:
                    yield
        except Exception as error:
            # Some tensors may have been replaced already: the engine's output can no longer be trusted.
            failure = EngineFailedError(
                f"expected the engine to {action} within {limit_s:g} s, it has not"
                if deadline.expired()
                else f"expected the engine to {action}, it failed half-way: {error}"
            )
            self._end(failure)
            raise failure from error

    def _is_drained(self) -> bool:
        """Whether no request is in progress that `rollout.weight_update` wants finished first.

        vLLM's own mode "wait" would leave requests that have not started to the new weights.
        """
        waits = self._rollout.weight_update == "drain" and not self.statistics.asleep
        return not (waits and self._activity_counts["generate"])

    def _has_room(self, state: Mapping[str, Tensor] | None) -> bool:
        """Whether an adapter, or with an empty state the model without one, can be beside those in use.

        Requests with adapters and without are never in one batch: vLLM's kernels for CPUs give the latter an adapter.
        """
        used = [adapter for adapter in self._adapters if adapter.calls]
        if not state or any(adapter.request is None for adapter in used):
            return not used
        return len(used) < max_adapters(self._rollout)

    async def _add_adapter(
        self, version: PolicyVersion, state: Mapping[str, Tensor], lora: LoraConfig
    ) -> None:
        """Have new requests use an adapter, or without tensors none; those that no call uses any more are removed."""
        used = [adapter for adapter in self._adapters if adapter.calls]
        with adapter_request(state, lora, next(self._adapter_ids)) as request:
            for adapter in self._adapters:
                if adapter not in used and adapter.request is not None:
                    await self._llm.remove_lora(adapter.request.lora_int_id)
            if request is not None:
                await self._llm.add_lora(request)
        self._adapters = [*used, _Adapter(version, request)]

    async def _watch_health(self) -> None:
        """End the engine when its process is gone."""
        try:
            while True:
                await self._llm.check_health()
                await asyncio.sleep(POLL_INTERVAL_S)
        except Exception as error:
            self._end(error)

    async def _record_spans(self) -> None:
        """Record the engine's activity as this process's spans: the engine works for this replica alone."""
        while True:
            self._changed.clear()
            current_activity = next(
                (activity for activity, count in self._activity_counts.items() if count), REST
            )
            rest_reason = (
                "turn" if self.statistics.asleep else "prompts" if current_activity == REST else None
            )
            with span(current_activity if rest_reason is None else REST, waits_for=rest_reason):
                await self._changed.wait()

    @contextlib.contextmanager
    def _count_activity(self, activity: str) -> Iterator[None]:
        self._activity_counts[activity] += 1
        self._changed.set()
        try:
            yield
        finally:
            if activity != "generate":  # set before the count changes: `check` reads both on another thread
                self._last_slow_end = time.monotonic()
            self._activity_counts[activity] -= 1
            self._changed.set()

    @contextlib.contextmanager
    def _count_call(self, adapter: _Adapter) -> Iterator[None]:
        adapter.calls += 1
        try:
            yield
        finally:
            adapter.calls -= 1
            self._call_ended.set()

    async def _clean_up(self) -> None:
        if self._llm is not None:
            await end_engine(self._llm)
        self._sender.close()


def require_tokens(prompt: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for a token outside the vocabulary: without a tokenizer vLLM fails only at the embedding."""
    for index, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            raise ValueError(f"expected token ids from 0 to {vocabulary - 1}, got {token!r} at place {index}")
