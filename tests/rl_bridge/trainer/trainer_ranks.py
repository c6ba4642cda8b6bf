"""Real ranks of a trainer, each a process of its own, driven from a test."""

import contextlib
import functools
import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from train_samples import train_sample

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import Config, LoraConfig
from rl_bridge.errors import BridgeError
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import TrainSample

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
    max_length: int = 32,
    **trainer: Any,
) -> TrainerSettings:
    """Of a tiny trainer."""
    parallel = trainer.get("parallel", {})
    procs = math.prod([parallel.get(one, 1) for one in ("hsdp", "fsdp", "tp", "ep")])
    keys = {
        "model": {"dtype": dtype, "lora": lora},
        "rollout": {"max_length": max_length, "temperature": temperature},
        "trainer": {"iterations": 20, "learning_rate": 1e-3, "checkpoint_interval": 0, **trainer},
        "algorithm": algorithm or {},
        "seed": 3,
        "deterministic": deterministic,
        "monarch": {"roles": {"trainer": {"procs": procs}}},
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
        advantage = float(random.normal())
        samples.append(
            train_sample(
                tokens,
                [0, 0] + [1] * (len(tokens) - 2),
                logprob=logprob,
                advantage=advantage,
                reward=advantage,
                trajectory=number // rows_a_trajectory,
                group=number // (4 * rows_a_trajectory),
            )
        )
    return TrainBatch.from_samples(samples)


def branching_batch(seed: int, *, trajectories: int = 24) -> TrainBatch:
    """Rows that begin with a prompt of all, go on with one of a group, and branch; loss tokens where they branch, too.

    Some rows are the beginning of others, and some have no loss token.
    """
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in random.integers(3, 30, size=count)]

    prompt, samples = draw(9), list[TrainSample]()
    for number in range(trajectories):
        if number % 4 == 0:
            of_group, turn = draw(int(random.integers(0, 4))), draw(3)
        answer = [*turn, *draw(int(random.integers(1, 5)))] if number % 2 else turn[: 1 + number // 2 % 3]
        tokens = [*prompt, *of_group, *answer]
        mask = [0] * (len(tokens) - len(answer)) + [
            int(number % 7 != 3 and random.random() < 0.8) for _ in answer
        ]
        mask[-1] = int(number % 7 != 3)
        advantage = float(random.normal())
        samples.append(
            train_sample(
                tokens,
                mask,
                logprob=-3.5,
                advantage=advantage,
                reward=advantage,
                trajectory=number,
                group=number // 4,
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


def join_published(ranks: "Ranks", version: int) -> dict[str, Tensor]:
    """Whole tensors, from the parts of them that each rank publishes; what none publishes is NaN."""
    joined: dict[str, Tensor] = {}
    for parts in ranks.call("published", version):
        for name, shape, box, values in parts:
            whole = joined.setdefault(name, torch.full(shape, float("nan")))
            whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = values
    return joined


class RankDiedError(Exception):
    """The process of a rank ended before it answered."""


@functools.cache
def _process_context() -> BaseContext:
    """How ranks are started: forked from a process that has imported what they need, which takes seconds of a core.

    Not with a GPU: imports ask the driver for it, and a process that was forked after that cannot use it.
    """
    context = get_context("spawn" if torch.cuda.is_available() else "forkserver")
    # The second one is what TorchTitan imports only when a model is made.
    context.set_forkserver_preload(["rl_bridge.trainer.trainer", "torchtitan.trainer"])
    if context.get_start_method() == "forkserver":
        # `Process.start` waits for that process's imports; meanwhile this one imports what `alone` needs.
        forkserver.ensure_running()
        importlib.import_module("rl_bridge.trainer.trainer")
    return context


class Ranks:
    """Processes that make up a trainer. They can be given one trainer after another: `call("build", settings)`."""

    def __init__(self, folder: Path, count: int, *, timeout_s: float = WAIT_S) -> None:
        context = _process_context()
        rendezvous_file = folder / f".meeting-{os.urandom(4).hex()}"
        self._ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for index in range(count):
            ours, theirs = context.Pipe()
            arguments = index, count, rendezvous_file, timeout_s, theirs
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._ends.append(ours)

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
        self.processes[index].kill()
        self.processes[index].join(WAIT_S)

    def stop(self, index: int) -> None:
        """Let a rank hang."""
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

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
        for index in range(count):
            made.kill(index)


def _serve(index: int, count: int, rendezvous_file: Path, timeout_s: float, end: Connection) -> None:
    from rl_bridge.titan.ranks import Rank
    from rl_bridge.trainer.trainer import Trainer

    rank = Rank(index=index, count=count, rendezvous_file=rendezvous_file, timeout_s=timeout_s)
    trainer: Any = None
    answer: Any = None
    while True:
        method, arguments, named = end.recv()
        try:
            if method == "build":
                if trainer is not None:
                    _close_own_groups(trainer)
                    trainer = None
                trainer, answer = Trainer(*arguments, rank), None
            elif method in _BY_NAME:
                answer = _BY_NAME[method](trainer, *arguments)
            else:
                answer = getattr(trainer, method)(*arguments, **named)
        except Exception as error:
            answer = error
        end.send(answer)


def _close_own_groups(trainer: Any) -> None:
    """Close what a trainer does not share with the next one: each group of gloo's has a thread that polls.

    Those of the meshes stay: models of one layout share them, and functional collectives look them up by name.
    """
    trainer._checkpoints.close()
    parts = trainer._parts
    for group in (trainer._checkpoints.group, parts._firsts, parts._siblings):
        if group is not None:
            dist.destroy_process_group(group)


def _write_slowly(_: Any, seconds: float) -> None:
    from rl_bridge.trainer import checkpoints

    write = checkpoints.save_file

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    checkpoints.save_file = slowly


def _waits(_: Any) -> list[timedelta]:
    groups = [one for one in dist.distributed_c10d._world.pg_map if dist.get_backend(one) != "fake"]
    return sorted(one._get_backend(torch.device("cpu")).options._timeout for one in groups)


def _published(trainer: Any, version: int) -> list[tuple[Any, ...]]:
    from rl_bridge.weights.snapshot import own_shards

    with trainer.weights(version) as state:
        shards = own_shards(state, rank=dist.get_rank())
        return [(name, one.full_shape, one.box, one.values()) for name, one in shards.items()]


def _receive(trainer: Any, batch: TrainBatch | BridgeError) -> Any:
    """What a rank gets of what the first one divides."""
    if dist.get_rank():
        return trainer.receive(None)
    return trainer.receive(batch if isinstance(batch, BridgeError) else trainer.divide(batch))


_BY_NAME: dict[str, Callable[..., Any]] = {
    "finish": lambda trainer: trainer._checkpoints.finish(),
    "draw": lambda _: torch.rand(4).tolist(),
    "write slowly": _write_slowly,
    "waits": _waits,
    "published": _published,
    "receive": _receive,
}
"""What tests ask of a rank that is no method of its trainer."""
