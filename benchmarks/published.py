"""Tokens/s of the trainer's step and of the engine, next to the same work in plain transformers and plain vLLM.

Model, prompts, sampling, log-probabilities, threads and dtype (float32) are equal. Each side has a process of its own;
rounds alternate. The plain sides choose their batch size before. The trainer's rate counts prompts and answers of all
samples, the engine's sampled tokens. ./scripts/published-model makes the model. Needs the training stack:
  python -m benchmarks.published             at most 20 minutes on two cores
  python -m benchmarks.published --quick     does it run?
"""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_least,
    in_rounds,
    main,
    ratio,
    setting,
)

MODEL: Final = "models/SmolLM2-135M-Instruct"
RATE: Final = "tokens/s"
LEARNING_RATE: Final = 1e-6
TOKENS: Final = range(1000, 40_000)
SHARED_TOKENS, OWN_TOKENS = 41, 16
"""Of each prompt: as in a chat with worked examples, most of which all prompts share."""
PROMPT_TOKENS: Final = SHARED_TOKENS + OWN_TOKENS
SIZES: Final = (8, 32, 128)  # of batches, from which each plain side takes its best one
WARM_UP: Final = -1  # number of the round with whose rows the plain sides choose their batch size
KV_CACHE_MB: Final = 1024
ROUND_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: prompts a round, samples of each, tokens of an answer, threads of a process."""

    model: str = setting(MODEL, option=f"folder of the model ({MODEL})", read=str)
    rounds: int = setting(3, quick=1, option="rounds, after one that warms up (3)")
    threads: int = setting(os.cpu_count() or 1, option="threads of a process (one per core)")
    prompts: int = setting(16, quick=4)
    samples: int = setting(8, quick=4)
    tokens: int = setting(16, quick=8)

    def draw_rows(self, number: int, *, answers: bool = False) -> list[list[int]]:
        """Return the prompts of a round, each repeated for its samples, followed by answers of random tokens."""
        source, length = random.Random(number + 2), self.tokens if answers else 0
        beginning = random.Random(0).choices(TOKENS, k=SHARED_TOKENS)
        prompts = [[*beginning, *source.choices(TOKENS, k=OWN_TOKENS)] for _ in range(self.prompts)]
        return [[*row, *source.choices(TOKENS, k=length)] for row in prompts for _ in range(self.samples)]


Round = Callable[[int], int]  # does the work of a round, by its number; returns its tokens
Side = Callable[[Plan], Round]
Rows = Sequence[Sequence[int]]


def make_config(plan: Plan) -> Any:
    """Return the configuration of our trainer and engine."""
    from rl_bridge.config import Config

    length = PROMPT_TOKENS + plan.tokens
    rollout = {"max_length": length, "max_num_seqs": max(SIZES), "kv_cache_mb": KV_CACHE_MB}
    trainer = {"iterations": 1000, "num_threads": plan.threads, "learning_rate": LEARNING_RATE}
    return Config.model_validate({"model": {"dtype": "float32"}, "rollout": rollout, "trainer": trainer})


def train_by_ours(plan: Plan) -> Round:
    """Return a round of `Trainer.step`."""
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer
    from rl_bridge.types import NO_VERSION, TrainSample

    form: dict[str, Any] = {"model_path": plan.model, "max_loss_tokens": plan.tokens, "folder": "none"}
    trainer = Trainer(TrainerSettings(config=make_config(plan), **form))  # it writes no checkpoint
    mask = [False] * PROMPT_TOKENS + [True] * plan.tokens
    known: dict[str, Any] = {"loss_mask": mask, "logprobs": [-5.0 if sampled else 0.0 for sampled in mask]}

    def do_round(number: int) -> int:
        known["versions"] = [trainer.version if sampled else NO_VERSION for sampled in mask]
        samples = [
            TrainSample(tokens=row, advantage=(-1.0) ** i, trajectory=i, group=i // plan.samples, **known)
            for i, row in enumerate(plan.draw_rows(number, answers=True))
        ]
        trainer.step(TrainBatch.from_samples(samples))
        return len(samples) * len(mask)

    return do_round


def in_best_batches(do_rows: Callable[[Rows, int], int], draw_rows: Callable[[int], Rows]) -> Round:
    """Return a round in batches of the size with which one batch takes the least time for each row."""
    rows, seconds = draw_rows(WARM_UP), {}
    for size in (min(SIZES), *sorted({min(size, len(rows)) for size in SIZES})):  # the first one warms up
        began = time.perf_counter()
        do_rows(rows[:size], size)
        seconds[size] = (time.perf_counter() - began) / size
    return lambda number: do_rows(draw_rows(number), min(seconds, key=seconds.__getitem__))


def train_plainly(plan: Plan) -> Round:
    """Return a round of forward and backward passes of transformers' own model, in batches of its best size."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(plan.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(rows: Rows, size: int) -> int:
        for start in range(0, len(rows), size):
            tokens = torch.tensor(rows[start : start + size])
            logits = model(input_ids=tokens, logits_to_keep=plan.tokens + 1, use_cache=False).logits[:, :-1]
            target = tokens[:, -plan.tokens :]
            logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            advantages = torch.tensor([1.0 if number % 2 else -1.0 for number in range(len(tokens))])
            ratios = (logprobs - logprobs.detach()).exp()
            torch.autograd.backward(-(ratios * advantages[:, None]).sum() / (len(rows) * plan.tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return len(rows) * (PROMPT_TOKENS + plan.tokens)

    return in_best_batches(step, lambda number: plan.draw_rows(number, answers=True))


def sample_by_ours(plan: Plan) -> Round:
    """Return a round of the engine, as a generator uses it."""
    from rl_bridge.generator.replica import make_engine
    from rl_bridge.types import SamplingSettings

    engine = make_engine(make_config(plan), plan.model, seed=0)
    engine.start().result(ROUND_TIMEOUT_S)
    sampling = SamplingSettings(temperature=1.0, max_new_tokens=plan.tokens)

    def do_round(number: int) -> int:
        answers = engine.generate(plan.draw_rows(number), sampling).result(ROUND_TIMEOUT_S)
        return sum(len(answer.tokens) for answer in answers)

    return do_round


def sample_plainly(plan: Plan) -> Round:
    """Return a round of `vllm.LLM.generate`, with as many requests at once as is best."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    # Eager, in this process and with the limits of ours, which are no limits here.
    limits = {"max_model_len": PROMPT_TOKENS + plan.tokens, "kv_cache_memory_bytes": KV_CACHE_MB << 20}
    limits |= {"max_num_seqs": max(SIZES), "max_num_batched_tokens": 8192}
    form = {"enforce_eager": True, "skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
    values = {"dtype": "float32", "logprobs_mode": "processed_logprobs"}
    llm = LLM(model=plan.model, seed=0, **limits, **form, **values)
    sampling = SamplingParams(temperature=1.0, max_tokens=plan.tokens, logprobs=0, detokenize=False)

    def generate(prompts: Rows, size: int) -> int:
        tokens = 0
        for start in range(0, len(prompts), size):
            wanted = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + size]]
            outputs = llm.generate(wanted, sampling, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens

    generate(plan.draw_rows(WARM_UP), max(SIZES))  # caches the prompts
    return in_best_batches(generate, plan.draw_rows)


PARTS: Final = {  # our side first
    "trainer": {"our trainer": train_by_ours, "transformers": train_plainly},
    "engine": {"our engine": sample_by_ours, "vLLM": sample_plainly},
}


def work(side: Side, plan: Plan, connection: "Connection[tuple[int, float], int]") -> NoReturn:
    """Work in a child process: once ready, and after each round whose number is received, send tokens and seconds."""
    do_round, tokens, began = side(plan), 0, time.perf_counter()
    while True:
        connection.send((tokens, time.perf_counter() - began))
        number = connection.recv()
        began = time.perf_counter()
        tokens = do_round(number)


def receive(connection: "Connection[int, tuple[int, float]]") -> tuple[int, float]:
    """Return what `work` sends next; raises BenchmarkError, or EOFError if its process has ended."""
    if not connection.poll(ROUND_TIMEOUT_S):
        raise BenchmarkError(f"a side gave no answer within {ROUND_TIMEOUT_S:g} s")
    return connection.recv()


@contextmanager
def start_side(side: Side, plan: Plan) -> Iterator["Connection[int, tuple[int, float]]"]:
    """Start `work` of a side in a process of its own; yields the connection to it once it is ready."""
    from rl_bridge.generator.vllm_api import engine_environment

    os.environ.update(engine_environment(on_gpu=False), OMP_NUM_THREADS=str(plan.threads))  # inherited
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=work, args=(side, plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        receive(ours)
        yield ours
    finally:
        process.kill()
        process.join()


def measure(plan: Plan, measurements: Measurements) -> None:
    """Measure trainer and engine, one after the other, each in rounds that alternate with the plain side's."""
    if not Path(plan.model, "config.json").is_file():
        raise BenchmarkError(f"there is no model in {plan.model}; ./scripts/published-model makes one")
    for part, sides in PARTS.items():
        with ExitStack() as stack:
            workers = {name: stack.enter_context(start_side(side, plan)) for name, side in sides.items()}
            for number, name in in_rounds(plan.rounds + 1, sides, f"{part}: "):
                workers[name].send(number)
                tokens, seconds = receive(workers[name])
                if number:  # the first one warms up
                    measurements.add(RATE, name, part, tokens / seconds)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield the bar of each part: at least 0.8 of the plain side's tokens/s."""
    for part, sides in PARTS.items():
        rates = (measurements.median(RATE, name, part) for name in sides)
        yield from at_least(f"{part}: {' / '.join(sides)}", ratio(*rates), 0.8)


ERRORS: Final = (BenchmarkError, EOFError, ConnectionError)  # the last two: a side's process has ended
BENCHMARK = Benchmark(
    about=__doc__, plan=Plan, sections=(measure,), tables={"Throughput": (RATE,)}, bars=bars, errors=ERRORS
)

if __name__ == "__main__":
    main("published")
