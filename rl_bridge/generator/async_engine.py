"""vLLM's AsyncLLM: the engine in a process of its own, its requests and answers on a thread of this one.

Beside `VllmEngine` it costs a longer start and a copy of the weights, and gives steps that wait for nobody: what goes
on in the actor's process, messages and their encoding, does not take the interpreter's lock from the engine.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from rl_bridge.config import Config, LoraConfig
from rl_bridge.errors import EngineFailedError, GeneratorError, PromptRefusedError
from rl_bridge.generator.base import LoadMetrics, LoopEngine, require_signs_of_life
from rl_bridge.generator.engine import (
    MAX_WAITING_BATCHES,
    SLEEP,
    STOP_TIMEOUT_S,
    require_tokens,
)
from rl_bridge.generator.vllm_api import (
    EngineStatistics,
    adapter_request,
    build_async_engine,
    completion_of,
    end_async_engine,
    kept_from,
    prompt_of,
    refusals,
    sampling_params,
)
from rl_bridge.generator.vllm_worker import WeightSender
from rl_bridge.metrics.spans import REST, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

POLL_INTERVAL_S = 1.0
"""How often the engine's process is asked whether it is there."""
LOAD_FACTOR = 2.0
"""New weights may take so many times as long as answers: those under way come first, then it is the weights' turn."""
ABORT_TIMEOUT_S = 30.0
"""For the engine to hear that nobody wants some answers any more."""


