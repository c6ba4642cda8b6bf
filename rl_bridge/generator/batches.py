"""The batches of prompts that an engine is at work on."""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.generator.vllm_api import completion_of, refusals, sampling_params
from rl_bridge.types import Completion, SamplingSettings

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Batch:
    """Prompts that were asked together; done when every one is answered.

    Attributes:
        prompts: Token ids.
        sampling: How to sample.
        seeds: One a prompt, or None.
        timeout_s: Seconds from `asked` to the answer at most.
        future: Their completions, in order. Cancelling it ends the work.
        under_way: The engine's name of each request not answered yet, and its place among the prompts.
        completions: What is answered, by place.
        asked: On the clock of `time.monotonic`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingSettings
    seeds: Sequence[int] | None
    timeout_s: float
    future: "Future[list[Completion]]" = field(default_factory=Future)
    under_way: dict[str, int] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    asked: float = field(default_factory=time.monotonic)


class Batches:
    """Adds batches to an engine and answers them, step by step. Not for several threads.

    Args:
        engine: A `vllm.LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
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
                self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, how)
                self._requests[request_id] = batch
                batch.under_way[request_id] = index
        except refusals() as error:
            self._abort(batch)
            fail(batch.future, PromptRefusedError(index, str(error)))

    def step(self) -> None:
        """Make one step of the engine; tell who is answered, and give up what comes too late."""
        for output in self._engine.step():
            batch = self._requests.get(output.request_id)
            if batch is None or not output.finished:
                continue
            del self._requests[output.request_id]
            index = batch.under_way.pop(output.request_id)
            batch.completions[index] = completion_of(output.outputs[0])
            if not batch.under_way:
                del self._batches[batch]
                answer(batch.future, [batch.completions[i] for i in range(len(batch.prompts))])
        now = time.monotonic()
        for batch in list(self._batches):
            if batch.future.cancelled():
                self._abort(batch)
            elif now - batch.asked > batch.timeout_s:
                self._abort(batch)
                late = (
                    f"expected answers to {len(batch.prompts)} prompts within {batch.timeout_s:g} s, "
                    f"got {len(batch.completions)}"
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
    """Check a prompt, which vLLM does not without a tokenizer: it would fail when it looks up the embedding.

    Raises:
        ValueError: There is a token that the model does not have.
    """
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
