"""vLLM's engine, in this process or in one of its own; its requests and answers on a thread of this one.

In this process the engine has no child that could be orphaned when its actor is killed, and on a CPU it starts several
times faster. In one of its own it costs a longer start and a copy of the weights, and its steps wait for nobody: what
goes on in the actor's process, messages and their encoding, does not take the interpreter's lock from the engine.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from rl_bridge.config import Config, LoraConfig
from rl_bridge.errors import EngineFailedError, GeneratorError, PromptRefusedError
from rl_bridge.generator.base import Engine, LoadMetrics
from rl_bridge.generator.vllm_api import (
    EngineStatistics,
    adapter_request,
    build_engine,
    completion_of,
    end_engine,
    kept_from,
    prompt_of,
    refusals,
    sampling_params,
)
from rl_bridge.generator.vllm_worker import WeightSender
from rl_bridge.metrics.spans import REST, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

POLL_INTERVAL_S = 1.0
"""How often it is looked whether the engine's process is there."""
LOAD_FACTOR = 2.0
"""New weights may take so many times as long as an engine may go without a token."""
ABORT_TIMEOUT_S = 30.0
"""For the engine to hear that nobody wants some answers any more."""
STOP_TIMEOUT_S = 30.0
SLEEP: Final[Mapping[str, Any]] = MappingProxyType({"level": 1, "mode": "keep"})
"""vLLM moves the weights to the host's memory, drops keys and values, and keeps what is under way."""


