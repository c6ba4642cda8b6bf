"""vLLM's engine inside this process, on a thread of its own.

In-process on purpose: the engine has no child process that could be orphaned when its actor is killed, and
on a CPU it starts several times faster. Everything that touches the engine happens on one thread, in the
order in which it was asked for.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

from torch import Tensor

from rl_bridge.config import Config, LoraConfig
from rl_bridge.errors import EngineFailedError, GeneratorError, PromptRefusedError
from rl_bridge.generator.base import CLOSED, Engine, LoadMetrics, require_signs_of_life
from rl_bridge.generator.vllm_api import (
    EngineStatistics,
    adapter_request,
    build_engine,
    completion_of,
    kept_from,
    prompt_of,
    refusals,
    sampling_params,
)
from rl_bridge.generator.vllm_worker import WeightSender
from rl_bridge.metrics.spans import REST, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

MAX_WAITING_BATCHES = 4096
"""Callers that could overrun this bound are a fault of ours, and are told so."""
STOP_TIMEOUT_S = 30.0


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Batch:
    """Prompts that were asked together; done when every one is answered. Cancelling its future ends the work.

    Attributes:
        under_way: The engine's name of each request not answered yet, and its place among the prompts.
        completions: What is answered, by place.
        kept_from: The weights when it was begun with, where later ones leave its keys and values as they are.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingSettings
    seeds: Sequence[int] | None
    future: "Future[list[Completion]]" = field(default_factory=Future)
    under_way: dict[str, int] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    asked: float = field(default_factory=time.monotonic)
    kept_from: PolicyVersion | None = None


class Batches:
    """Adds batches to a `vllm.LLMEngine`, with an adapter where there is one; answers them. Not for several threads."""

    def __init__(self, engine: Any, statistics: EngineStatistics) -> None:
        self.adapter: Any = None
        self._engine = engine
        self._statistics = statistics
        self._vocabulary = int(engine.model_config.get_vocab_size())
        self._requests: dict[str, Batch] = {}
        self._ids = itertools.count()
        self._batches: dict[Batch, None] = {}  # a set that keeps its order

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: Batch) -> None:
        """Begin with a batch. What the engine refuses fails that batch alone."""
        if batch.future.cancelled():
            return
        if not batch.prompts:
            answer(batch.future, [])
            return
        try:
            params = sampling_params(batch.sampling, batch.seeds, prompts=len(batch.prompts))
        except refusals() as error:
            fail(batch.future, GeneratorError(f"the engine refused settings: {error}"))
            return
        self._batches[batch] = None
        index = 0
        try:
            for index, (prompt, how) in enumerate(zip(batch.prompts, params, strict=True)):
                require_tokens(prompt, self._vocabulary)
                request_id = str(next(self._ids))
                self._engine.add_request(
                    request_id, prompt_of(prompt, batch.kept_from), how, lora_request=self.adapter
                )
                self._requests[request_id] = batch
                batch.under_way[request_id] = index
        except refusals() as error:
            self._abort(batch)
            fail(batch.future, PromptRefusedError(index, str(error)))

    def step(self, timeout_s: float) -> None:
        """Make one step of the engine; tell who is answered, and give up what waits in vain.

        However many wait for their turn, and however long their answers are, an engine that samples is not late:
        `timeout_s` is how long it may go without a token.
        """
        for output in self._engine.step():
            batch = self._requests.get(output.request_id)
            if batch is None or not output.finished:
                continue
            del self._requests[output.request_id]
            index = batch.under_way.pop(output.request_id)
            batch.completions[index] = completion_of(output.outputs[0], kept_from=batch.kept_from)
            if not batch.under_way:
                del self._batches[batch]
                answer(batch.future, [batch.completions[i] for i in range(len(batch.prompts))])
        for batch in list(self._batches):
            if batch.future.cancelled():
                self._abort(batch)
            elif self._statistics.seconds_without_token(batch.asked) > timeout_s:
                self._abort(batch)
                late = (
                    f"the engine has sampled no token for {timeout_s:g} s (rollout.generate_timeout_s); "
                    f"{len(batch.completions)} of {len(batch.prompts)} prompts were answered"
                )
                fail(batch.future, GeneratorError(late))

    def _abort(self, batch: Batch) -> None:
        del self._batches[batch]
        self._engine.abort_request(list(batch.under_way))
        for request_id in batch.under_way:
            del self._requests[request_id]

    def abort(self, error: GeneratorError) -> None:
        """Fail every batch with `error`, without asking the engine for anything."""
        batches = list(self._batches)
        self._batches.clear()
        self._requests.clear()
        for batch in batches:
            fail(batch.future, error)


