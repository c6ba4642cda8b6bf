"""Real ranks of a trainer, each a process of its own, driven from a test."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import Config, LoraConfig
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import NO_VERSION, TrainSample

WAIT_S = 120.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def settings(
    path: Path,
    *,
    folder: Path,
    algorithm: dict[str, Any] | str | None = None,
    temperature: float = 1.0,
    deterministic: bool = False,
    dtype: str = "float32",
    lora: LoraConfig | None = None,
    **trainer: Any,
) -> TrainerSettings:
    """Of a tiny trainer."""
    options = {"iterations": 20, "learning_rate": 1e-3, "checkpoint_interval": 0, **trainer}
    keys = {
        "model": {"dtype": dtype, "lora": lora},
        "rollout": {"max_length": 32, "temperature": temperature},
        "trainer": options,
        "algorithm": algorithm or {},
        "seed": 3,
        "deterministic": deterministic,
        "monarch": {"roles": {"trainer": {"procs": options.get("tensor_parallel", 1)}}},
    }
    return TrainerSettings(
        config=Config.model_validate(keys), model_path=str(path), folder=str(folder), max_loss_tokens=8
    )


def batch(
    seed: int, *, rows: int = 24, logprob: float = -3.5, rows_a_trajectory: int = 1, longest: int = 8
) -> TrainBatch:
    """Rows of unequal length with several loss tokens each; some share their contexts."""
    random = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for number in range(rows):
        length = int(random.integers(4, longest + 1))
        tokens = [int(token) for token in random.integers(3, 30, size=length)]
        if number % 3 == 0 and samples:
            tokens = [*samples[-1].tokens[:-1], tokens[-1]]
        mask = [False, False, *([True] * (len(tokens) - 2))]
        advantage = float(random.normal())
        samples.append(
            TrainSample(
                tokens=tokens,
                loss_mask=mask,
                logprobs=[logprob if one else 0.0 for one in mask],
                advantage=advantage,
                trajectory=number // rows_a_trajectory,
                group=number // (4 * rows_a_trajectory),
                reward=advantage,
                versions=[0 if one else NO_VERSION for one in mask],
            )
        )
    return TrainBatch.from_samples(samples)


def alone(policy: Path, folder: Path, **options: Any) -> Any:
    """A trainer in this process."""
    from rl_bridge.trainer.trainer import Trainer

    return Trainer(settings(policy, folder=folder, **options))


def copied(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.hf_state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], *, atol: float = 0.0) -> None:
    """Weights are the same, to the last bit unless a tolerance is given."""
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0.0)


class RankDiedError(Exception):
    """The process of a rank ended before it answered."""


class Ranks:
    """Processes that make up a trainer. They can be given one trainer after another: `build(settings)`.

    Args:
        folder: For the rendezvous file.
        count: How many.
    """

    def __init__(self, folder: Path, count: int, *, timeout_s: float = WAIT_S) -> None:
        context = get_context("spawn")
        rendezvous_file = folder / f".meeting-{os.urandom(4).hex()}"
        self._ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(index, count, rendezvous_file, timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def build(self, options: TrainerSettings) -> None:
        """Give every rank a new trainer."""
        self.call("build", options)

    def ask(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of every rank's trainer."""
        for end in self._ends:
            end.send((method, arguments, options))

    def answers(self, *indices: int) -> list[Any]:
        """What the ranks answered; an exception is an answer."""
        return [self._answer(index) for index in indices or range(len(self._ends))]

    def raised(self) -> list[Any]:
        """What the ranks answered; the first exception is raised."""
        answers = self.answers()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def call(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Ask, and have the answers."""
        self.ask(method, *arguments, **options)
        return self.raised()

    def ask_one(self, index: int, method: str, *arguments: Any) -> Any:
        """Have one rank's answer, while the others are not asked."""
        self._ends[index].send((method, arguments, {}))
        return self._answer(index)

    def kill(self, index: int) -> None:
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[index].join(WAIT_S)

    def stop(self, index: int) -> None:
        """Let a rank hang."""
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def end(self) -> None:
        for index, process in enumerate(self.processes):
            if process.is_alive():
                self.kill(index)

    def _answer(self, index: int) -> Any:
        if not self._ends[index].poll(WAIT_S):
            raise TimeoutError(f"rank {index} did not answer")
        try:
            return self._ends[index].recv()
        except EOFError:
            raise RankDiedError(f"rank {index} ended with {self.processes[index].exitcode}") from None


@contextlib.contextmanager
def ranks(folder: Path, count: int, *, timeout_s: float = WAIT_S) -> Iterator[Ranks]:
    """Ranks that are gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Ranks(folder, count, timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.end()


def _serve(index: int, count: int, rendezvous_file: Path, timeout_s: float, end: Connection) -> None:
    from rl_bridge.titan.ranks import Rank
    from rl_bridge.trainer import checkpoints
    from rl_bridge.trainer.trainer import Trainer
    from rl_bridge.weights.snapshot import own_shards

    rank = Rank(index=index, count=count, rendezvous_file=rendezvous_file, timeout_s=timeout_s)
    trainer: Trainer | None = None
    while True:
        method, arguments, named = end.recv()
        try:
            if method == "build":
                trainer = Trainer(*arguments, rank)
                end.send(None)
            elif method == "finish":
                assert trainer is not None
                end.send(trainer._checkpoints.finish())
            elif method == "write slowly":
                write = checkpoints.save_file
                checkpoints.save_file = partial(_slowly, *arguments, write)
                end.send(None)
            elif method == "waits":
                groups = [
                    one for one in dist.distributed_c10d._world.pg_map if dist.get_backend(one) != "fake"
                ]
                end.send(sorted(one._get_backend(torch.device("cpu")).options._timeout for one in groups))
            elif method == "published":
                assert trainer is not None
                with trainer.weights(*arguments) as state:
                    shards = own_shards(state, rank=index)
                    end.send([(name, one.full_shape, one.box, one.values()) for name, one in shards.items()])
            elif method == "draw":
                end.send(torch.rand(4).tolist())
            else:
                end.send(getattr(trainer, method)(*arguments, **named))
        except Exception as error:
            end.send(error)


def _slowly(seconds: float, write: Callable[..., None], *arguments: Any) -> None:
    time.sleep(seconds)
    write(*arguments)


def divisible_policy(folder: Path) -> Path:
    """A tiny checkpoint whose attention heads can be shared by two ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).to(torch.float32).save_pretrained(str(folder))
    return folder