class VllmEngine(Engine):
    """vLLM's engine, in this process or `apart` from it. `seed` is of its own generator of random numbers."""

    statistics: EngineStatistics

    def __init__(self, config: Config, model_path: str, *, seed: int, apart: bool = False) -> None:
        super().__init__("vllm-engine", stop_timeout_s=STOP_TIMEOUT_S)
        self.statistics = EngineStatistics()
        self.holds_weights = not apart and config.generator.tensor_parallel == 1
        """Whether its weights are in this process, which hands it new ones as they are."""
        self._apart = apart
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
        self._doing = {"load weights": 0, "sleep": 0, "generate": 0}
        """How many do what; the first that anybody does is what the engine is said to do."""
        self._slow_until = 0.0
        """When it was last through with weights or falling asleep, on the clock of `time.monotonic`."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sign: Future[bool] | None = None
        """A sign of life that the engine was asked for, when `check` was called."""
        self._asked = 0.0

    def load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> "Future[LoadMetrics]":
        """See `Engine.load`. The old ones answer what is asked for while they are copied.

        The engine is paused for it by its own means: it stops between two steps and drops all keys and values but with
        `weight_update` "keep_cache"; with "continue" it computes those of answers under way anew when it goes on. An
        engine that has not done it within twice `rollout.generate_timeout_s`, once what comes first is answered, has
        failed and ends.
        """
        return self._submit(self._load(version, state))

    def sleep(self) -> "Future[None]":
        """See `Engine.sleep`."""
        return self._submit(self._sleep())

    def check(self) -> None:
        """See `Engine.check`; no sign of life for longer than what it does may take is no working either."""
        super().check()
        slow = self._doing["load weights"] or self._doing["sleep"]
        limit_s = self._rollout.generate_timeout_s * (LOAD_FACTOR if slow else 1.0)
        if self._sign is None or self._sign.done():
            self._asked, self._sign = time.monotonic(), self._submit(self._llm.is_paused())
        elif (silent_s := time.monotonic() - max(self._asked, self._slow_until)) > limit_s:
            raise GeneratorError(
                f"expected the engine to make a step within {limit_s:g} s, it has been at one for {silent_s:.0f} s"
            )

    # From here on: in the loop.

    async def _start(self) -> None:
        try:
            with span("start"):
                self._llm = build_engine(
                    self._config,
                    self._model_path,
                    seed=self._seed,
                    statistics=self.statistics,
                    apart=self._apart,
                )
            await self._llm.update_weight_version(str(self.version))
        except Exception as error:
            self._end(error)
            raise
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._submit(self._account())
        self._submit(self._watch_health())

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None
    ) -> list[Completion]:
        collectors: list[Any] = []  # of what is under way
        try:
            async with self._while_it_samples():
                await self._in_order.acquire()
                with self._at("generate"):
                    try:
                        logprobs_from = kept_from(self._rollout, self.version)
                        await self._add(prompts, sampling, seeds, collectors)
                    finally:
                        self._in_order.release()
                    outputs = [(await collector.get()).outputs[0] for collector in collectors]
                    answers = [completion_of(output, kept_from=logprobs_from) for output in outputs]
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
            self._end(error)
            raise EngineFailedError(f"the engine has failed: {error}") from error
        finally:
            if collectors:
                await self._abort(collectors)

    @contextlib.asynccontextmanager
    async def _while_it_samples(self) -> AsyncIterator[None]:
        """Raise TimeoutError once the engine has sampled no token of any request for too long.

        While it takes weights nobody expects one: those have a time of their own.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        again: asyncio.TimerHandle

        def check() -> None:
            nonlocal again
            since = time.monotonic() if self._doing["load weights"] else max(began, self._slow_until)
            left = self._rollout.generate_timeout_s - self.statistics.seconds_without_token(since)
            if left <= 0.0:
                deadline.reschedule(loop.time())
            else:
                again = loop.call_later(left, check)

        async with asyncio.timeout(None) as deadline:
            again = loop.call_later(self._rollout.generate_timeout_s, check)
            try:
                yield
            finally:
                again.cancel()

    async def _abort(self, collectors: Sequence[Any]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._llm.abort([collector.request_id for collector in collectors], internal=True)
        except TimeoutError:
            self._end(GeneratorError(f"expected the engine to give answers up within {ABORT_TIMEOUT_S:g} s"))
        except Exception as error:  # whoever waits is told of why there was something to give up
            self._end(error)

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
        for place, (prompt, engine_sampling) in enumerate(zip(prompts, params, strict=True)):
            try:
                require_tokens(prompt, self._vocabulary)
                engine_prompt = prompt_of(prompt, kept_from(self._rollout, self.version))
                collectors.append(
                    await self._llm.add_request(
                        str(next(self._ids)), engine_prompt, engine_sampling, lora_request=self._adapter
                    )
                )
            except refusals() as error:
                raise PromptRefusedError(place, str(error)) from error

    async def _load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> LoadMetrics:
        # In one piece: an engine left in the middle of it would be paused for good.
        return await asyncio.shield(self._replace(version, state))

    async def _replace(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> LoadMetrics:
        async with self._replacing:
            received, asleep = time.monotonic(), self.statistics.asleep
            lora, load, handed = self._config.pushed_adapter, "load_policy", None
            if state is not None and lora is None and not self.holds_weights:
                load, handed = "load_handed_over", await asyncio.to_thread(self._sender.write, state)
            requested = time.monotonic()
            async with self._hold_requests(f"load version {version}"):
                if asleep:  # first the weights alone: vLLM goes on with what is under way when all is awake
                    with self._at("load weights"):
                        await self._llm.wake_up(["weights"])
                elif state is not None:
                    keep = self._rollout.weight_update == "keep_cache"
                    await self._llm.pause_generation(mode="keep", clear_cache=not keep)
                began = time.monotonic()
                with self._at("load weights"):
                    if state is not None and lora is not None:
                        await self._replace_adapter(state, lora)
                    elif state is not None:
                        await self._llm.collective_rpc(load, args=(state if handed is None else handed,))
                    await self._llm.update_weight_version(str(version))
                    self.version = version
                    if asleep:
                        await self._llm.wake_up(["kv_cache"])
                    elif state is not None:
                        await self._llm.resume_generation()
            now = time.monotonic()
            return LoadMetrics(pause_s=now - requested, load_s=now - began, handover_s=requested - received)

    async def _sleep(self) -> None:
        await asyncio.shield(self._fall_asleep())

    async def _fall_asleep(self) -> None:
        async with self._replacing:
            if not self.statistics.asleep:
                async with self._hold_requests("go to sleep"):
                    with self._at("sleep"):
                        await self._llm.sleep(**SLEEP)

    @contextlib.asynccontextmanager
    async def _hold_requests(self, action: str) -> AsyncIterator[None]:
        """Hand nothing else to the engine within the block; where that fails or takes too long, the engine ends."""
        limit_s = LOAD_FACTOR * self._rollout.generate_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with self._in_order:
                if self._rollout.weight_update == "drain" and not self.statistics.asleep:
                    # By vLLM's own mode "wait" what is asked and not begun would be left to the new weights. It ends,
                    # for answers that get no token are given up.
                    await self._idle.wait()
                async with deadline:
                    yield
        except Exception as error:
            # Some tensors may have been replaced: nothing that this engine says can be trusted any more.
            failure = EngineFailedError(
                f"expected the engine to {action} within {limit_s:g} s, it has not"
                if deadline.expired()
                else f"expected the engine to {action}, it failed half-way: {error}"
            )
            self._end(failure)
            raise failure from error

    async def _replace_adapter(self, state: Mapping[str, Tensor], lora: LoraConfig) -> None:
        """Remove the current adapter and load the new one; without tensors there is none afterwards."""
        before = self._adapter
        with adapter_request(state, lora, next(self._adapter_ids)) as request:
            if before is not None:
                await self._llm.remove_lora(before.lora_int_id)
            if request is not None:
                await self._llm.add_lora(request)
        self._adapter = request

    async def _watch_health(self) -> None:
        """Notice when the engine's process is gone."""
        try:
            while True:
                await self._llm.check_health()
                await asyncio.sleep(POLL_INTERVAL_S)
        except Exception as error:
            self._end(error)

    async def _account(self) -> None:
        """Record spans of the engine's activity as the replica's: the engine's process works for it alone."""
        while True:
            self._changed.clear()
            doing = next((activity for activity, count in self._doing.items() if count), REST)
            rest = "turn" if self.statistics.asleep else "prompts" if doing == REST else None
            with span(doing if rest is None else REST, waits_for=rest):
                await self._changed.wait()

    @contextlib.contextmanager
    def _at(self, activity: str) -> Iterator[None]:
        self._doing[activity] += 1
        self._tell()
        try:
            yield
        finally:
            if activity != "generate":  # first: `check` looks from another thread
                self._slow_until = time.monotonic()
            self._doing[activity] -= 1
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        if self._doing["generate"]:
            self._idle.clear()
        else:
            self._idle.set()

    async def _clean_up(self) -> None:
        if self._llm is not None:
            await end_engine(self._llm)
        self._sender.close()


def require_tokens(prompt: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for a token that the model does not have: without a tokenizer vLLM fails at the embedding."""
    for place, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            raise ValueError(f"expected token ids from 0 to {vocabulary - 1}, got {token!r} at place {place}")
