"""A mixture of experts is trained by ranks that share its experts, beside a reference of two ranks, and served."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import CONFIG, SMALL, Watched, rows

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

RUN_TIMEOUT_S = 600.0


def make_mixture(folder: Path) -> Path:
    """Write the example's policy, with eight experts of which each token meets two."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from examples.grpo_blackjack import chat
    from rl_bridge.tiny_policy import make_tiny_policy

    make_tiny_policy(folder, chat.render_prompts(), seed=1)
    dense = json.loads((folder / "config.json").read_text())
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    config = Qwen3MoeConfig(
        **{key: dense.get(key) for key in same},
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters=dense["rope_parameters"],
    )
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(str(folder))
    return folder


def test_three_iterations(ropewalk: Callable[..., Watched], tmp_path: Path) -> None:
    run = ropewalk(
        *("train", "--config", CONFIG, "--name", "run", f"output_dir={tmp_path}", *SMALL),
        f"model.path={make_mixture(tmp_path / 'mixture')}",
        *("trainer.iterations=3", "trainer.learning_rate=1e-2", "trainer.warmup_updates=0"),
        *("trainer.updates_per_iteration=1", "trainer.parallel.ep=2", "algorithm.kl_coef=0.05"),
        "monarch.roles={trainer: {procs: 2}, reference: {procs: 2}}",
    )
    assert run.wait(RUN_TIMEOUT_S) == 0, run.output()[-3000:]
    iterations = rows(tmp_path / "run")
    assert len(iterations) == 3
    assert max(row["mismatch/logprob_max"] for row in iterations) <= 1e-4
    assert iterations[0]["policy/kl_to_reference"] < 1e-6, "before the only update both are the same"
    assert iterations[2]["policy/kl_to_reference"] > 1e-4
    assert len(list((tmp_path / "run" / "logs").glob("reference-*.log"))) == 2
