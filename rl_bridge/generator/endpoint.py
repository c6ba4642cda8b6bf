"""An engine backed by a server that speaks the OpenAI protocol, with token ids and log-probabilities."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.evaluation.endpoint import EndpointClient, RequestRefusedError, to_plain_text
from rl_bridge.config import RolloutConfig
from rl_bridge.errors import ConfigError, GeneratorError, PromptRefusedError, WeightsError
from rl_bridge.generator.base import ABORTED, Engine, UpdateMetrics
from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

if TYPE_CHECKING:
    from torch import Tensor


NUM_ALTERNATIVES = 5
"""The number of most likely tokens to request: no server allows more by default."""
LEAST_LOGPROB = -9999.0
"""vLLM's value for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
MIN_SPREAD = 1e-4
"""The least spread of a distribution, in nats squared, from which its temperature can be determined."""


TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
"""A token id. No tokenizer has others; some fail on them with errors that do not point to the server."""


class _Logprobs(BaseModel):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(BaseModel):
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None


class CompletionResponse(BaseModel):
    """A server's response to one prompt, as far as it is needed here."""

    choices: list[_Choice]
    usage: _Usage | None = None


def make_body(
    model: str,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    seed: int | None,
    *,
    alternatives: int = 1,  # with 0 some servers leave out the sampled token's own log-probability
) -> dict[str, Any]:
    """Make the request for one prompt; only one, because a server applies one seed to all prompts of a request."""
    request: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": alternatives,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # otherwise two tokens of the same text would be merged
        "add_special_tokens": False,
        # A server's own defaults may differ, for example by the model's generation_config.json.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "stream": False,
    }
    if seed is not None:
        request["seed"] = seed
    return request


def parse_response(content: bytes) -> CompletionResponse:
    """Parse a server's response; raises ConfigError if it does not follow the protocol."""
    try:
        return CompletionResponse.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the body"
        raise ConfigError(
            "expected the server to answer as the OpenAI completions protocol does, "
            f"got something else ({to_plain_text(where)}: {fault['msg']})"
        ) from error


def completion_of(
    answer: CompletionResponse, *, prompt: Sequence[int], sampling: SamplingSettings
) -> Completion:
    """Return the completion of an answer; its weights count as version 0.

    Raises:
        ConfigError: Tokens or log-probabilities are missing or do not match the request.
        GeneratorError: The server aborted the completion.
    """
    if len(answer.choices) != 1:
        raise _make_server_error("one answer", f"{len(answer.choices)}", "use a server that knows n=1")
    choice = answer.choices[0]
    _require_prompt(answer, choice, prompt)
    if choice.finish_reason not in ("stop", "length"):
        raise GeneratorError(
            f"expected the server to finish by stop or length, it did by {to_plain_text(repr(choice.finish_reason))}"
        )
    tokens = choice.token_ids
    if tokens is None:
        raise _make_server_error(
            "the ids of the tokens with each answer",
            "text alone",
            "tokens cannot be recovered from text; use a server that knows return_token_ids, such as vllm serve",
        )
    if len(tokens) > sampling.max_new_tokens:
        raise _make_server_error(
            f"at most {sampling.max_new_tokens} tokens",
            f"{len(tokens)}",
            "use a server that knows max_tokens",
        )
    lacks_stop_token = isinstance(choice.stop_reason, int) and tokens[-1:] != [choice.stop_reason]
    if lacks_stop_token or not tokens:  # even an answer that stops at once has the stop token
        token_note = f", {choice.stop_reason}," if lacks_stop_token else ""
        raise _make_server_error(
            f"the token that ended an answer{token_note} as a part of it",
            f"{tokens[-3:]} at its end",
            "without it the policy would never be taught to stop",
        )
    return Completion(
        tokens=tokens,
        logprobs=_read_logprobs(choice, len(tokens)),
        versions=[0] * len(tokens),
        stopped=choice.finish_reason == "stop",
    )


def _require_prompt(answer: CompletionResponse, choice: _Choice, prompt: Sequence[int]) -> None:
    remedy = "it added, cut or re-tokenised something; use a server that takes token ids as they are"
    if choice.prompt_token_ids is not None:
        if choice.prompt_token_ids != list(prompt):
            raise _make_server_error(
                "the prompt to be read as it was sent", "the server's other token ids for it", remedy
            )
    elif answer.usage is not None and answer.usage.prompt_tokens not in (None, len(prompt)):
        raise _make_server_error(f"a prompt of {len(prompt)} tokens", f"{answer.usage.prompt_tokens}", remedy)


def _read_logprobs(choice: _Choice, count: int) -> list[float]:
    values = None if choice.logprobs is None else choice.logprobs.token_logprobs
    if values is None or len(values) != count:
        raise _make_server_error(
            f"a log-probability with each of {count} tokens",
            "none" if values is None else f"{len(values)}",
            "use a server that knows logprobs",
        )
    logprobs = [value for value in values if value is not None and _is_logprob(value)]
    if len(logprobs) != count:
        raise _make_server_error(
            "log-probabilities of tokens that could be sampled",
            to_plain_text(repr(values)),
            "use a server that knows logprobs",
        )
    return logprobs


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and LEAST_LOGPROB < value <= ROUNDING


