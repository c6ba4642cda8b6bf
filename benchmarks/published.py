"""`python -m benchmarks.published`: trainer and engine against plain transformers and plain vLLM."""

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.commandline import count, create_parser, heading, progress, run_measurement, write
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

MODEL: Final = "models/SmolLM2-135M-Instruct"
RATE: Final = "tokens/s"
LEAST: Final = 0.8
LEARNING_RATE: Final = 1e-6
SHARED_TOKENS, OWN_TOKENS = 41, 16
"""Of each prompt: as in a chat with worked examples, most of which all prompts share."""
PROMPT_TOKENS: Final = SHARED_TOKENS + OWN_TOKENS
SIZES: Final = (8, 32, 64, 256)
"""Batch sizes from which each plain side takes its best one."""
ROUND_TIMEOUT_S: Final = 1800.0

_DESCRIPTION = """\
Tokens per second of the trainer's step and of the engine, as ratios to the same work in plain transformers and plain
vLLM: model, prompts, sampling, log-probabilities, threads and dtype (float32) are equal. Each side has a process of its
own; rounds alternate. The plain sides choose their batch size before. The trainer's rate counts prompts and answers of
all samples, the engine's sampled tokens. scripts/published-model makes the model."""
_EXAMPLES = """\
examples:
  python -m benchmarks.published             an hour on two cores
  python -m benchmarks.published --quick     does it run?"""


