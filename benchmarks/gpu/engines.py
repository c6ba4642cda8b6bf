"""Checks of the generator, and of a whole run."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.child import Reporter, SkipError
from benchmarks.gpu.shapes import SHAPES, random_weights, shape_of, write_checkpoint

GPU_OVERRIDES = ("trainer.num_gpus=1", "model.dtype=bfloat16")
LOAD_TIMEOUT_S, ANSWER_TIMEOUT_S = 200.0, 120.0
KEPT_LINES = 10
ITERATIONS = 3
STARTED = "everything has started"
"""Start of the line that a run prints once all its roles serve."""


def _start_engine(
    path: Path, reporter: Reporter, *, share: float, max_length: int, at_once: int, sleeps: bool = False
) -> Any:
    """Start a generator's engine as a run does (on a GPU, in its own process) and return it once it is ready."""
    from rl_bridge.config import Config
    from rl_bridge.generator.replica import make_engine
    from rl_bridge.generator.vllm_api import engine_environment

    os.environ.update(engine_environment(on_gpu=not reporter.dry))
    cache = {"gpu_memory_utilization": share, "kv_cache_mb": 32}
    keys = {
        "model": {"dtype": "float32" if reporter.dry else "bfloat16"},
        "monarch": {"colocate": sleeps},
        "rollout": {"max_length": max_length, "max_num_seqs": at_once, **cache},
    }
    engine = make_engine(Config.model_validate(keys), path, seed=0)
    engine.start().result(LOAD_TIMEOUT_S)
    return engine


def _generate(engine: Any, prompts: list[list[int]], *, temperature: float, tokens: int) -> Any:
    from rl_bridge.types import SamplingSettings

    sampling = SamplingSettings(temperature=temperature, max_new_tokens=tokens)
    return engine.generate(prompts, sampling).result(ANSWER_TIMEOUT_S)


def _draw_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def reload(reporter: Reporter) -> None:
    """Load another model's weights into an engine, awake and asleep; its answers must equal a fresh engine's."""
    reporter.device()
    dtype = torch.float32 if reporter.dry else torch.bfloat16
    prompts = _draw_prompts(4, 8, SHAPES["tiny"]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write_checkpoint(Path(folder) / str(seed), "tiny", device="cpu", dtype=dtype, seed=seed)
            for seed in (1, 2)
        ]
        state = random_weights(shape_of("tiny"), device="cpu", dtype=dtype, seed=2)
        start_time = time.perf_counter()
        engine = _start_engine(paths[0], reporter, share=0.25, max_length=64, at_once=8, sleeps=True)
        reporter.record("start", time.perf_counter() - start_time, "s")
        before = _generate(engine, prompts, temperature=0, tokens=16)
        for version in (1, 2, 3):  # repeatedly, as in a run
            load = engine.load(version, state).result(ANSWER_TIMEOUT_S)
        reporter.record("load", 1000 * load.load_s, "ms")
        for version in (4, 5):  # as in a run whose trainer shares the GPU
            start_time, awake = time.perf_counter(), _free_gb(reporter)
            engine.sleep().result(ANSWER_TIMEOUT_S)
            asleep_ms = 1000 * (time.perf_counter() - start_time)
            reporter.record(f"falling asleep, time {version - 3}", asleep_ms, "ms")
            reporter.record("memory that it leaves to others asleep", _free_gb(reporter) - awake, "GB")
            load = engine.load(version, state).result(ANSWER_TIMEOUT_S)
            reporter.record(f"waking and load, time {version - 3}", 1000 * load.load_s, "ms")
        after = _generate(engine, prompts, temperature=0, tokens=16)
        engine.close()
        fresh = _start_engine(paths[1], reporter, share=0.25, max_length=64, at_once=8)
        expected = _generate(fresh, prompts, temperature=0, tokens=16)
        fresh.close()
    same = [a.tokens == b.tokens for a, b in zip(before, after, strict=True)]
    reporter.record("answers that the new weights left alone, of 4", sum(same), at_most=0)
    same = [a.tokens == b.tokens for a, b in zip(after, expected, strict=True)]
    reporter.record("answers that a fresh engine gives otherwise, of 4", 4 - sum(same), at_most=0)
    actual, reference = (
        [at for answer in answers for at in answer.logprobs] for answers in (after, expected)
    )
    difference = max(abs(a - b) for a, b in zip(actual, reference, strict=True))
    bound = 1e-5 if reporter.dry else 0.02
    reporter.record("log-probabilities, from a fresh engine's", difference, at_most=bound)


def _free_gb(reporter: Reporter) -> float:
    return 0.0 if reporter.dry else torch.cuda.mem_get_info()[0] / 1e9