def first_alternatives(answer: CompletionResponse) -> dict[str, float]:
    """Return the log-probabilities of an answer's most likely first tokens; ConfigError if they are missing."""
    logprobs = answer.choices[0].logprobs if answer.choices else None
    top_logprobs = None if logprobs is None else logprobs.top_logprobs
    if not top_logprobs or not top_logprobs[0] or len(top_logprobs[0]) < 2:
        raise _make_server_error(
            f"the {NUM_ALTERNATIVES} most likely tokens with an answer",
            "one" if top_logprobs and top_logprobs[0] else "none",
            "without them it cannot be seen whether its log-probabilities have the temperature in them; "
            "use a server that knows logprobs=5",
        )
    return top_logprobs[0]


def require_sampling_distribution(
    at_one: Mapping[str, float], at_temperature: Mapping[str, float], temperature: float
) -> bool:
    """Raise ConfigError if log-probabilities, by token, are not of the distribution sampled from at `temperature`.

    With l the log-probabilities at temperature 1, those at T are l / T minus a constant. So differences between tokens
    are 1 / T times as large: this ratio is fitted by least squares, and must be nearer to 1 / T than to 1. Returns
    whether it could be determined, which it cannot if all tokens are equally likely.
    """
    values = (*at_one.values(), *at_temperature.values())
    if not all(_is_logprob(value) for value in values):
        raise _make_server_error(
            "every token to be possible",
            "some with a probability of 0",
            "top-p, top-k or min-p is in force whatever the request says; "
            "the trainer cannot compute the truncated distribution",
        )
    common = sorted(at_one.keys() & at_temperature.keys(), key=lambda token: -at_one[token])
    if not common:
        return False
    best = common[0]
    gaps_at_one = [at_one[token] - at_one[best] for token in common]
    gaps_at_temperature = [at_temperature[token] - at_temperature[best] for token in common]
    variance = sum(gap * gap for gap in gaps_at_one)
    if variance < MIN_SPREAD:
        return False
    slope = sum(x * y for x, y in zip(gaps_at_one, gaps_at_temperature, strict=True)) / variance
    if temperature != 1.0 and abs(slope - 1.0) < abs(slope - 1.0 / temperature):
        raise _make_server_error(
            f"log-probabilities of the distribution at the temperature {temperature:g}",
            "those at 1",
            "start it with --logprobs-mode processed_logprobs (vLLM), or sample at rollout.temperature=1",
        )
    return True


