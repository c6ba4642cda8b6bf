"""vLLM's tensor parallelism behind a replica: a process for each rank, which get weights and end with their engine."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from generator_fixtures import WAIT_S, engine_config, logprobs, perturbed_weights, prompts, runs, wait_until

from rl_bridge.errors import GeneratorError
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

WARM = SamplingSettings(temperature=0.8, max_new_tokens=6)


def test_ranks_are_one_policy_and_end_with_their_engine(
    long_policy: Path, engine_environment: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    from rl_bridge.generator.replica import make_engine

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # given back afterwards, as the next one is
    monkeypatch.setenv("ROPEWALK_ENGINE_OWNER", "0")
    engine = make_engine(engine_config(generator={"tensor_parallel": 2}), str(long_policy))
    engine.start().result(300)
    inner: Any = engine
    ranks = [worker.proc.pid for worker in inner._llm._engine.engine_core.engine_core.model_executor.workers]
    assert len(ranks) == 2
    for version in (0, 1):
        model = reference
        if version:
            new = perturbed_weights(long_policy, seed=1)
            engine.load(1, new).result(WAIT_S)
            model = Qwen3ForCausalLM(reference.config).eval()
            model.load_state_dict({**new, "lm_head.weight": new["model.embed_tokens.weight"]})
        answers = engine.generate(prompts(20), WARM).result(WAIT_S)
        for prompt, answer in zip(prompts(20), answers, strict=True):
            assert set(answer.versions) == {version}
            assert answer.logprobs == pytest.approx(logprobs(model, prompt, answer, 0.8), abs=1e-4)
    engine.sleep().result(WAIT_S)
    engine.load(1, None).result(WAIT_S)
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(GeneratorError):
        engine.generate(prompts(20), WARM).result(WAIT_S)
    assert isinstance(
        engine.ended.exception(WAIT_S), Exception
    )  # so the replica's process ends, and is started again
    engine.close()
    wait_until(lambda: not any(map(runs, ranks)))
