"""Engine and trainer agree for every architecture, before and after new weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import NAMES, every_token, make_checkpoint, rows, titan

from rl_bridge.types import Completion, SamplingSettings
from rl_bridge.weights.snapshot import local_shards

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

WAIT_S = 200.0
"""A bound for what would hang otherwise; none is meant to come near it."""
LENGTH, ANSWER = 32, 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("engine_environment")
def test_engine_and_trainer_agree(name: str, tmp_path: Path) -> None:
    from rl_bridge.config import Config, RolloutConfig
    from rl_bridge.generator.engine import VllmEngine

    # The engine's attention on CPUs takes no smaller heads than 32.
    path = make_checkpoint(tmp_path, name, hidden_size=128, **({"head_dim": 32} if "qwen3" in name else {}))
    model = titan(path, max_length=LENGTH)
    engine = VllmEngine(
        Config(rollout=RolloutConfig(max_length=LENGTH, max_num_seqs=64, kv_cache_mb=32)), str(path), seed=0
    )
    engine.start().result(WAIT_S)
    try:
        prompts: list[list[int]] = rows(40, 7, seed=8).tolist()
        sampling = SamplingSettings(temperature=0.8, max_new_tokens=ANSWER)

        def difference() -> float:
            answers = engine.generate(prompts, sampling).result(WAIT_S)
            return max(
                abs(reported - computed)
                for prompt, answer in zip(prompts, answers, strict=True)
                for reported, computed in zip(
                    answer.logprobs, by_trainer(model, prompt, answer, sampling.temperature), strict=True
                )
            )

        assert difference() <= 1e-4
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for shard in local_shards(model.sharded_state_dict()).values():
                shard.local.mul_(1.0 + 0.3 * torch.randn(shard.local.shape, generator=generator))
        assert difference() > 0.01, "the new weights are like the old ones"
        engine.load(1, model.hf_state_dict()).result(WAIT_S)
        assert difference() <= 1e-4
    finally:
        engine.close()


def by_trainer(model: Any, prompt: list[int], answer: Completion, temperature: float) -> list[float]:
    """The log-probabilities of an answer's tokens."""
    batch = every_token(torch.tensor([[*prompt, *answer.tokens]]))
    with torch.no_grad(), model.spmd():
        logprobs: list[float] = model.outputs(model.pack(batch), temperature=temperature).logprobs.tolist()
    return logprobs[len(prompt) - 1 :]