def _make_server_error(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(f"expected {expected} from the server, got {got}; {remedy}")


STOP_TIMEOUT_S = 10.0
MAX_OVERHEAD_BYTES = 4 << 20
"""The most bytes of a response apart from its tokens, such as the list of all models of a service."""
MAX_BYTES_PER_TOKEN = 512
"""The most bytes of JSON per token: its text, id, log-probability and alternatives."""
MAX_LISTED_MODELS = 10
"""The most models that an error lists."""


@contextmanager
def _convert_errors(index: int = 0) -> Iterator[None]:
    """Translate the core's errors into the bridge's; `index` is the prompt's index in its batch."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigError(str(error)) from error
    except RequestRefusedError as error:
        raise PromptRefusedError(index, str(error)) from error


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None  # only vLLM has this field


class _Models(BaseModel):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model on an OpenAI-compatible server.

    Attributes:
        url: The server's URL, up to and including `/v1`. It has to return token ids, as vLLM's does.
        model: The model's name on the server.
        key_variable: The environment variable with the server's API key; None sends no key.
    """

    url: str
    model: str
    key_variable: str | None = None


class EndpointEngine(Engine):
    """Completes prompts by requests to a server, at most `rollout.max_num_seqs` at a time.

    A server that is overloaded or not up yet is retried with growing pauses, for as long as an answer may take. The
    version is always 0, because the server's weights never change. In addition to every engine's errors, the futures
    raise ConfigError if the server does not serve the model, denies access, or returns missing or wrong tokens or
    log-probabilities.
    """

    def __init__(self, endpoint: Endpoint, rollout: RolloutConfig) -> None:
        super().__init__("endpoint", stop_timeout_s=STOP_TIMEOUT_S)
        self._rollout = rollout
        self._endpoint = endpoint
        self._http: EndpointClient | None = None
        self._check_lock = asyncio.Lock()
        self._checked_temperatures: set[float] = set()
        """Temperatures at which the server's log-probabilities are known to be right."""
        self._deadlines: set[asyncio.Timeout] = set()
        self._tasks: dict[str, asyncio.Task[Completion]] = {}
        """Of prompts in progress, by their ids."""

    def load(self, version: PolicyVersion, state: "Mapping[str, Tensor] | None") -> "Future[UpdateMetrics]":
        """Raise WeightsError: a server's weights cannot be updated."""
        raise WeightsError(
            f"expected an engine of the run's own to take version {version}, got the server at {self._endpoint.url}; "
            "its weights cannot be updated, so it cannot be trained"
        )

    def sleep(self) -> "Future[None]":
        """Raise GeneratorError: a server's GPUs are its own."""
        raise GeneratorError(f"expected an engine of the run's own to put to sleep, got {self._endpoint.url}")

    # The rest runs on the engine's event loop.

    async def _start(self) -> None:
        PROCESS_SPANS.rest("prompts")
        with _convert_errors():
            self._http = EndpointClient(
                self._endpoint.url,
                self._endpoint.key_variable,
                connections=self._rollout.max_num_seqs,
                max_bytes=MAX_OVERHEAD_BYTES + MAX_BYTES_PER_TOKEN * self._rollout.max_length,
                names=("Endpoint.url", "Endpoint.key_variable"),
            )
        with span("start", waits_for="endpoint"):
            async with self._limit_time("its models"):
                with _convert_errors():
                    content = await self._http.request("GET", "/models")
        try:
            models = {model.id: model for model in _Models.model_validate_json(content).data}
        except ValidationError as error:
            raise ConfigError(
                f"expected {self._endpoint.url}/models to list models as the OpenAI protocol does, "
                f"got {to_plain_text(repr(content[:200]))}"
            ) from error
        if self._endpoint.model not in models:
            listed = ", ".join(to_plain_text(name) for name in sorted(models)[:MAX_LISTED_MODELS]) or "none"
            more = f" and {len(models) - MAX_LISTED_MODELS} more" if len(models) > MAX_LISTED_MODELS else ""
            raise ConfigError(
                f"expected the model to be one of {listed}{more}, which {self._endpoint.url} serves, "
                f"got {self._endpoint.model!r}"
            )
        max_model_len = models[self._endpoint.model].max_model_len
        if max_model_len is not None and max_model_len < self._rollout.max_length:
            raise ConfigError(
                f"expected rollout.max_length of at most {max_model_len}, which is what {self._endpoint.url} takes, "
                f"got {self._rollout.max_length}"
            )

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        ids: Sequence[str],
    ) -> list[Completion]:
        if seeds is not None and len(seeds) != len(prompts):
            raise GeneratorError(
                f"the engine refused settings: expected {len(prompts)} seeds, got {len(seeds)}"
            )
        prompt_seeds = [None] * len(prompts) if seeds is None else seeds
        with span("generate", waits_for="endpoint"):
            async with self._limit_time(f"answers to {len(prompts)} prompts"):
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [
                            group.create_task(self._complete(index, prompt, sampling, seed))
                            for index, (prompt, seed) in enumerate(zip(prompts, prompt_seeds, strict=True))
                        ]
                        self._tasks.update(zip(ids, tasks, strict=False))
                except BaseExceptionGroup as error_group:
                    raise error_group.exceptions[0] from None
                finally:
                    for prompt_id in ids:
                        self._tasks.pop(prompt_id, None)
        return [ABORTED if task.cancelled() else task.result() for task in tasks]

    async def _abort_prompts(self, ids: Sequence[str]) -> None:
        for prompt_id in ids:
            if prompt_id in self._tasks:
                self._tasks[prompt_id].cancel()  # closes the connection, which a server takes for an abort

    async def _complete(
        self, index: int, prompt: Sequence[int], sampling: SamplingSettings, seed: int | None
    ) -> Completion:
        # Our own engines end an answer where the context does; a server refuses to begin one that might not fit.
        room = max(1, self._rollout.max_length - len(prompt))
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        if sampling.temperature > 0.0:
            await self._check_logprobs(prompt, sampling)
        answer = await self._request_completion(
            make_body(self._endpoint.model, prompt, sampling, seed), index
        )
        return completion_of(answer, prompt=prompt, sampling=sampling)

    async def _check_logprobs(self, prompt: Sequence[int], sampling: SamplingSettings) -> None:
        """Check once for each temperature that log-probabilities are those of the sampling distribution."""
        async with self._check_lock:
            if sampling.temperature in self._checked_temperatures:
                return
            first = replace(sampling, max_new_tokens=1)
            at_one, at_temperature = [
                first_alternatives(
                    await self._request_completion(
                        make_body(
                            self._endpoint.model,
                            prompt,
                            replace(first, temperature=temperature),
                            None,
                            alternatives=NUM_ALTERNATIVES,
                        ),
                        0,
                    )
                )
                for temperature in (1.0, sampling.temperature)
            ]
            if require_sampling_distribution(at_one, at_temperature, sampling.temperature):
                self._checked_temperatures.add(sampling.temperature)

    async def _request_completion(self, body: dict[str, object], index: int) -> CompletionResponse:
        assert self._http is not None
        with _convert_errors(index):
            answer = await self._http.request("POST", "/completions", body)
        for deadline in self._deadlines:  # a server that answers is not late, however many prompts are queued
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time() + self._rollout.generate_timeout_s)
        return parse_response(answer)

    @asynccontextmanager
    async def _limit_time(self, expected: str) -> AsyncIterator[None]:
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
                f"expected {expected} from {self._endpoint.url} within {limit_s:g} s; last there was {trouble}"
            ) from None

    async def _clean_up(self) -> None:
        if self._http is not None:
            await self._http.close()
