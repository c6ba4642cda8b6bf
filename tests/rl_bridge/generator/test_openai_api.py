"""What answers of an OpenAI-compatible server have to be like, worked by hand."""

import json
import math
from typing import Any

import pytest

from rl_bridge.errors import ConfigError, GeneratorError
from rl_bridge.generator import endpoint
from rl_bridge.types import SamplingSettings

HOW = SamplingSettings(temperature=0.7, max_new_tokens=4, stop_token_ids=(9,))
PROMPT = [1, 2, 3]


def answer(**changes: Any) -> endpoint.CompletionResponse:
    choice: dict[str, Any] = {
        "index": 0,
        "text": "whatever",
        "token_ids": [5, 9],
        "prompt_token_ids": PROMPT,
        "finish_reason": "stop",
        "stop_reason": 9,
        "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]},
    }
    usage = changes.pop("usage", {"prompt_tokens": 3})
    return endpoint.parse_response(json.dumps({"choices": [choice | changes], "usage": usage}).encode())


def completion(**changes: Any) -> Any:
    return endpoint.completion_of(answer(**changes), prompt=PROMPT, sampling=HOW)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": None}, "return_token_ids"),
        ({"logprobs": None}, "with each of 2 tokens .* got none"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "could be sampled"),
        ({"logprobs": {"token_logprobs": [-0.5, -9999.0]}}, "could be sampled"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.3]}}, "could be sampled"),
        ({"prompt_token_ids": [0, 1, 2, 3]}, "prompt to be read as it was sent"),
        ({"prompt_token_ids": None, "usage": {"prompt_tokens": 4}}, "a prompt of 3 tokens .* got 4"),
        ({"token_ids": []}, "the token that ended an answer, 9"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "at most 4 tokens"),
    ],
)
def test_missing_or_wrong_parts_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        completion(**changes)


def test_aborted_or_unreadable_answer_is_refused() -> None:
    with pytest.raises(GeneratorError, match="did by 'abort'"):
        completion(finish_reason="abort")
    numbers = [
        b'{"choices": [{"token_ids": [%s]}]}' % number for number in (b"-1", b"2147483648", b'"5"', b"1.5")
    ]
    for content in (b"<html>", b"[]", b'{"choices": 3}', *numbers):
        with pytest.raises(ConfigError, match="completions protocol"):
            endpoint.parse_response(content)
    with pytest.raises(ConfigError, match="one answer"):
        endpoint.completion_of(endpoint.parse_response(b'{"choices": []}'), prompt=PROMPT, sampling=HOW)


def test_request_leaves_nothing_to_the_servers_defaults() -> None:
    request = endpoint.make_body("m", (1, 2), HOW, 7)
    assert request["prompt"] == [1, 2]
    assert (request["temperature"], request["max_tokens"], request["seed"]) == (0.7, 4, 7)
    assert request["stop_token_ids"] == [9]
    assert (request["top_p"], request["top_k"], request["min_p"]) == (1.0, -1, 0.0)
    assert request["repetition_penalty"] == 1.0
    assert request["presence_penalty"] == request["frequency_penalty"] == 0.0
    assert request["return_token_ids"]
    assert "seed" not in endpoint.make_body("m", [1], HOW, None)


# Two tokens of probability 0.8 and 0.2. At the temperature 0.5 these are squared and normalised: 0.64 / 0.68 and
# 0.04 / 0.68. The gap of the logarithms, ln 4, becomes 2 ln 4.
AT_ONE = {"a": math.log(0.8), "b": math.log(0.2)}
AT_HALF = {"a": math.log(0.64 / 0.68), "b": math.log(0.04 / 0.68)}


def test_temperature_is_seen_in_the_gaps() -> None:
    require = endpoint.require_sampling_distribution
    assert require(AT_ONE, AT_HALF, 0.5)
    assert require(AT_ONE, AT_ONE, 1.0)
    with pytest.raises(ConfigError, match=r"at the temperature 0.5 .* got those at 1; .*processed_logprobs"):
        require(AT_ONE, AT_ONE, 0.5)
    # Rounding does not matter, nor which of the tokens both tell of.
    assert require(AT_ONE, {"a": -0.06, "b": -2.8, "c": -9.0}, 0.5)
    # Of what is flat, or has one token in common, no temperature can be seen.
    flat = {"a": math.log(0.5), "b": math.log(0.5)}
    assert not require(flat, flat, 0.5)
    assert not require({"a": -0.1}, {"b": -0.1}, 0.5)
    cut = {"a": 0.0, "b": -9999.0}
    for temperature in (1.0, 0.5):
        with pytest.raises(ConfigError, match="top-p, top-k or min-p"):
            require(cut, cut, temperature)


def test_missing_alternatives_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 most likely tokens"):
        endpoint.first_alternatives(answer())
    alone: dict[str, Any] = {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5}, None]}
    with pytest.raises(ConfigError, match=r"5 most likely tokens .* got one"):
        endpoint.first_alternatives(answer(logprobs=alone))
    assert endpoint.first_alternatives(
        answer(logprobs={"token_logprobs": [-0.5, -0.25], "top_logprobs": [AT_ONE, None]})
    ) == pytest.approx(AT_ONE)