class AsyncVllmEngine(LoopEngine):
    """vLLM's `AsyncLLM`. `seed` is of its own generator of random numbers."""

    statistics: EngineStatistics

    def __init__(self, config: Config, model_path: str, *, seed: int) -> None:
        super().__init__("vllm-async-engine", stop_timeout_s=STOP_TIMEOUT_S)
        self.statistics = EngineStatistics()
        self._config = config
        self._rollout = config.rollout
        self._model_path = model_path
        self._seed = seed
        self._llm: Any = None
        self._adapter: Any = None
        self._adapter_ids = itertools.count(1)
        self._sender = WeightSender()
        self._in_order = asyncio.Lock()
        """Held by who hands something to the engine; it goes round in the order of asking."""
        self._replacing = asyncio.Lock()
        self._ids = itertools.count()
        self._waiting = 0
        self._doing = {"load weights": 0, "sleep": 0, "generate": 0}
        """How many do what; the first that anybody does is what the engine is said to do."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked: float | None = None
        """When the engine was asked for a sign of life that has not come yet."""

    def load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> "Future[LoadMetrics]":
        """See `Engine.load`. The old ones answer what is asked for while they are copied.

        The engine is paused for it by its own means: it stops between two steps and drops all keys and values but with
        `weight_update` "keep_cache"; with "continue" it computes those of answers under way anew when it goes on. An
        engine that has not done it within twice `rollout.generate_timeout_s`, with what it answers first, has failed
        and ends.
        """
        return self._thread.submit(self._load(version, state))

    def sleep(self) -> "Future[None]":
        """See `Engine.sleep`."""
        return self._thread.submit(self._sleep())

    def check(self) -> None:
        """See `Engine.check`; no sign of life for longer than answers may take is no working either."""
        self._thread.require_open()
        asked = self._asked
        silent_s = 0.0 if asked is None else time.monotonic() - asked
        require_signs_of_life(silent_s, self._rollout.generate_timeout_s)

    # From here on: in the loop.

    async def _start(self) -> None:
        try:
            with span("start"):
                self._llm = build_async_engine(
                    self._config, self._model_path, seed=self._seed, statistics=self.statistics
                )
            await self._llm.update_weight_version(str(self.version))
        except Exception as error:
            self._thread.end(error)
            raise
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._thread.submit(self._account())
        self._thread.submit(self._look())

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None
    ) -> list[Completion]:
        collectors: list[Any] = []  # of what is under way
        try:
            async with self._while_it_samples():
                with self._place_in_line():
                    await self._in_order.acquire()
                with self._at("generate"):
                    try:
                        kept = kept_from(self._rollout, self.version)
                        await self._add(prompts, sampling, seeds, collectors)
                    finally:
                        self._in_order.release()
                    outputs = [(await collector.get()).outputs[0] for collector in collectors]
                    answers = [completion_of(output, kept_from=kept) for output in outputs]
                collectors.clear()
                return answers
        except TimeoutError:
            raise GeneratorError(
                f"the engine has sampled no token for {self._rollout.generate_timeout_s:g} s "
                f"(rollout.generate_timeout_s); not all of {len(prompts)} prompts were answered"
            ) from None
        except GeneratorError:
            raise
        except Exception as error:
            self._thread.end(error)
            raise EngineFailedError(f"the engine has failed: {error}") from error
        finally:
            if collectors:
                await self._abort(collectors)

    @contextlib.asynccontextmanager
    async def _while_it_samples(self) -> AsyncIterator[None]:
        """Raise TimeoutError once the engine has sampled no token for too long, whoever it works for."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        again: asyncio.TimerHandle

        def look() -> None:
            nonlocal again
            left = self._rollout.generate_timeout_s - self.statistics.seconds_without_token(began)
            if left <= 0.0:
                deadline.reschedule(loop.time())
            else:
                again = loop.call_later(left, look)

        async with asyncio.timeout(None) as deadline:
            again = loop.call_later(self._rollout.generate_timeout_s, look)
            try:
                yield
            finally:
                again.cancel()

    async def _abort(self, collectors: Sequence[Any]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._llm.abort([collector.request_id for collector in collectors], internal=True)
        except TimeoutError:
            self._thread.end(
                GeneratorError(f"expected the engine to give answers up within {ABORT_TIMEOUT_S:g} s")
            )
        except Exception as error:  # whoever waits is told of why there was something to give up
            self._thread.end(error)

    async def _add(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        collectors: list[Any],
    ) -> None:
        """Hand prompts to the engine, one after the other; `collectors` grows by what each answer will come to."""
        try:
            params = sampling_params(sampling, seeds, prompts=len(prompts))
        except refusals() as error:
            raise GeneratorError(f"the engine refused settings: {error}") from error
        for place, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
            try:
                require_tokens(prompt, self._vocabulary)
                asked = prompt_of(prompt, kept_from(self._rollout, self.version))
                collectors.append(
                    await self._llm.add_request(str(next(self._ids)), asked, how, lora_request=self._adapter)
                )
            except refusals() as error:
                raise PromptRefusedError(place, str(error)) from error

    async def _load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> LoadMetrics:
        # In one piece: an engine left in the middle of it would be paused for good.
        return await asyncio.shield(self._replace(version, state))

    async def _replace(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> LoadMetrics:
        async with self._replacing:
            told, asleep = time.monotonic(), self.statistics.asleep
            lora, handover = self._config.pushed_adapter, None
            if state is not None and lora is None:
                handover = await asyncio.to_thread(self._sender.write, state)
            asked = time.monotonic()
            async with self._hold_requests(f"load version {version}"):
                if asleep:  # first the weights alone: vLLM goes on with what is under way when all is awake
                    await self._llm.wake_up(["weights"])
                elif state is not None:
                    keep = self._rollout.weight_update == "keep_cache"
                    await self._llm.pause_generation(mode="keep", clear_cache=not keep)
                began = time.monotonic()
                with self._at("load weights"):
                    if handover is not None:
                        await self._llm.collective_rpc("load_handed_over", args=(handover,))
                    elif state is not None and lora is not None:
                        await self._replace_adapter(state, lora)
                    await self._llm.update_weight_version(str(version))
                    self.version = version
                    if asleep:
                        await self._llm.wake_up(["kv_cache"])
                    elif state is not None:
                        await self._llm.resume_generation()
            now = time.monotonic()
            return LoadMetrics(pause_s=now - asked, load_s=now - began, handover_s=asked - told)

    async def _sleep(self) -> None:
        await asyncio.shield(self._fall_asleep())

    async def _fall_asleep(self) -> None:
        async with self._replacing:
            if not self.statistics.asleep:
                async with self._hold_requests("go to sleep"):
                    with self._at("sleep"):
                        await self._llm.sleep(**SLEEP)

    @contextlib.asynccontextmanager
    async def _hold_requests(self, what: str) -> AsyncIterator[None]:
        """Hand nothing else to the engine within the block; where that fails or takes too long, the engine ends."""
        limit_s = LOAD_FACTOR * self._rollout.generate_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline, self._in_order:
                if self._rollout.weight_update == "drain" and not self.statistics.asleep:
                    # By vLLM's own mode "wait" what is asked and not begun would be left to the new weights.
                    await self._idle.wait()
                yield
        except Exception as error:
            # Some tensors may have been replaced: nothing that this engine says can be trusted any more.
            failure = EngineFailedError(
                f"expected the engine to {what} within {limit_s:g} s, it has not"
                if deadline.expired()
                else f"expected the engine to {what}, it failed half-way: {error}"
            )
            self._thread.end(failure)
            raise failure from error

    async def _replace_adapter(self, state: Mapping[str, Tensor], lora: LoraConfig) -> None:
        """As in `VllmEngine`."""
        before = self._adapter
        with adapter_request(state, lora, next(self._adapter_ids)) as request:
            if before is not None:
                await self._llm.remove_lora(before.lora_int_id)
            if request is not None:
                await self._llm.add_lora(request)
        self._adapter = request

    async def _look(self) -> None:
        """Notice when the engine's process is gone, and when it hangs."""
        sign: asyncio.Future[bool] | None = None
        while True:
            try:
                await self._llm.check_health()
                if sign is None or sign.done():
                    self._asked = time.monotonic()
                    sign = asyncio.ensure_future(self._llm.is_paused())
                    sign.add_done_callback(self._has_answered)
            except Exception as error:
                self._thread.end(error)
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    def _has_answered(self, sign: "asyncio.Future[bool]") -> None:
        if not sign.cancelled() and sign.exception() is None:
            self._asked = None

    async def _account(self) -> None:
        """Say what the replica does: its engine's process works for it alone, so that its work is this one's."""
        while True:
            self._changed.clear()
            doing = next((what for what, count in self._doing.items() if count), REST)
            rest = "turn" if self.statistics.asleep else "prompts" if doing == REST else None
            with span(doing if rest is None else REST, waits_for=rest):
                await self._changed.wait()

    @contextlib.contextmanager
    def _at(self, what: str) -> Iterator[None]:
        self._doing[what] += 1
        self._tell()
        try:
            yield
        finally:
            self._doing[what] -= 1
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        if self._doing["generate"]:
            self._idle.clear()
        else:
            self._idle.set()

    @contextlib.contextmanager
    def _place_in_line(self) -> Iterator[None]:
        if self._waiting >= MAX_WAITING_BATCHES:
            raise GeneratorError(
                f"expected at most {MAX_WAITING_BATCHES} batches waiting for the engine; "
                "wait for answers before asking on"
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _clean_up(self) -> None:
        if self._llm is not None:
            await end_async_engine(self._llm)
        self._sender.close()
