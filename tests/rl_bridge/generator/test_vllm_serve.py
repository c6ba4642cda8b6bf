"""The real `vllm serve` as an engine: its tokens and log-probabilities, and the mode of it that would mislead."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_fixtures import WAIT_S, engine_config, logprobs, prompts
from vllm_server import START_S, vllm_serve

from rl_bridge.errors import ConfigError, PromptRefusedError
from rl_bridge.generator.endpoint import Endpoint, EndpointEngine
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(400)]

WARM = SamplingSettings(temperature=0.7, max_new_tokens=6, stop_token_ids=(7,))
PROMPTS = prompts(12)
SEEDS = list(range(len(PROMPTS)))


@pytest.fixture(scope="module")
def engines(
    tiny_policy: Path, engine_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, EndpointEngine]]:
    """Of a server as it has to be started, and of one as it is by default."""
    logs, made = tmp_path_factory.mktemp("serve"), {}
    with ExitStack() as stack:
        for name, options in {"processed": ["--logprobs-mode", "processed_logprobs"], "raw": []}.items():
            url = stack.enter_context(vllm_serve(tiny_policy, logs / f"{name}.log", *options))
            rollout = engine_config(generate_timeout_s=START_S).rollout
            made[name] = EndpointEngine(Endpoint(url=url, model="tiny"), rollout)
            stack.callback(made[name].close)
        for starting in [engine.start() for engine in made.values()]:
            starting.result(START_S)
        yield made


@pytest.fixture(scope="module")
def reference(tiny_policy: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(str(tiny_policy), dtype=torch.float32).eval()


def test_served_tokens_have_the_logprobs_of_the_sampling(
    engines: dict[str, EndpointEngine], reference: Any
) -> None:
    answers = engines["processed"].generate(PROMPTS, WARM, SEEDS).result(WAIT_S)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert 1 <= len(answer.tokens) <= 6
        assert answer.logprobs == pytest.approx(logprobs(reference, prompt, answer, 0.7), abs=1e-4)
        assert answer.stopped or len(answer.tokens) == 6
    assert any(answer.stopped for answer in answers)
    assert engines["processed"].generate(PROMPTS, WARM, SEEDS).result(WAIT_S) == answers
    assert engines["processed"].generate(PROMPTS, WARM).result(WAIT_S) != answers


def test_raw_logprobs_are_refused_where_they_would_be_wrong(
    engines: dict[str, EndpointEngine], reference: Any
) -> None:
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engines["raw"].generate(PROMPTS, WARM).result(WAIT_S)
    plain = SamplingSettings(temperature=1.0, max_new_tokens=6)
    for prompt, answer in zip(PROMPTS, engines["raw"].generate(PROMPTS, plain).result(WAIT_S), strict=True):
        assert answer.logprobs == pytest.approx(logprobs(reference, prompt, answer, 1.0), abs=1e-4)
    greedy = SamplingSettings(temperature=0.0, max_new_tokens=1)
    for prompt, answer in zip(PROMPTS, engines["raw"].generate(PROMPTS, greedy).result(WAIT_S), strict=True):
        with torch.no_grad():
            assert answer.tokens == [reference(torch.tensor([prompt])).logits[0, -1].argmax().item()]


def test_refused_prompt_of_a_server_is_named(engines: dict[str, EndpointEngine]) -> None:
    for bad in ([5] * 40, [10_000_000], []):
        with pytest.raises(PromptRefusedError) as refused:
            engines["processed"].generate([PROMPTS[0], bad], WARM).result(WAIT_S)
        assert refused.value.prompt == 1
    assert len(engines["processed"].generate(PROMPTS[:1], WARM).result(WAIT_S)) == 1