def require_tokens(prompt: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for a token that the model does not have: without a tokenizer vLLM fails at the embedding."""
    for place, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            raise ValueError(f"expected token ids from 0 to {vocabulary - 1}, got {token!r} at place {place}")


def answer(future: "Future[T]", value: T) -> None:
    """Give a future its result, unless its caller has cancelled it."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return


def fail(future: "Future[Any]", error: GeneratorError) -> None:
    """Give a future an error, unless it is done."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return


SLEEP: Final[Mapping[str, Any]] = MappingProxyType({"level": 1, "mode": "keep"})
"""vLLM moves the weights to the host's memory, drops keys and values, and keeps what is under way."""


@dataclass(slots=True)
class _Load:
    version: PolicyVersion
    state: Mapping[str, Tensor] | None
    future: "Future[LoadMetrics]" = field(default_factory=Future)


@dataclass(slots=True)
class _Sleep:
    future: "Future[None]" = field(default_factory=Future)


class VllmEngine(Engine):
    """vLLM's `LLMEngine`, step by step on a thread of this process. `seed` is of its generator of random numbers."""

    statistics: EngineStatistics

    def __init__(self, config: Config, model_path: str, *, seed: int) -> None:
        self._config = config
        self._rollout = config.rollout
        self._model_path = model_path
        self._seed = seed
        self._adapter_ids = itertools.count(1)
        self.statistics = EngineStatistics()
        self._sender = WeightSender()
        self._commands: deque[Batch | _Load | _Sleep] = deque()
        self.version: PolicyVersion = 0
        self.ended: Future[None] = Future()
        self._ready: Future[None] = Future()
        for told in (self.ended, self._ready):
            told.set_running_or_notify_cancel()  # who does not wait any more shall not take it from the others
        self._failure: BaseException | None = None
        self._closed = False
        self._idle = True
        self._beat = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> "Future[None]":
        """See `Engine.start`."""
        self._thread.start()
        return self._ready

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> "Future[list[Completion]]":
        """See `Engine.generate`."""
        batch = Batch(prompts, sampling, seeds)
        self._submit(batch)
        return batch.future

    def load(self, version: PolicyVersion, state: Mapping[str, Tensor] | None) -> "Future[LoadMetrics]":
        """See `Engine.load`."""
        command = _Load(version, state)
        self._submit(command)
        return command.future

    def sleep(self) -> "Future[None]":
        """See `Engine.sleep`."""
        command = _Sleep()
        self._submit(command)
        return command.future

    def check(self) -> None:
        """See `Engine.check`; making one step for longer than answers may take is no working either."""
        with self._changed:
            self._require_open()
            silent_s = 0.0 if self._idle else time.monotonic() - self._beat
        require_signs_of_life(silent_s, self._rollout.generate_timeout_s)

    def close(self) -> None:
        """See `Engine.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _submit(self, command: Batch | _Load | _Sleep) -> None:
        with self._changed:
            self._require_open()
            if len(self._commands) >= MAX_WAITING_BATCHES:
                raise GeneratorError(
                    f"expected at most {MAX_WAITING_BATCHES} batches waiting for the engine; "
                    "wait for answers before asking on"
                )
            self._commands.append(command)
            self._changed.notify()

    def _require_open(self) -> None:
        if self._failure is not None:
            raise EngineFailedError(f"the engine has failed: {self._failure}") from self._failure
        if self._closed:
            raise GeneratorError(CLOSED)

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            with span("start"):
                self._engine = build_engine(
                    self._config, self._model_path, seed=self._seed, statistics=self.statistics
                )
            self._engine.set_weight_version(str(self.version))
            self._batches = Batches(self._engine, self.statistics)
        except BaseException as error:
            self._end(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        failure: BaseException | None = None
        try:
            while self._serve():
                pass
            self._engine.engine_core.shutdown()  # now, or it would end the groups of the next engine here
            self._sender.close()
        except BaseException as error:  # the thread's death must reach whoever waits
            failure = error
        self._batches.abort(_make_end_error(failure))
        self._end(failure)

    def _serve(self) -> bool:
        """Take one command (waiting only while there is nothing to generate), or make one engine step."""
        with self._changed:
            self._idle = True
            while not (self._commands or self._closed or (self._batches and not self.statistics.asleep)):
                with span(REST, waits_for="turn" if self.statistics.asleep else "prompts"):
                    self._changed.wait()
            if self._closed:
                return False
            self._idle, self._beat = False, time.monotonic()
            command = self._commands.popleft() if self._commands else None
        if command is None:
            with span("generate"):
                self._batches.step(self._rollout.generate_timeout_s)
            return True
        try:
            if isinstance(command, Batch):
                with span("take prompts"):
                    command.kept_from = kept_from(self._rollout, self.version)
                    self._batches.add(command)
            elif isinstance(command, _Sleep):
                with span("sleep"):
                    self._sleep(command)
            else:
                with span("load weights"):
                    self._load(command)
        except BaseException as error:
            fail(command.future, _make_end_error(error))  # it is in no queue any more
            raise
        return True

    def _load(self, command: _Load) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        asked, asleep = time.monotonic(), self.statistics.asleep
        if not (asleep or self._drain(command.future)):
            return
        began = time.monotonic()
        try:
            if asleep:  # first the weights alone: vLLM goes on with what is under way when all is awake
                self._engine.wake_up(["weights"])
            if command.state is not None:
                self._replace(command.state)
                if asleep or self._rollout.weight_update != "keep_cache":
                    self._engine.reset_prefix_cache(reset_running_requests=True)
            if asleep:
                self._engine.wake_up(["kv_cache"])
        except Exception as error:
            # Some tensors may have been replaced: nothing that this engine says can be trusted any more.
            raise GeneratorError(f"loading version {command.version} failed half-way: {error}") from error
        self._engine.set_weight_version(str(command.version))
        self.version = command.version
        now = time.monotonic()
        answer(command.future, LoadMetrics(pause_s=now - asked, load_s=now - began))

    def _replace(self, state: Mapping[str, Tensor]) -> None:
        if (lora := self._config.pushed_adapter) is not None:
            self._replace_adapter(state, lora)
        elif self._config.generator.tensor_parallel == 1:
            self._engine.collective_rpc("load_policy", args=(state,))
        else:
            self._engine.collective_rpc("load_handed_over", args=(self._sender.write(state),))

    def _drain(self, asker: "Future[Any]") -> bool:
        """With "drain" answer what was asked for before; False where it is closed meanwhile."""
        while self._rollout.weight_update == "drain" and self._batches:
            if self._closed:
                fail(asker, GeneratorError(CLOSED))
                return False
            self._beat = time.monotonic()
            with span("generate"):
                self._batches.step(self._rollout.generate_timeout_s)
        return True

    def _sleep(self, command: _Sleep) -> None:
        if command.future.set_running_or_notify_cancel() and (
            self.statistics.asleep or self._drain(command.future)
        ):
            if not self.statistics.asleep:
                self._engine.sleep(**SLEEP)
            answer(command.future, None)

    def _replace_adapter(self, state: Mapping[str, Tensor], lora: LoraConfig) -> None:
        """Nothing is answered with the one before any more; without tensors there is none afterwards."""
        before = self._batches.adapter
        with adapter_request(state, lora, next(self._adapter_ids)) as request:
            if before is not None:
                self._engine.remove_lora(before.lora_int_id)
            if request is not None:
                self._engine.add_lora(request)
        self._batches.adapter = request

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure, self._closed = failure, True
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            fail(command.future, _make_end_error(failure))
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


def _make_end_error(failure: BaseException | None) -> GeneratorError:
    return (
        GeneratorError(CLOSED) if failure is None else EngineFailedError(f"the engine has failed: {failure}")
    )