def decode(reporter: Reporter) -> None:
    """Measure the maximum throughput of a generator: a full batch of answers of maximum length."""
    device, size, architecture = reporter.device(), reporter.size, shape_of(reporter.size)
    count, before, tokens = (8, 8, 16) if reporter.dry else (256, 128, 512)
    if device == "cuda" and 2.4 * architecture.parameters > torch.cuda.mem_get_info()[0]:
        raise SkipError(f"{2.4 * architecture.parameters / 1e9:.0f} GB have no room on this card")
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "policy", size, device=device, dtype=torch.bfloat16)
        torch.cuda.empty_cache()  # the engine sizes its cache by the free memory
        start_time = time.perf_counter()
        engine = _start_engine(path, reporter, share=0.85, max_length=before + tokens, at_once=count)
        reporter.record("start", time.perf_counter() - start_time, "s")
        prompts = _draw_prompts(count, before, architecture.vocabulary)
        _generate(engine, prompts[:4], temperature=1.0, tokens=8)
        start_time = time.perf_counter()
        answers = _generate(engine, prompts, temperature=1.0, tokens=tokens)
        elapsed_s = time.perf_counter() - start_time
        engine.close()
    generated = sum(len(answer.tokens) for answer in answers)
    reporter.record(f"answers to {count} prompts of {before} tokens", generated / elapsed_s, "tokens/s")
    forward = architecture.train_flops([before + len(answer.tokens) for answer in answers], generated) / 3
    reporter.record("the model's operations", forward / elapsed_s / 1e12, "TFLOP/s")


def blackjack(reporter: Reporter) -> None:
    """Run `ropewalk train` on BlackJack for three iterations, placed on the GPUs that are available."""
    device = reporter.device()
    if device == "cpu":
        placement, overrides = "on the CPU", ["rollout.batch_size=64"]
    else:
        placement, overrides = "a card each for trainer and generator", list(GPU_OVERRIDES)
        if torch.cuda.device_count() == 1:
            placement = "trainer and generator share the card"
            overrides.append("monarch.colocate=true")
    reporter.record("how", placement)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "rl_bridge.train", "--config", "examples/grpo_blackjack/config.yaml"),
            *("--name", "check", f"output_dir={folder}", f"trainer.iterations={ITERATIONS}"),
            *("trainer.checkpoint_interval=0", "evaluation.interval=0", "evaluation.episodes=64", *overrides),
        ]
        start_time = time.perf_counter()
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, **streams) as training:
            assert training.stdout is not None
            last_lines = deque[str](maxlen=KEPT_LINES)
            for line in training.stdout:  # printed at once, for checks that time out
                after = time.perf_counter() - start_time
                print(f"{after:6.1f} s  {line}", end="", flush=True)
                last_lines.append(line)
                if line.startswith(STARTED):
                    reporter.record("start, until everything serves", after, "s")
                elif f"/{ITERATIONS}  " in line:
                    reporter.record(f"iteration {line.split('/')[0].strip()} was over after", after, "s")
        if training.returncode:
            logs = "\n".join(
                log.read_text(errors="replace")[-600:] for log in Path(folder).glob("check/logs/*.log")
            )
            raise RuntimeError(f"the run ended with {training.returncode}: {''.join(last_lines)}\n{logs}")
        rows = [
            json.loads(line) for line in (Path(folder) / "check" / "metrics.jsonl").read_text().splitlines()
        ]
    if len(rows) != ITERATIONS:
        raise RuntimeError(f"expected three iterations, got {len(rows)}")
    difference = max(row["mismatch/logprob_max"] for row in rows)
    bound = 1e-4 if device == "cpu" else 0.2
    reporter.record("mismatch/logprob_max, most of three iterations", difference, at_most=bound)
    last = rows[-1]
    for name in (*(f"time/{phase}_s" for phase in ("rollout", "train", "sync")), "train/tokens_per_s"):
        reporter.record(f"{name}, the last iteration", last[name])
    for phase in ("push_s", "transport_s", "pause_s", "load_s"):
        reporter.record(f"sync/{phase}, the last iteration", last[f"sync/{phase}"], "s")
    # The log has the cost of sharing the GPU as shares of the time since the previous iteration was logged.
    wall_s = last["time/elapsed_s"] - rows[-2]["time/elapsed_s"]
    for role, phase in (("policy", "sleep"), ("trainer", "onload"), ("trainer", "offload")):
        if (share := last.get(f"span/{role}/work/{phase}")) is not None:
            reporter.record(f"{phase}, the last iteration", share * wall_s, "s")
