"""Every way of training, three iterations each, on published weights: what random ones cannot show."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from e2e.conftest import Watched, rows
from published import published_model

from rl_bridge.records import TrajectoryRecord, read_lines

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3600)]

Start = Callable[..., Watched]
RUN_TIMEOUT_S = 1800.0
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
    },
    "trainer": {"iterations": 3, "learning_rate": 1e-5, "checkpoint_interval": 0, "num_threads": 2},
    "reward": {"function": "variety_reward.variety"},
    "records": {"groups": 4},
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """A way of training.

    Attributes:
        words: The overrides that choose it.
        positive: Metrics that the last iteration has, above 0.
    """

    words: tuple[str, ...]
    positive: tuple[str, ...] = ()


CASES = {
    "grpo_with_kl": Case(words=("algorithm.kl_coef=0.05",), positive=("policy/kl_to_reference",)),
    "ppo": Case(
        words=("algorithm=ppo", "trainer.tokens_per_pass=2048"), positive=("critic/loss", "critic/grad_norm")
    ),
    "two_ranks": Case(words=("monarch.roles.trainer.procs=2", "trainer.num_threads=1")),
}


@pytest.fixture
def train(ropewalk: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Trains a checkpoint; returns the run's folder, and prints what it took."""
    (tmp_path / "variety_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps({"prompt": [SYSTEM, user(text)]}) + "\n" for text in QUESTIONS))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))

    def run(model: Path, *words: str, resume: bool = False) -> Path:
        folder = tmp_path / "run"
        begin = ("--resume", str(folder)) if resume else ("--config", str(file), "--name", folder.name)
        where = () if resume else (f"output_dir={tmp_path}", f"model.path={model}", f"data.source={source}")
        began = time.monotonic()
        watched = ropewalk("train", *begin, *where, *words)
        peak = wait_and_measure(watched)
        assert watched.process.returncode == 0, watched.output()[-3000:]
        mismatch = max(row.get("mismatch/logprob_max", 0.0) for row in rows(folder))
        print(f"{time.monotonic() - began:.0f} s, {peak / 1e9:.1f} GB, mismatch {mismatch:.1e}")
        assert peak < MOST_BYTES
        return folder

    yield run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def wait_and_measure(run: Watched) -> float:
    """Wait for a run's end; returns the most memory that its processes had together, in bytes (PSS)."""
    peak, deadline = 0.0, time.monotonic() + RUN_TIMEOUT_S
    while run.process.poll() is None:
        if time.monotonic() > deadline:
            pytest.fail(f"still running after {RUN_TIMEOUT_S:g} s:\n{run.output()[-3000:]}")
        peak = max(peak, sum(map(memory_of, run.alive())))
        time.sleep(2)
    return peak


def memory_of(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0.0


def assert_trained(folder: Path, start: Path, *, iterations: int = 3) -> set[str]:
    """Assert that every iteration has been trained on what the engine really sampled; returns the weights that moved."""
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
    print(f"difference to transformers {largest:.1e}")
    return largest


@pytest.mark.parametrize("name", CASES)
def test_trains_by(name: str, train: Callable[..., Path]) -> None:
    case, start = CASES[name], published_model()
    folder = train(start, *case.words)
    assert assert_trained(folder, start) == names_of(start)
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
