"""`train-blackjack --published`, in short: a published chat model is fetched, trained, and reported on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.conftest import ROOT, Watched, rows
from published import published_model

from envs.blackjack_env.oracle import DECISION_STATES, DecisionState
from envs.blackjack_env.table import observe_decision
from examples.grpo_blackjack.task import BlackjackChatTask
from rl_bridge.config import load_config
from rl_bridge.tokens.chat import ChatTokenizer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

CONFIG = "examples/grpo_blackjack/published.yaml"
SHORT = (
    "trainer.iterations=1",
    "trainer.warmup_updates=0",
    "trainer.checkpoint_interval=0",
    "rollout.batch_size=16",
    "evaluation.episodes=8",
    "evaluation.interval=0",
)


def test_published_model_is_trained_and_its_legal_answers_are_reported(
    ropewalk: Callable[..., Watched], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model = published_model()
    run = ropewalk(
        "train", "--config", CONFIG, "--name", "run", f"output_dir={tmp_path}", f"model.path={model}", *SHORT
    )
    assert run.wait(600) == 0, run.output()[-3000:]
    (metrics,) = rows(tmp_path / "run")
    assert metrics["rollout/ending/illegal_answer"] < 1.0
    assert metrics["mismatch/logprob_max"] <= 1e-4
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "policy")
    )
    assert before.keys() == after.keys()
    moved = {name for name, weights in before.items() if not torch.equal(weights, after[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["hands"], report["training_hands"]) == (8, 16)
    assert 0.0 < report["greedy_legal_rate"] <= 1.0
    shares = report["greedy_hit_rate"] + report["greedy_stand_rate"]
    assert shares == pytest.approx(report["greedy_legal_rate"])
    assert metrics["probe/legal"] == report["greedy_legal_rate"]


@pytest.mark.soak
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_published_model_learns_the_game(ropewalk: Callable[..., Watched], tmp_path: Path, seed: int) -> None:
    """40 minutes on two quiet cores. Standing on everything returns -0.186."""
    words = (f"output_dir={tmp_path}", f"model.path={published_model()}", "--seed", str(seed))
    run = ropewalk("train", "--config", CONFIG, "--name", "run", *words)
    assert run.wait(8400) == 0, run.output()[-3000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exact_return"] >= -0.15
    assert report["greedy_legal_rate"] >= 0.995
    assert min(report["greedy_hit_rate"], report["greedy_stand_rate"]) >= 0.1
    assert max(row["mismatch/logprob_max"] for row in rows(tmp_path / "run")) <= 2e-4


def test_prompts_and_answers_fit_what_the_configuration_allows(tmp_path: Path) -> None:
    tokenizer, config = ChatTokenizer(published_model()), load_config(ROOT / CONFIG)
    task = BlackjackChatTask(config, tmp_path)
    longest = max(len(tokenizer.prompt(task.messages(observe_decision(state)))) for state in DECISION_STATES)
    answers = [tokenizer.answer(word) for word in ("hit", "stand")]  # each with the token that ends it
    assert [len(answer) - 1 for answer in answers] == [config.rollout.max_new_tokens] * 2
    assert longest + config.rollout.max_new_tokens <= config.rollout.max_length
    assert tokenizer.raw(
        tokenizer.prompt(task.messages(observe_decision(DecisionState(17, True, 1))))
    ).endswith("<|im_start|>user\nsoft 17 against an ace<|im_end|>\n<|im_start|>assistant\n")


THINKING_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
"""The end of a prompt is that of Qwen3's template."""


def test_checkpoint_that_can_think_is_told_not_to_and_a_gpu_computes_in_bfloat16(
    tmp_path: Path,
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(published_model() / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINKING_TEMPLATE, encoding="utf-8")
    config = load_config(ROOT / CONFIG, [f"model.path={tmp_path}", "trainer.num_gpus=1"])
    assert config.model.dtype == "bfloat16"
    tokenizer = ChatTokenizer(tmp_path, thinking=config.model.thinking)
    chat = BlackjackChatTask(config, tmp_path).messages(observe_decision(DecisionState(17, True, 1)))
    assert tokenizer.raw(tokenizer.prompt(chat)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
