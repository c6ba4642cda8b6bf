"""What we ask of an OpenAI-compatible server, in the words of its completions, and what its answers have to be like.

A policy's tokens are never guessed from text, so the server has to return their ids, which is an extension that vLLM
and others have (`return_token_ids`). And the log-probabilities have to be those of the distribution that was sampled
from: nothing cut off, no penalties, and the temperature in them. The request says so in every field that a server may
have defaults of its own for; what an answer shows to be otherwise is refused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from rl_bridge.errors import ConfigError, GeneratorError
from rl_bridge.generator.endpoint_client import plain
from rl_bridge.types import Completion, SamplingSettings

ALTERNATIVES = 5
"""The most likely tokens that servers tell of: more is nowhere allowed by default."""
LEAST_LOGPROB = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
SMALLEST_SPREAD = 1e-4
"""Of a distribution flatter than this (in nats squared) no temperature can be seen."""


TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
"""No tokenizer has others, and some fail at them in words that say nothing of a server."""


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


class Answer(BaseModel):
    """A server's answer to one prompt; what else is in it does not matter here."""

    choices: list[_Choice]
    usage: _Usage | None = None


def body(
    model: str,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    seed: int | None,
    *,
    alternatives: int = 1,  # some servers take 0 for none at all, that of the sampled token included
) -> dict[str, Any]:
    """The request for one prompt. A prompt a request: a server takes one seed for all prompts of one."""
    request: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": alternatives,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # or two tokens of the same text would be one
        "add_special_tokens": False,
        # A server's own defaults may be others, from the model's generation_config.json for one.
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


def read(content: bytes) -> Answer:
    """The answer that a server gave.

    Raises:
        ConfigError: It is none.
    """
    try:
        return Answer.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the body"
        raise ConfigError(
            "expected generator.url to answer as the OpenAI completions protocol does, "
            f"got something else ({plain(where)}: {fault['msg']})"
        ) from error


def completion_of(answer: Answer, *, prompt: Sequence[int], sampling: SamplingSettings) -> Completion:
    """The completion that an answer holds; its weights count as version 0.

    Args:
        answer: From the server.
        prompt: What was sent.
        sampling: How it was to be sampled.

    Raises:
        ConfigError: Tokens or log-probabilities are missing, or not those of what was asked for.
        GeneratorError: The server gave up on the prompt.
    """
    if len(answer.choices) != 1:
        raise _refusal("one answer", f"{len(answer.choices)}", "use a server that knows n=1")
    choice = answer.choices[0]
    _require_prompt(answer, choice, prompt)
    if choice.finish_reason not in ("stop", "length"):
        raise GeneratorError(
            f"expected the server to finish by stop or length, it did by {plain(repr(choice.finish_reason))}"
        )
    tokens = choice.token_ids
    if tokens is None:
        raise _refusal(
            "the ids of the tokens with each answer",
            "text alone",
            "tokens cannot be had back from text; use a server that knows return_token_ids, such as vllm serve",
        )
    if len(tokens) > sampling.max_new_tokens:
        raise _refusal(
            f"at most {sampling.max_new_tokens} tokens",
            f"{len(tokens)}",
            "use a server that knows max_tokens",
        )
    cut = isinstance(choice.stop_reason, int) and tokens[-1:] != [choice.stop_reason]
    if cut or not tokens:  # what ends at once has that token at least
        which = f", {choice.stop_reason}," if cut else ""
        raise _refusal(
            f"the token that ended an answer{which} as a part of it",
            f"{tokens[-3:]} at its end",
            "without it the policy would never be taught to stop",
        )
    return Completion(
        tokens=tokens,
        logprobs=_logprobs(choice, len(tokens)),
        versions=[0] * len(tokens),
        stopped=choice.finish_reason == "stop",
    )


def _require_prompt(answer: Answer, choice: _Choice, prompt: Sequence[int]) -> None:
    remedy = "it added, cut or re-tokenised something; use a server that takes token ids as they are"
    if choice.prompt_token_ids is not None:
        if choice.prompt_token_ids != list(prompt):
            raise _refusal(
                "the prompt to be read as it was sent", "the server's other token ids for it", remedy
            )
    elif answer.usage is not None and answer.usage.prompt_tokens not in (None, len(prompt)):
        raise _refusal(f"a prompt of {len(prompt)} tokens", f"{answer.usage.prompt_tokens}", remedy)


def _logprobs(choice: _Choice, count: int) -> list[float]:
    told = None if choice.logprobs is None else choice.logprobs.token_logprobs
    if told is None or len(told) != count:
        raise _refusal(
            f"a log-probability with each of {count} tokens",
            "none" if told is None else f"{len(told)}",
            "use a server that knows logprobs",
        )
    logprobs = [value for value in told if value is not None and _is_logprob(value)]
    if len(logprobs) != count:
        raise _refusal(
            "log-probabilities of tokens that could be sampled",
            plain(repr(told)),
            "use a server that knows logprobs",
        )
    return logprobs


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and LEAST_LOGPROB < value <= ROUNDING


def first_alternatives(answer: Answer) -> dict[str, float]:
    """Log-probabilities of the most likely first tokens of an answer.

    Raises:
        ConfigError: There are none.
    """
    logprobs = answer.choices[0].logprobs if answer.choices else None
    tops = None if logprobs is None else logprobs.top_logprobs
    if not tops or not tops[0] or len(tops[0]) < 2:
        raise _refusal(
            f"the {ALTERNATIVES} most likely tokens with an answer",
            "one" if tops and tops[0] else "none",
            "without them it cannot be seen whether its log-probabilities have the temperature in them; "
            "use a server that knows logprobs=5",
        )
    return tops[0]


def require_sampling_distribution(
    at_one: Mapping[str, float], at_temperature: Mapping[str, float], temperature: float
) -> bool:
    """Check that log-probabilities are of the distribution that is sampled from, by one place looked at twice.

    With l the log-probabilities at temperature 1, those at T are l / T less a constant. So differences between
    tokens are 1 / T as large: their ratio is fitted by least squares, and has to be nearer to 1 / T than to 1.

    Args:
        at_one: By token, at the temperature 1.
        at_temperature: By token, at `temperature`.
        temperature: T, above 0.

    Returns:
        Whether it could be seen; not where all tokens are equally likely.

    Raises:
        ConfigError: They are of another distribution.
    """
    values = (*at_one.values(), *at_temperature.values())
    if not all(_is_logprob(value) for value in values):
        raise _refusal(
            "every token to be possible",
            "some with a probability of 0",
            "top-p, top-k or min-p is in force whatever the request says; "
            "the trainer cannot compute what is left by them",
        )
    common = sorted(at_one.keys() & at_temperature.keys(), key=lambda token: -at_one[token])
    if not common:
        return False
    best = common[0]
    before = [at_one[token] - at_one[best] for token in common]
    after = [at_temperature[token] - at_temperature[best] for token in common]
    spread = sum(gap * gap for gap in before)
    if spread < SMALLEST_SPREAD:
        return False
    slope = sum(one * other for one, other in zip(before, after, strict=True)) / spread
    if temperature != 1.0 and abs(slope - 1.0) < abs(slope - 1.0 / temperature):
        raise _refusal(
            f"log-probabilities of the distribution at the temperature {temperature:g}",
            "those at 1",
            "start it with --logprobs-mode processed_logprobs (vLLM), or sample at rollout.temperature=1",
        )
    return True


def _refusal(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(f"expected {expected} from the server at generator.url, got {got}; {remedy}")
