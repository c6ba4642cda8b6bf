"""Every way of training, three iterations each, on published weights: what random ones cannot show."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from e2e.conftest import Watched, rows
from published import published_model

from rl_bridge.records import TrajectoryRecord, read_lines

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3600)]

logger = logging.getLogger(__name__)
"""What a case takes, shown by pytest's `--log-cli-level=INFO`."""

Start = Callable[..., Watched]
RUN_TIMEOUT_S = 1800.0
"""Each part of a run may take as long: on a busy machine loading a model takes minutes."""
MOST_BYTES = 12e9
"""Of all processes of a run together."""
MOST_MISMATCH = 1e-4
"""Between log-probabilities of the engine and the trainer, in float32."""
MOST_DIFFERENCE = 1e-3
"""Between those of the engine and transformers."""

SYSTEM = {"role": "system", "content": "Answer in one word."}
QUESTIONS = {
    "Which colour has the sky?": "Blue.",
    "Which animal says meow?": "A cat.",
    "What is the capital of France?": "Paris.",
    "What is two plus two?": "Four.",
}
REWARD = '''
def variety(prompt, response, target):
    """Nearly always differs between siblings, so that every update moves the weights."""
    return len(set(response)) / 20
'''
CONFIG = {
    "data": {"source": "questions.jsonl", "sampling": "sequential"},
    "rollout": {
        "batch_size": 16,
        "group_size": 4,
        "max_new_tokens": 8,
        "max_length": 64,
        "max_num_seqs": 16,
        "kv_cache_mb": 64,
        "generate_timeout_s": RUN_TIMEOUT_S,
    },
    "trainer": {
        "iterations": 3,
        "learning_rate": 1e-5,
        "checkpoint_interval": 0,
        "num_threads": 2,
        "collective_timeout_s": RUN_TIMEOUT_S,
    },
    "monarch": {"start_timeout_s": RUN_TIMEOUT_S},
    "reward": {"function": "variety_reward.variety"},
    "records": {"groups": 4},
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """A way of training.

    Attributes:
        words: The overrides that choose it.
        positive: Metrics that the last iteration has, above 0.
        moved: Which weights move, by a part of their names; all by default.
    """

    words: tuple[str, ...]
    positive: tuple[str, ...] = ()
    moved: str = ""


LORA = ("model.lora.rank=8", "trainer.learning_rate=1e-3")
CASES = {
    "grpo_with_kl": Case(words=("algorithm.kl_coef=0.05",), positive=("policy/kl_to_reference",)),
    "ppo": Case(
        words=("algorithm=ppo", "trainer.tokens_per_pass=2048"), positive=("critic/loss", "critic/grad_norm")
    ),
    "adapters": Case(words=(*LORA, "model.lora.push=adapter"), moved="_proj"),
    "merged_adapters": Case(words=(*LORA, "model.lora.push=merged"), moved="_proj"),
    "two_ranks": Case(words=("monarch.roles.trainer.procs=2", "trainer.num_threads=1")),
}


@pytest.fixture
def train(ropewalk: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Trains a checkpoint; returns the run's folder, and logs what it took."""
    (tmp_path / "variety_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps({"prompt": [SYSTEM, user(text)]}) + "\n" for text in QUESTIONS))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))

    def run(model: Path, *overrides: str, resume: bool = False) -> Path:
        folder = tmp_path / "run"
        begin = ("--resume", str(folder)) if resume else ("--config", str(file), "--name", folder.name)
        where = () if resume else (f"output_dir={tmp_path}", f"model.path={model}", f"data.source={source}")
        began = time.monotonic()
        watched = ropewalk("train", *begin, *where, *overrides)
        peak = wait_and_measure(watched)
        assert watched.process.returncode == 0, watched.output()[-3000:]
        mismatch = max(row.get("mismatch/logprob_max", 0.0) for row in rows(folder))
        took = time.monotonic() - began
        logger.info("%.0f s, %.1f GB, mismatch %.1e", took, peak / 1e9, mismatch)
        assert peak < MOST_BYTES
        return folder

    return run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def wait_and_measure(run: Watched) -> float:
    """Wait for a run's end; returns the most memory that its processes had together, in bytes (PSS)."""
    peak, deadline = 0.0, time.monotonic() + RUN_TIMEOUT_S
    while run.process.poll() is None:
        if time.monotonic() > deadline:
            pytest.fail(f"still running after {RUN_TIMEOUT_S:g} s:\n{run.output()[-3000:]}")
        peak = max(peak, sum(map(memory_of, run.alive())))
        time.sleep(5)
    return peak


def memory_of(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0.0


def assert_trained(folder: Path, start: Path, *, iterations: int = 3) -> set[str]:
    """Assert that each iteration was trained on what the engine sampled; returns the names of the moved weights."""
    from safetensors.torch import load_file

    metrics = rows(folder)
    assert [row["iteration"] for row in metrics] == list(range(1, iterations + 1))
    assert all(row["train/grad_norm"] > 0 for row in metrics)
    # Nothing is measured in an iteration whose samples are all of older weights.
    mismatches = [row["mismatch/logprob_max"] for row in metrics if "mismatch/logprob_max" in row]
    assert 0 < max(mismatches) <= MOST_MISMATCH
    before, after = load_file(start / "model.safetensors"), load_file(folder / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(weight.isfinite().all() for weight in after.values())
    return {name for name, weight in after.items() if not weight.equal(before[name])}


def names_of(checkpoint: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def difference_to_transformers(folder: Path, checkpoint: Path, *, iteration: int) -> float:
    """Return the largest difference of log-probabilities between the engine's, as recorded, and those of transformers.

    Args:
        folder: The run's folder.
        checkpoint: The weights that sampled the iteration's answers.
        iteration: The iteration whose answers are compared, all of them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    records = [TrajectoryRecord.model_validate_json(line) for line in read_lines(folder)]
    turns = [turn for record in records if record.iteration == iteration for turn in record.turns]
    assert len(turns) == 16
    largest = 0.0
    for turn in turns:
        prompt = tokenizer.encode(turn.context, add_special_tokens=False)
        assert len(prompt) == turn.context_tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *turn.tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(turn.tokens)), list(turn.tokens)]
        largest = max(largest, float((logprobs - torch.tensor(turn.logprobs)).abs().max()))
    logger.info("difference to transformers %.1e", largest)
    return largest


@pytest.mark.parametrize("name", CASES)
def test_trains_by(name: str, train: Callable[..., Path]) -> None:
    case, start = CASES[name], published_model()
    folder = train(start, *case.words)
    assert assert_trained(folder, start) == {weight for weight in names_of(start) if case.moved in weight}
    assert difference_to_transformers(folder, start, iteration=1) <= MOST_DIFFERENCE
    last = rows(folder)[-1]
    assert all(last[metric] > 0 for metric in case.positive)


def test_answers_are_as_stale_as_allowed(train: Callable[..., Path]) -> None:
    start = published_model()
    folder = train(start, "rollout.max_staleness=2")
    assert assert_trained(folder, start) == names_of(start)
    assert difference_to_transformers(folder, start, iteration=1) <= MOST_DIFFERENCE
    shares = [[row[f"rollout/staleness/{age}"] for age in range(3)] for row in rows(folder)]
    assert all(sum(share) == pytest.approx(1.0) for share in shares)
    assert any(share[0] < 1.0 for share in shares)


def test_resumed_run_answers_with_the_weights_that_it_had_trained(
    train: Callable[..., Path], tmp_path: Path
) -> None:
    start, halfway = published_model(), tmp_path / "halfway"
    folder = train(start, "trainer.iterations=2", "trainer.checkpoint_interval=2")
    assert assert_trained(folder, start, iterations=2) == names_of(start)
    shutil.copytree(folder / "policy", halfway)
    train(start, "trainer.iterations=3", resume=True)
    assert assert_trained(folder, halfway) == names_of(start)
    assert difference_to_transformers(folder, halfway, iteration=3) <= MOST_DIFFERENCE


def test_what_was_taught_by_a_labelled_file_is_trained_on(train: Callable[..., Path], tmp_path: Path) -> None:
    start, taught = published_model(), tmp_path / "taught"
    labelled = tmp_path / "labelled.jsonl"
    chats = [
        [SYSTEM, user(text), {"role": "assistant", "content": answer}] for text, answer in QUESTIONS.items()
    ]
    labelled.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    loss = teach(labelled, start, taught)
    assert loss == pytest.approx(loss_of_transformers(chats, taught), abs=MOST_DIFFERENCE)

    folder = train(taught)
    assert assert_trained(folder, taught) == names_of(start)
    assert difference_to_transformers(folder, taught, iteration=1) <= MOST_DIFFERENCE


def teach(labelled: Path, start: Path, taught: Path) -> float:
    """Fine-tune a checkpoint on a file, three updates; returns the loss after them."""
    from rl_bridge.data.traces import load_traces, samples_of
    from rl_bridge.loops.sft import SftConfig, begin_checkpoint, fine_tune, trainer_settings
    from rl_bridge.tokens.chat import ChatTokenizer
    from rl_bridge.trainer.trainer import Trainer

    config = SftConfig(
        batch_size=4, max_length=64, learning_rate=1e-5, max_updates=3, evaluate_every=3, num_threads=2
    )
    tokenizer = ChatTokenizer(start)
    traces = [samples_of(trace, tokenizer, index=0) for trace in load_traces(labelled)]
    begin_checkpoint(taught, start)
    learner = Trainer(trainer_settings(config, taught.parent, start))
    result = fine_tune(learner, traces, traces, config, folder=taught, on_validation=lambda _: None)
    before, after = result.validations
    assert result.kept == after
    assert after.validation_loss < before.validation_loss
    return after.validation_loss


def loss_of_transformers(chats: list[list[dict[str, str]]], checkpoint: Path) -> float:
    """Return the mean of -log p over the tokens of the last messages, the token that ends them included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    losses: list[float] = []
    for chat in chats:
        opened = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(opened, add_special_tokens=False)
        answer = tokenizer.encode(chat[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none").tolist()
    return sum(losses) / len(losses)
