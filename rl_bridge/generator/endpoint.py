"""A server that speaks the OpenAI protocol, as an engine: for policies that are looked at and not trained."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from rl_bridge.config import Config, GeneratorConfig
from rl_bridge.errors import ConfigError, GeneratorError, WeightsError
from rl_bridge.generator import openai_api
from rl_bridge.generator.loop_thread import EngineLoopThread
from rl_bridge.generator.openai_api import EndpointClient, plain
from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

if TYPE_CHECKING:
    from torch import Tensor

    from rl_bridge.generator.engine import LoadMetrics

STOP_TIMEOUT_S = 10.0
LONGEST_BESIDE = 4 << 20
"""Bytes of an answer that hold no tokens: the list of all models that a service has, for one."""
BYTES_A_TOKEN = 512
"""Of JSON, at most: a token's text, number, log-probability and alternatives."""
NAMED = 10
"""Models that an error tells of."""


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None  # vLLM's; others do not say


class _Models(BaseModel):
    data: list[_Model]


class EndpointEngine:
    """Answers batches of prompts by asking a server; it has the surface of `VllmEngine`.

    A server that is overloaded, or not up yet, is asked again, ever more slowly, for as long as an answer may take.

    Args:
        config: The run's: `generator` says where the server is. At most `rollout.max_num_seqs` requests are under way
            at a time.

    Attributes:
        version: Always 0: the server's weights are what they are.
        statistics: None: a server keeps its own.
    """

    def __init__(self, config: Config) -> None:
        self.version: PolicyVersion = 0
        self.statistics = None
        self._rollout = config.rollout
        self._generator: GeneratorConfig = config.generator
        self._thread = EngineLoopThread("endpoint", self._clean_up)
        self._http: EndpointClient | None = None
        self._looking = asyncio.Lock()
        self._looked_at: set[float] = set()
        """Temperatures at which the server's log-probabilities are known to be right."""
        self._deadlines: set[asyncio.Timeout] = set()

    @property
    def ended(self) -> "Future[None]":
        """Done when it is closed."""
        return self._thread.ended

    def start(self) -> "Future[None]":
        """Ask the server for the model; the future is done when it has it.

        The future's errors: ConfigError where the server does not serve the model, or not to us; GeneratorError
        where it does not answer within `rollout.generate_timeout_s`.
        """
        self._thread.start()
        return self._thread.submit(self._start())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> "Future[list[Completion]]":
        """Answer prompts; see `VllmEngine.generate`.

        The future's errors, beside those there: ConfigError where the server's tokens or log-probabilities are missing
        or wrong; see `rl_bridge.generator.openai_api`.
        """
        return self._thread.submit(self._generate(prompts, sampling, seeds))

    def load(self, version: PolicyVersion, state: "Mapping[str, Tensor] | None") -> "Future[LoadMetrics]":
        """Refuse.

        Raises:
            WeightsError: The weights of a server cannot be updated.
        """
        raise WeightsError(
            f"expected an engine of the run's own to take version {version}, got the server at {self._generator.url}; "
            "its weights cannot be updated, so it cannot be trained: use generator.engine=vllm or vllm_async"
        )

    def sleep(self) -> "Future[None]":
        """Refuse: a server's GPUs are its own; a run that would ask is refused before (`why_untrainable`)."""
        raise GeneratorError(
            f"expected an engine of the run's own to put to sleep, got {self._generator.url}"
        )

    def check(self) -> None:
        """Look whether it is open; whether the server answers is seen by asking.

        Raises:
            GeneratorError: It is closed.
        """
        self._thread.require_open()

    def close(self) -> None:
        """End it. What is under way fails."""
        self._thread.close(STOP_TIMEOUT_S)

    # From here on: in the loop.

    async def _start(self) -> None:
        PROCESS_SPANS.rest("prompts")
        self._http = EndpointClient(
            self._generator,
            connections=self._rollout.max_num_seqs,
            longest=LONGEST_BESIDE + BYTES_A_TOKEN * self._rollout.max_length,
        )
        with span("start", waits_for="endpoint"):
            async with self._in_time("its models"):
                content = await self._http.request("GET", "/models")
        try:
            models = {model.id: model for model in _Models.model_validate_json(content).data}
        except ValidationError as error:
            raise ConfigError(
                f"expected {self._generator.url}/models to list models as the OpenAI protocol does, "
                f"got {plain(repr(content[:200]))}"
            ) from error
        if self._generator.model not in models:
            named = ", ".join(plain(name) for name in sorted(models)[:NAMED]) or "none"
            more = f" and {len(models) - NAMED} more" if len(models) > NAMED else ""
            raise ConfigError(
                f"expected generator.model to be one of {named}{more}, which {self._generator.url} serves, "
                f"got {self._generator.model!r}"
            )
        longest = models[self._generator.model].max_model_len
        if longest is not None and longest < self._rollout.max_length:
            raise ConfigError(
                f"expected rollout.max_length of at most {longest}, which is what {self._generator.url} takes, "
                f"got {self._rollout.max_length}"
            )

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None
    ) -> list[Completion]:
        if seeds is not None and len(seeds) != len(prompts):
            raise GeneratorError(
                f"the engine refused settings: expected {len(prompts)} seeds, got {len(seeds)}"
            )
        drawn = [None] * len(prompts) if seeds is None else seeds
        with span("generate", waits_for="endpoint"):
            async with self._in_time(f"answers to {len(prompts)} prompts"):
                if prompts and sampling.temperature > 0.0:
                    await self._look(prompts[0], sampling)
                try:
                    async with asyncio.TaskGroup() as group:
                        answers = [
                            group.create_task(self._complete(place, prompt, sampling, seed))
                            for place, (prompt, seed) in enumerate(zip(prompts, drawn, strict=True))
                        ]
                except BaseExceptionGroup as several:
                    raise several.exceptions[0] from None
        return [answer.result() for answer in answers]

    async def _complete(
        self, place: int, prompt: Sequence[int], sampling: SamplingSettings, seed: int | None
    ) -> Completion:
        answer = await self._ask(openai_api.body(str(self._generator.model), prompt, sampling, seed), place)
        return openai_api.completion_of(answer, prompt=prompt, sampling=sampling)

    async def _look(self, prompt: Sequence[int], sampling: SamplingSettings) -> None:
        """Once for each temperature, see whether log-probabilities are those of the sampling."""
        async with self._looking:
            if sampling.temperature in self._looked_at:
                return
            first = replace(sampling, max_new_tokens=1)
            at_one, at_temperature = [
                openai_api.first_alternatives(
                    await self._ask(
                        openai_api.body(
                            str(self._generator.model),
                            prompt,
                            replace(first, temperature=temperature),
                            None,
                            alternatives=openai_api.ALTERNATIVES,
                        ),
                        0,
                    )
                )
                for temperature in (1.0, sampling.temperature)
            ]
            if openai_api.require_sampling_distribution(at_one, at_temperature, sampling.temperature):
                self._looked_at.add(sampling.temperature)

    async def _ask(self, body: dict[str, object], place: int) -> openai_api.CompletionResponse:
        assert self._http is not None
        answer = await self._http.request("POST", "/completions", body, place)
        for (
            deadline
        ) in self._deadlines:  # a server that answers is not late, however many wait for their turn
            deadline.reschedule(asyncio.get_running_loop().time() + self._rollout.generate_timeout_s)
        return openai_api.read(answer)

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        limit_s = self._rollout.generate_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            trouble = "no answer" if self._http is None else self._http.trouble
            raise GeneratorError(
                f"expected {what} from {self._generator.url} within {limit_s:g} s; last there was {trouble}"
            ) from None

    async def _clean_up(self) -> None:
        if self._http is not None:
            await self._http.close()