@dataclass(frozen=True)
class Plan:
    """What is measured: prompts a round, samples of each, tokens of an answer, threads of a process."""

    model: str
    prompts: int
    samples: int
    tokens: int
    threads: int
    rounds: int

    def draw_rows(self, number: int, *, answers: bool = False) -> list[list[int]]:
        """Return the prompts of a round, each repeated for its samples, followed by answers of random tokens."""
        beginning, first = draw(0, SHARED_TOKENS), (number + 2) << 32
        ends = [
            draw(first + index // self.samples, OWN_TOKENS) for index in range(self.prompts * self.samples)
        ]
        length = self.tokens if answers else 0
        return [[*beginning, *end, *draw(-first - index, length)] for index, end in enumerate(ends)]


def draw(seed: int, length: int) -> list[int]:
    """Return random tokens."""
    generator = random.Random(seed)
    return [generator.randrange(1000, 40_000) for _ in range(length)]


Round = Callable[[int], int]
"""Does the work of a round, by its number; returns its tokens."""


def train_by_ours(plan: Plan) -> Round:
    """Return a round of `Trainer.step`."""
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.config import Config
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer
    from rl_bridge.types import NO_VERSION, TrainSample

    length = PROMPT_TOKENS + plan.tokens
    trainer_keys = {"iterations": 1000, "num_threads": plan.threads, "learning_rate": LEARNING_RATE}
    keys = {"model": {"dtype": "float32"}, "rollout": {"max_length": length}, "trainer": trainer_keys}
    config = Config.model_validate(keys)
    settings = TrainerSettings(  # no checkpoint is written to the folder
        config=config, model_path=plan.model, folder="unused", max_loss_tokens=plan.tokens
    )
    trainer = Trainer(settings)

    def do_round(number: int) -> int:
        common: dict[str, Any] = {
            "loss_mask": [False] * PROMPT_TOKENS + [True] * plan.tokens,
            "logprobs": [0.0] * PROMPT_TOKENS + [-5.0] * plan.tokens,
            "versions": [NO_VERSION] * PROMPT_TOKENS + [trainer.version] * plan.tokens,
        }
        samples = [
            TrainSample(
                tokens=row, advantage=(-1.0) ** index, trajectory=index, group=index // plan.samples, **common
            )
            for index, row in enumerate(plan.draw_rows(number, answers=True))
        ]
        trainer.step(TrainBatch.from_samples(samples))
        return len(samples) * length

    return do_round


def train_plainly(plan: Plan) -> Round:
    """Return a round of forward and backward passes of transformers' own model, in batches of its best size."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(plan.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(rows: Sequence[Sequence[int]], size: int) -> int:
        for start in range(0, len(rows), size):
            tokens = torch.tensor(rows[start : start + size])
            logits = model(input_ids=tokens, logits_to_keep=plan.tokens + 1, use_cache=False).logits[:, :-1]
            target = tokens[:, -plan.tokens :]
            logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            advantages = torch.tensor([1.0 if number % 2 else -1.0 for number in range(len(tokens))])
            ratios = (logprobs - logprobs.detach()).exp()
            loss = -(ratios * advantages[:, None]).sum() / (len(rows) * plan.tokens)
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return len(rows) * (PROMPT_TOKENS + plan.tokens)

    warm = plan.draw_rows(-1, answers=True)
    best = choose_size(len(warm), lambda size: step(warm[:size], size))
    return lambda number: step(plan.draw_rows(number, answers=True), best)


def sample_by_ours(plan: Plan) -> Round:
    """Return a round of the engine, as a generator uses it."""
    from rl_bridge.config import Config
    from rl_bridge.generator.replica import make_engine
    from rl_bridge.types import SamplingSettings

    length = PROMPT_TOKENS + plan.tokens
    rollout = {"max_length": length, "max_new_tokens": plan.tokens, "max_num_seqs": max(SIZES)}
    config = Config.model_validate({"model": {"dtype": "float32"}, "rollout": rollout})
    engine = make_engine(config, plan.model, seed=0)
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

    # Eager and with the limits of ours, which are no limits here.
    sizes: dict[str, Any] = {"max_model_len": PROMPT_TOKENS + plan.tokens, "max_num_seqs": max(SIZES)}
    memory: dict[str, Any] = {"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 1 << 30}
    form: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True, "dtype": "float32"}
    form["distributed_executor_backend"] = "uni"  # in this process, as ours
    llm = LLM(model=plan.model, logprobs_mode="processed_logprobs", seed=0, **sizes, **memory, **form)
    sampling = SamplingParams(temperature=1.0, max_tokens=plan.tokens, logprobs=0, detokenize=False)

    def generate(prompts: Sequence[Sequence[int]], size: int) -> int:
        tokens = 0
        for start in range(0, len(prompts), size):
            wanted: Any = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + size]]
            outputs = llm.generate(wanted, sampling, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens

    warm = plan.draw_rows(-1)
    generate(warm, max(SIZES))  # caches the prompts
    best = choose_size(len(warm), lambda size: generate(warm[:size], size))
    return lambda number: generate(plan.draw_rows(number), best)


SIDES: Final = {
    "our trainer": train_by_ours,
    "transformers": train_plainly,
    "our engine": sample_by_ours,
    "vLLM": sample_plainly,
}
PAIRS: Final = {"trainer": ("our trainer", "transformers"), "engine": ("our engine", "vLLM")}


def choose_size(total: int, work: Callable[[int], object]) -> int:
    """Return the batch size with which a batch takes the least time for each of its members."""
    seconds: dict[int, float] = {}
    for size in (min(SIZES), *sorted({min(size, total) for size in SIZES})):  # the first one warms up
        began = time.perf_counter()
        work(size)
        seconds[size] = (time.perf_counter() - began) / size
    return min(seconds, key=seconds.__getitem__)


def work(side: str, plan: Plan, connection: "Connection[tuple[int, float], int]") -> NoReturn:
    """Work in a child process: for each number received, do that round and send its tokens and seconds."""
    do_round = SIDES[side](plan)
    while True:
        number = connection.recv()
        began = time.perf_counter()
        tokens = do_round(number)
        connection.send((tokens, time.perf_counter() - began))


@contextmanager
def started(side: str, plan: Plan) -> Iterator[Callable[[int], tuple[int, float]]]:
    """Start a side in a process of its own; yields the function that has it do a round."""
    from rl_bridge.generator.vllm_api import engine_environment

    os.environ.update(engine_environment(on_gpu=False), OMP_NUM_THREADS=str(plan.threads))  # inherited
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=work, args=(side, plan, theirs), daemon=True)
    process.start()
    theirs.close()

    def ask(number: int) -> tuple[int, float]:
        ours.send(number)
        if not ours.poll(ROUND_TIMEOUT_S):
            raise TimeoutError(f"{side}: no answer within {ROUND_TIMEOUT_S:g} s")
        answer: tuple[int, float] = ours.recv()  # EOFError if the process has ended
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def measure(measurements: Measurements, plan: Plan) -> None:
    """Measure trainer and engine, one after the other, each in rounds that alternate with the plain side's."""
    for pair, (ours, plain) in PAIRS.items():
        progress(f"{pair}: loading")
        with started(ours, plan) as ask_ours, started(plain, plan) as ask_plain:
            for number in range(plan.rounds + 1):
                progress(f"{pair}: round {number} of {plan.rounds}")
                for side, ask in ((ours, ask_ours), (plain, ask_plain)):
                    tokens, seconds = ask(number)
                    if number:  # the first one warms up
                        measurements.add(RATE, side, pair, tokens / seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a bar is missed, 2 if it failed."""
    parser = create_parser("published", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--model", default=MODEL, metavar="FOLDER", help="the model (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--threads", type=count, default=os.cpu_count(), metavar="N", help="default: all cores"
    )
    arguments = parser.parse_args(argv)
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"expected a model in {arguments.model!r}; scripts/published-model makes it")
    plan = Plan(arguments.model, 32, 8, 16, arguments.threads, arguments.rounds)
    if arguments.quick:
        plan = replace(plan, prompts=4, samples=4, tokens=8, rounds=1)
    measurements, status = run_measurement(lambda found: measure(found, plan), EOFError, OSError)
    rows, bars = [], []
    for pair, (ours, plain) in PAIRS.items():
        measured, bound = (measurements.median(RATE, side, pair) for side in (ours, plain))
        if measured and bound:
            rows += [(pair, ours, f"{measured:.1f}"), (pair, plain, f"{bound:.1f}")]
            bars.append(Bar(f"{pair}: {ours} / {plain}", measured / bound, LEAST, "at least"))
    print(heading(str(plan)))
    print("\n\n".join([table(("part", "side", RATE), rows), *verdicts(measurements, bars)]))
    write(arguments.json, measurements, bars)
    return status or (0 if arguments.quick or all(bar.met for bar in bars) else 1)


if __name__ == "__main__":
    sys.exit(main())
